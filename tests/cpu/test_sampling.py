"""A completion is a function of (seed, step, prompt, sample) and the weights, and of nothing else."""

import numpy as np
import pytest
import tiny
import torch

from verl_dppo.cpu.agent_loop import prompt_id, sample_key
from verl_dppo.cpu.generation import Completion, Generator, build_model
from verl_dppo.cpu.sampling import SampleKey, SamplingRule, choose, uniforms

PROMPTS = [[1, 40, 41], [1, 50, 51, 52, 53, 54, 55, 56], [1, 60]]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return build_model(tiny.config(initializer_range=0.3))


def ask(prompt: list[int], key: str, limit: int = 30, rule: SamplingRule | None = None, seed: int = 1) -> Completion:
    return Completion(prompt, rule or SamplingRule(), uniforms(seed, key, prompt, limit))


def run(model: torch.nn.Module, completions: list[Completion], arrivals: int = 0, max_rows: int = 999) -> None:
    """Generate all; `arrivals` > 0 lets that many join every second step."""
    generator, waiting, steps = Generator(model, [tiny.EOS], max_rows), list(completions), 0
    while waiting or generator.active:
        if steps % 2 == 0 and waiting:
            count = min(arrivals or len(waiting), generator.room)
            generator.add(waiting[:count])
            waiting = waiting[count:]
        if generator.active:
            generator.step()
        steps += 1


def asked(limits: bool = True) -> list[Completion]:
    """24 completions of three prompts of different lengths, most with a limit of their own."""
    return [
        ask(prompt, f"7/{p}/{s}", limit=5 + 9 * ((p + s) % 5) if limits else 30)
        for p, prompt in enumerate(PROMPTS)
        for s in range(8)
    ]


def content(completions: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(c.tokens, c.log_probs) for c in completions]


@pytest.fixture(scope="module")
def alone(model: torch.nn.Module) -> list[Completion]:
    completions = asked()
    for completion in completions:
        run(model, [completion])
    return completions


@pytest.mark.parametrize(
    ("order", "arrivals", "max_rows"),
    [("asked", 0, 999), ("reversed", 0, 999), ("shuffled", 3, 999), ("asked", 5, 7), ("reversed", 1, 999)],
)
def test_tokens_depend_on_neither_order_nor_company(model, alone, order, arrivals, max_rows):
    completions = asked()
    ordered = {
        "asked": completions,
        "reversed": completions[::-1],
        "shuffled": [completions[i] for i in np.random.default_rng(0).permutation(len(completions))],
    }[order]
    run(model, ordered, arrivals, max_rows)
    assert [c.tokens for c in completions] == [c.tokens for c in alone]
    for mine, theirs in zip(completions, alone, strict=True):
        np.testing.assert_allclose(mine.log_probs, theirs.log_probs, rtol=0, atol=1e-6)


def test_tokens_do_not_depend_on_the_instance(model, alone):
    other = build_model(model.config)
    other.load_state_dict(model.state_dict())
    completions = asked()
    run(model, completions[::2])
    run(other, completions[1::2])
    assert [c.tokens for c in completions] == [c.tokens for c in alone]


def test_company_changes_a_logit_by_rounding_only(model):
    """What the purity above rests on; a token flips when this moves a cumulative probability across its number."""
    generator = Generator(model, [], 999)
    _, single = generator._prefill(PROMPTS[:1])
    _, together = generator._prefill(PROMPTS * 20)
    # Not exactly 0: the norms round to float32, which absorbs 1e-16 nearly always and makes it 1e-7 once in a while.
    assert (together[0] - single[0]).abs().max() < 1e-6


@pytest.mark.parametrize("change", [{"step": 8}, {"prompt": "b"}, {"sample": 1}])
def test_another_step_prompt_or_sample_is_another_completion(model, change):
    from dataclasses import astuple, replace

    base = SampleKey(7, "a", 0)
    first, second = (ask(PROMPTS[1], "/".join(map(str, astuple(k)))) for k in (base, replace(base, **change)))
    run(model, [first, second])
    assert first.tokens != second.tokens


def test_another_seed_is_another_stream():
    assert uniforms(1, "k", [5], 4) != uniforms(2, "k", [5], 4)


def test_a_longer_limit_does_not_change_the_stream():
    assert uniforms(1, "k", [5], 100)[:4] == uniforms(1, "k", [5], 4)


def test_the_stream_is_uniform():
    values = np.concatenate([uniforms(1, f"{i}", [i], 100) for i in range(1000)])
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    # chi-square, 99 degrees of freedom: 160 is exceeded with probability 1e-4, once and for all (the keys are fixed).
    assert ((counts - 1000) ** 2 / 1000).sum() < 160


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_match_the_softmax(temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.2, -0.5, 0.7, 1.9], dtype=torch.float64)
    count = 200_000
    uniform = torch.tensor(uniforms(3, "frequencies", [], count), dtype=torch.float64)
    tokens, log_probs = choose(logits.expand(count, -1), uniform, [SamplingRule(temperature)] * count)
    expected = torch.softmax(logits / temperature, -1)
    observed = torch.bincount(tokens, minlength=8)
    # chi-square, 7 degrees of freedom: 29.9 is exceeded with probability 1e-4.
    assert ((observed - count * expected) ** 2 / (count * expected)).sum() < 29.9
    torch.testing.assert_close(log_probs, expected.log()[tokens])


