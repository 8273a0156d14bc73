import numpy as np
import torch

from verl_dppo.cpu.demo.architecture import build_model
from verl_dppo.cpu.demo.pass_rate import MAX_RESPONSE_LENGTH, complete, histogram, report, sample_rewards
from verl_dppo.cpu.demo.task import unique_problems
from verl_dppo.cpu.demo.tokenizer import build_tokenizer


class RecordingModel:
    """Answers every prompt with `answer: 3` and keeps what it was asked."""

    def __init__(self, tokenizer):
        self.answer = torch.tensor([*tokenizer.encode("answer: 3"), tokenizer.eos_token_id, tokenizer.pad_token_id])

    def generate(self, input_ids, attention_mask, num_return_sequences, **options):
        self.input_ids, self.attention_mask = input_ids, attention_mask
        prompts = input_ids.repeat_interleave(num_return_sequences, dim=0)
        return torch.cat([prompts, self.answer.expand(len(prompts), -1)], dim=1)


def test_prompts_of_unequal_length_all_end_where_the_response_begins():
    tokenizer = build_tokenizer()
    model = RecordingModel(tokenizer)
    complete(model, tokenizer, [[{"role": "user", "content": text}] for text in ("1 =", "1 + 2 + 3 =")], samples=2)
    assert (model.input_ids[:, -1] == tokenizer.encode("\n")[0]).all()
    assert model.attention_mask[:, -1].all()
    assert not model.attention_mask[0, 0]


def test_samples_are_scored_and_measured_per_prompt():
    tokenizer = build_tokenizer()
    entries = unique_problems("validation", seed=0, count=5)
    entries[2]["answer"] = "3"
    samples = sample_rewards(RecordingModel(tokenizer), tokenizer, entries, samples=4, prompts_per_batch=2)
    assert samples.reward.shape == (5, 4)
    assert samples.reward[2].tolist() == [1.0] * 4
    assert (samples.length == len("answer: 3") + 1).all()
    assert samples.finished.all()
    assert "| 1 | 1 |" in report(samples, entries, "command")


def test_a_random_policy_is_cut_at_the_limit_and_earns_nothing():
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    torch.nn.init.zeros_(model.lm_head.weight)  # every byte is equally likely
    samples = sample_rewards(model.eval(), tokenizer, unique_problems("validation", seed=0, count=2), samples=2)
    assert samples.length.max() <= MAX_RESPONSE_LENGTH
    assert not samples.reward.any()


def test_the_histogram_keeps_never_and_always_apart():
    table = histogram(np.asarray([0, 0, 0.05, 0.5, 0.5, 1]))
    counts = [int(line.split("|")[2]) for line in table.splitlines()[2:]]
    assert counts == [2, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1]
