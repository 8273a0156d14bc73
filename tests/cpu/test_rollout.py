"""The server behind verl's contract, without Ray: the same class that runs as an actor."""

import asyncio
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import Qwen2ForCausalLM

from verl_dppo.cpu import rollout
from verl_dppo.cpu.generation import build_model
from verl_dppo.cpu.sampling import SampleKey


@pytest.fixture
def server(monkeypatch) -> rollout.Server:
    monkeypatch.setattr(rollout, "omega_conf_to_dataclass", lambda config: config)
    settings = {"seed": 1, "max_num_seqs": 64, "response_length": 12, "max_model_len": None, "ignore_eos": False}
    model = SimpleNamespace(hf_config=tiny.config(), tokenizer=tiny.tokenizer(), generation_config=None)
    made = rollout.Server(SimpleNamespace(**settings), model, 1)
    torch.manual_seed(2)
    asyncio.run(made.load_weights(Qwen2ForCausalLM(tiny.config(initializer_range=0.3)).state_dict(), 4))
    return made


def ask(server, prompt, sample, step=5, **params):
    return server.generate("id", prompt, {"sample_key": SampleKey(step, "p", sample), **params})


async def all_of(*requests):
    return await asyncio.gather(*requests)


def test_requests_are_answered_alike_in_any_order_and_at_any_time(server):
    async def late():
        first = asyncio.create_task(ask(server, [1, 2, 3], 0))
        await asyncio.sleep(0.03)
        others = [asyncio.create_task(ask(server, [1, 2, 3], s)) for s in (3, 1, 2)]
        done = await all_of(first, *others)
        return {0: done[0], 3: done[1], 1: done[2], 2: done[3]}

    async def together():
        return await all_of(*(ask(server, [1, 2, 3], s) for s in range(4)))

    async def both():
        return await together(), await late()

    once, again = asyncio.run(both())
    assert [o.token_ids for o in once] == [again[s].token_ids for s in range(4)]
    assert len({tuple(o.token_ids) for o in once}) == 4
    assert once[0].extra_fields["global_steps"] == 4


def test_a_key_without_a_step_takes_the_step_after_the_weights(server):
    a, b, c = asyncio.run(all_of(ask(server, [1, 2], 0, step=None), ask(server, [1, 2], 0), ask(server, [1, 2], 0, 6)))
    assert a.token_ids == b.token_ids != c.token_ids


def test_limits(server):
    short, long = asyncio.run(all_of(ask(server, [1, 2], 0, max_tokens=3), ask(server, [1, 2], 0)))
    assert len(short.token_ids) == 3
    assert short.token_ids == long.token_ids[:3]
    assert len(long.token_ids) <= 12


def test_a_refused_request_fails_alone(server):
    async def go():
        return await asyncio.gather(ask(server, [1], 0, stop=["x"]), ask(server, [1], 1), return_exceptions=True)

    refused, answered = asyncio.run(go())
    assert "stop" in str(refused)
    assert answered.token_ids


def test_a_failing_model_fails_its_requests_and_the_next_ones_work(server, monkeypatch):
    async def go():
        with monkeypatch.context() as patch:
            patch.setattr(server.generator, "step", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await ask(server, [1, 2], 0)
        return await ask(server, [1, 2], 0)

    assert asyncio.run(go()).token_ids


def test_sleep_holds_requests_until_weights_arrive(server):
    async def go():
        await server.sleep()
        await server.wake_up(tags=["weights"])
        request = asyncio.create_task(ask(server, [1, 2], 0))
        await asyncio.sleep(0.3)
        held = not request.done()
        await server.load_weights(server.model.state_dict(), 5)
        return held, await request

    held, output = asyncio.run(go())
    assert held
    assert output.extra_fields["global_steps"] == 5


def test_abort_returns_what_there_is(server):
    async def go():
        await server.sleep()
        requests = [asyncio.create_task(ask(server, [1, 2], s)) for s in range(3)]
        await asyncio.sleep(0.05)
        await server.abort_all_requests()
        return await all_of(*requests)

    assert {o.stop_reason for o in asyncio.run(go())} == {"aborted"}


@pytest.mark.parametrize("tied", [True, False])
def test_weights_arrive(tied):
    torch.manual_seed(3)
    source = Qwen2ForCausalLM(tiny.config(tie_word_embeddings=tied))
    model = build_model(tiny.config(tie_word_embeddings=tied))
    weights = dict(source.named_parameters())  # a tied weight once, as verl's engines send it
    rollout.load_weights(model, weights)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(model(ids).logits.float(), source(ids).logits, rtol=1e-4, atol=1e-5)


def test_weights_that_do_not_fit_are_refused():
    model = build_model(tiny.config())
    weights = dict(Qwen2ForCausalLM(tiny.config()).named_parameters())
    weights["extra"] = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"unknown \['extra'\], missing \['model.norm.weight'\]"):
        rollout.load_weights(model, weights)
