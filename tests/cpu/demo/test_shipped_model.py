import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.demo.pass_rate import sample_rewards
from verl_dppo.cpu.demo.task import unique_problems


@pytest.fixture(scope="module")
def policy():
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(MODEL_FOLDER)


def test_it_is_small_enough_for_a_repository():
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) < 3_000_000


def test_the_vocabulary_fits_verl_and_tensor_parallelism(policy):
    model, tokenizer = policy
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    assert model.config.vocab_size == config["vocab_size"] <= len(tokenizer)
    assert config["vocab_size"] % 2 == config["num_key_value_heads"] % 2 == 0
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_it_solves_some_problems_and_leaves_room_for_learning(policy):
    torch.manual_seed(0)
    samples = sample_rewards(*policy, unique_problems("validation", seed=0, count=32), samples=8)
    assert 0.2 < samples.reward.mean() < 0.6
    pass_rate = samples.reward.mean(axis=1)
    assert ((pass_rate > 0) & (pass_rate < 1)).mean() > 0.3
    assert samples.finished.mean() > 0.95
    assert samples.length.max() > 1.5 * samples.length.mean()
