from itertools import islice

import torch

from verl_dppo.cpu.demo.task import split_of
from verl_dppo.cpu.demo.tokenizer import build_tokenizer
from verl_dppo.cpu.demo.warm_start import (
    IGNORED,
    Phase,
    Stage,
    WarmStart,
    batches,
    examples,
    learning_rate_factor,
    phase_batches,
    train,
)

TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TWO_PHASES = (
    Phase((Stage(2, {"max_terms": 2}), Stage(1)), batch_size=4, learning_rate=1e-3),
    Phase((Stage(1),), batch_size=2, learning_rate=1e-3),
)


def tiny_weights(seed):
    return train(WarmStart(seed, TWO_PHASES), build_tokenizer(), **TINY).state_dict()


def test_the_same_seed_gives_the_same_weights():
    first, second, other = tiny_weights(0), tiny_weights(0), tiny_weights(1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_only_the_response_and_its_end_carry_labels():
    tokenizer = build_tokenizer()
    ids, labels = next(examples(0, tokenizer))
    prompt, response = tokenizer.decode(ids[labels == IGNORED]), tokenizer.decode(labels[labels != IGNORED])
    assert prompt.endswith("<|im_start|>assistant\n")
    assert response.endswith("<|im_end|>")
    assert "answer: " in response
    assert prompt + response == tokenizer.decode(ids)


def test_the_warm_start_never_shows_a_validation_problem():
    tokenizer = build_tokenizer()
    for ids, _ in islice(examples(0, tokenizer), 200):
        expression = tokenizer.decode(ids).removeprefix("<|im_start|>user\n").partition(" =")[0]
        assert split_of(expression) == "train"


def test_batches_hold_chats_of_similar_length():
    tokenizer = build_tokenizer()
    stream = batches(examples(0, tokenizer), batch_size=32, pad_token_id=tokenizer.pad_token_id, seed=0)
    for ids, labels in islice(stream, 16):
        assert ids.shape == labels.shape
        assert (ids == tokenizer.pad_token_id).float().mean() < 0.25


def test_stages_follow_each_other_from_easy_to_hard():
    easy, hard = Stage(3, {"max_terms": 2, "max_digits": 1}), Stage(2)
    phase = Phase((easy, hard), batch_size=8, learning_rate=1e-3)
    widths = [ids.shape[1] for ids, _ in phase_batches(phase, 0, build_tokenizer())]
    assert len(widths) == 5
    assert max(widths[:3]) < 60 < max(widths[3:])


def test_the_learning_rate_rises_and_falls():
    phase = Phase((Stage(60), Stage(40)), batch_size=1, learning_rate=1.0, fall=0.9, warm_up=10)
    factors = [learning_rate_factor(step, phase) for step in (0, 4, 50, 100)]
    assert [round(factor, 6) for factor in factors] == [0.1, 0.5, 0.55, 0.1]