def test_generated_frequencies_match_the_model(model):
    """The first two tokens of 4,000 completions, against the model's own probabilities, in 20 cells of equal weight."""
    completions = [ask(PROMPTS[0], f"{s}", limit=2) for s in range(4000)]
    run(model, completions, max_rows=5000)
    cells = []
    for position in (0, 1):
        for c in completions:
            if len(c.tokens) <= position:
                continue
            with torch.no_grad():
                key = tuple(c.tokens[:position])
                cumulative = cumulative_of(model, PROMPTS[0] + list(key))
            high = cumulative[c.tokens[position]]
            low = cumulative[c.tokens[position] - 1] if c.tokens[position] else 0.0
            # The token's cell of the unit interval, entered at random, is uniform if the token was drawn right.
            cells.append(low + (high - low) * np.random.default_rng(len(cells)).random())
    counts = np.histogram(cells, bins=20, range=(0, 1))[0]
    mean = len(cells) / 20
    # chi-square, 19 degrees of freedom: 49 is exceeded with probability 2e-4.
    assert ((counts - mean) ** 2 / mean).sum() < 49


_cumulative: dict[tuple[int, ...], np.ndarray] = {}


def cumulative_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    if tuple(ids) not in _cumulative:
        logits = model(torch.tensor([ids])).logits[0, -1]
        _cumulative[tuple(ids)] = torch.softmax(logits, -1).cumsum(-1).numpy()
    return _cumulative[tuple(ids)]


def test_log_probs_are_the_models(model):
    rule = SamplingRule(temperature=0.7)
    completions = [ask(p, f"{i}", limit=20 + i, rule=rule) for i, p in enumerate(PROMPTS)]
    run(model, completions)
    for c in completions:
        logits = model(torch.tensor([c.prompt + c.tokens])).logits[0, len(c.prompt) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(c.log_probs, expected.numpy(), atol=2e-6)
        assert c.log_probs == [float(np.float32(x)) for x in c.log_probs]


def test_temperature_zero_is_greedy(model):
    first, second = (ask(PROMPTS[1], key, rule=SamplingRule(temperature=0)) for key in ("a", "b"))
    run(model, [first, ask(PROMPTS[0], "c"), second])
    assert first.tokens == second.tokens
    logits = model(torch.tensor([first.prompt + first.tokens])).logits[0, len(first.prompt) - 1 : -1]
    assert first.tokens == logits.argmax(-1).tolist()


def test_top_k_and_top_p_keep_what_they_should():
    logits = torch.log(torch.tensor([[0.05, 0.4, 0.25, 0.2, 0.1]], dtype=torch.float64)).expand(3000, -1)
    uniform = torch.tensor(uniforms(3, "top", [], 3000), dtype=torch.float64)
    third = 1000
    rules = [SamplingRule(top_k=2)] * third + [SamplingRule(top_p=0.7)] * third + [SamplingRule()] * third
    tokens, log_probs = choose(logits, uniform, rules)
    assert set(tokens[:third].tolist()) == {1, 2}
    assert set(tokens[third : 2 * third].tolist()) == {1, 2, 3}
    assert set(tokens[2 * third :].tolist()) == {0, 1, 2, 3, 4}
    assert log_probs[:third].exp().unique().tolist() == pytest.approx([0.25 / 0.65, 0.4 / 0.65])


def test_the_extremes_of_a_number_draw_a_possible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]], dtype=torch.float64).expand(2, -1)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert choose(logits, uniform, [SamplingRule()] * 2)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stop": ["x"]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -5}, "top_k"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(params, named):
    with pytest.raises(ValueError, match=named):
        SamplingRule.from_params(params)


def test_a_prompt_is_known_by_its_content():
    messages = [{"role": "user", "content": "1+1="}]
    assert prompt_id(messages, "a", 0) == prompt_id(np.array(messages, dtype=object), "a", 0)
    assert len({prompt_id(messages), prompt_id(messages, "a"), prompt_id(messages, "a", 0), prompt_id([], "a", 0)}) == 4


def test_the_key_comes_from_either_trainer():
    fields = {"raw_prompt": [{"role": "user", "content": "1"}], "data_source": "a", "extra_info": {"index": 3}}
    v1 = sample_key({**fields, "global_steps": 5, "session_id": 2, "priority": 9, "uid": "changes every run"})
    v0 = sample_key({**fields, "priority": 9})
    assert (v1.step, v1.sample) == (5, 2)
    assert (v0.step, v0.sample) == (None, 9)
    assert v1.prompt == v0.prompt
