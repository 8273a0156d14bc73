import json
import random

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_extern_object

from verl_dppo.cpu.demo.solutions import solution
from verl_dppo.cpu.demo.task import DATA_SOURCE, compute_score, split_of, unique_problems, write_parquet
from verl_dppo.cpu.demo.tokenizer import build_tokenizer


def score(response, truth="26", **kwargs):
    return compute_score(DATA_SOURCE, response, truth, **kwargs)


@pytest.mark.parametrize(
    "response",
    [
        "12 + 14 = 26\nanswer: 26",
        "answer: 26",
        "12 + 14 = 27\nanswer: 26",  # only the final answer counts
        "answer: 25\nanswer: 26\n",
        "answer: 026",  # reasoning-gym tolerates leading zeros
    ],
)
def test_a_right_final_answer_scores_one(response):
    assert score(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "26",
        "answer: 27",
        "answer: -26",
        "answer: 126",  # reasoning-gym alone would pay 2/3 for containing 26
        "answer: 26\nanswer: 25",
        "answer: 26\n12 + 14",
        "the answer: 26",
        "answer: 26 or 27",
        "answer: 2_6",
        "answer: \u0662\u0666",
        "answer:",
        "answer: 26\ufffd",
    ],
)
def test_a_wrong_or_malformed_final_answer_scores_zero(response):
    assert score(response) == 0.0


def test_negative_answers_are_scored():
    assert score("answer: -7", "-7") == 1.0
    assert score("answer: 7", "-7") == 0.0


def test_verls_extra_arguments_are_accepted():
    assert score("answer: 26", extra_info={"index": 3}, reward_router_address=None) == 1.0


def test_another_data_source_is_refused():
    with pytest.raises(ValueError, match="openai/gsm8k"):
        compute_score("openai/gsm8k", "answer: 26", "26")


def test_verl_finds_the_reward_function_by_module_path():
    assert load_extern_object("pkg://verl_dppo.cpu.demo.task", "compute_score")(DATA_SOURCE, "answer: 1", "1") == 1.0


@pytest.mark.parametrize("careful", [True, False])
def test_worked_solutions_are_right(careful):
    for entry in unique_problems("train", seed=0, count=300):
        assert score(solution(entry["metadata"]["expression"], careful), entry["answer"]) == 1.0


def test_worked_solutions_show_every_partial_sum():
    assert solution("3 - 9 + 20", careful=False) == "3 - 9 = -6\n-6 + 20 = 14\nanswer: 14"
    assert solution("3 - 9 + 20", careful=True) == "3 - 9 = -6\n-6 + 20\n-6 + 20 = 14\nanswer: 14"


def test_slips_are_carried_through_to_the_answer():
    rng = random.Random(0)
    entries = unique_problems("train", seed=0, count=400)
    solved = [score(solution(e["metadata"]["expression"], True, slip_rate=0.1, rng=rng), e["answer"]) for e in entries]
    expected = [0.9 ** (entry["metadata"]["num_terms"] - 1) for entry in entries]
    # Two slips may cancel, hence a little more than expected.
    assert abs(sum(solved) - sum(expected)) < 0.08 * len(entries)
    text = solution("50 + 3 - 9", careful=True, slip_rate=1.0, rng=rng).splitlines()
    assert text[1].split()[0] == text[0].split()[-1] != "53"
    assert text[2].split()[-1] == text[3].split()[-1]


def expressions(split, seed, count):
    return [entry["metadata"]["expression"] for entry in unique_problems(split, seed, count)]


def test_splits_are_disjoint_for_every_pair_of_seeds():
    train = set(expressions("train", 0, 2000))
    validation = {text for seed in range(3) for text in expressions("validation", seed, 300)}
    assert not train & validation
    assert all(split_of(text) == "validation" for text in validation)


def test_problems_of_a_split_are_unique_and_repeatable():
    first = expressions("train", 7, 500)
    assert len(set(first)) == 500
    assert first == expressions("train", 7, 500)


def test_neighbouring_seeds_give_other_problems():
    assert len(set(expressions("train", 0, 500)) & set(expressions("train", 1, 500))) < 50


def test_parquet_rows_have_unique_indices_and_the_right_answers(tmp_path):
    for split, path in write_parquet(tmp_path, train_rows=40, validation_rows=20, seed=3).items():
        rows = pq.read_table(path).to_pylist()
        assert [row["extra_info"]["index"] for row in rows] == list(range(40 if split == "train" else 20))
        assert {row["extra_info"]["split"] for row in rows} == {split}
        for row in rows:
            expression = row["prompt"][0]["content"].removesuffix(" =")
            assert score(solution(expression, careful=True), row["reward_model"]["ground_truth"]) == 1.0


def test_verls_dataset_reads_the_parquet(tmp_path):
    paths = write_parquet(tmp_path / "data", train_rows=16, validation_rows=4)
    config = OmegaConf.create(
        {
            "cache_dir": str(tmp_path / "cache"),
            "max_prompt_length": 64,
            "return_raw_chat": True,
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": 1,
        }
    )
    dataset = RLHFDataset([str(paths["train"])], build_tokenizer(), config)
    assert len(dataset) == 16
    assert [dataset[i]["index"] for i in range(16)] == list(range(16))
    row = dataset[5]
    assert row["raw_prompt"][0]["role"] == "user"
    assert row["data_source"] == DATA_SOURCE
    assert json.dumps(row["extra_info"])
