"""`verl-dppo gsm8k` against what reads its files: verl's own reward function and verl's own data set."""

import argparse
import json
import os
import stat
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score

from verl_dppo.cli import gsm8k

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "data" / "gsm8k"
GOOD = json.dumps({"question": "How many?", "answer": "Count them.\n#### 3"})
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def full_copies() -> list[Path]:
    """Return the folders at hand that hold the complete jsonl files: one or none."""
    named = os.environ.get("GSM8K_JSONL_DIR")
    beside = ROOT.parent / "shared" / "data" / "gsm8k"
    return [Path(named)] if named else [beside] if (beside / "train.jsonl").is_file() else []


SOURCES = dict(zip(("small", "full"), (SMALL, *full_copies()), strict=False))


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    gsm8k.add_arguments(parser)
    return gsm8k.run(parser.parse_args([str(argument) for argument in arguments]))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert command(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def write_pair(folder: Path, train: str, test: str = GOOD) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text(train, encoding="utf-8")
    (folder / "test.jsonl").write_text(test, encoding="utf-8")
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def read_as_verl(path: Path, cache: Path, max_prompt_length: int) -> RLHFDataset:
    config = OmegaConf.create(
        {
            "cache_dir": str(cache),
            "max_prompt_length": max_prompt_length,
            "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": 1,
            "truncation": "error",
        }
    )
    return RLHFDataset(str(path), tokenizer=byte_tokenizer(), config=config)


@pytest.fixture(scope="module", params=SOURCES)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (folder with jsonl, folder with the parquet made of it)."""
    out = tmp_path_factory.mktemp(request.param)
    assert command("--jsonl", SOURCES[request.param], "--out", out) == 0
    return SOURCES[request.param], out


@pytest.mark.parametrize("split", gsm8k.SPLITS)
class TestEveryRow:
    def test_is_read_by_verls_data_set_in_order(self, prepared: tuple[Path, Path], split: str, tmp_path: Path) -> None:
        jsonl, out = prepared
        records = [json.loads(line) for line in (jsonl / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        rows = read_as_verl(out / f"{split}.parquet", tmp_path, max_prompt_length=4096)
        assert len(rows) == len(records)
        for index, record in enumerate(records):
            row = rows[index]
            assert row["index"] == index
            assert row["extra_info"] == {"split": split, "index": index, **record}
            (message,) = row["raw_prompt"]
            assert message["role"] == "user"
            assert message["content"].startswith(record["question"])
            assert "`#### number`" in message["content"]

    def test_is_scored_by_verls_reward(self, prepared: tuple[Path, Path], split: str, tmp_path: Path) -> None:
        rows = read_as_verl(prepared[1] / f"{split}.parquet", tmp_path, max_prompt_length=4096)
        scores: dict[str, set[float]] = {"reference": set(), "minimal": set(), "wrong": set(), "unmarked": set()}
        for row in (rows[index] for index in range(len(rows))):
            truth = row["reward_model"]["ground_truth"]
            solutions = {
                "reference": row["extra_info"]["answer"],
                "minimal": f"#### {truth}",
                "wrong": row["extra_info"]["answer"] + "1",
                "unmarked": f"The answer is {truth}.",
            }
            for kind, solution in solutions.items():
                scores[kind].add(float(default_compute_score(row["data_source"], solution, truth)))
        assert scores == {"reference": {1.0}, "minimal": {1.0}, "wrong": {0.0}, "unmarked": {0.0}}


def test_the_full_copies_are_gsm8k() -> None:
    for folder in full_copies():
        assert len((folder / "train.jsonl").read_text(encoding="utf-8").splitlines()) == 7473
        assert len((folder / "test.jsonl").read_text(encoding="utf-8").splitlines()) == 1319


def test_verl_drops_prompts_that_are_too_long(tmp_path: Path) -> None:
    assert command("--jsonl", SMALL, "--out", tmp_path) == 0
    assert 0 < len(read_as_verl(tmp_path / "train.parquet", tmp_path / "cache", max_prompt_length=400)) < 64


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("#### 72", "72"),
        ("work\n#### 1,234", "1234"),
        ("#### 109,200,000\n", "109200000"),
        ("#### -5", "-5"),
        ("#### 2.50", "2.50"),
        ("#### 1 is not it\n#### 7", "7"),
    ],
)
def test_ground_truth_is_what_verls_reward_compares_with(answer: str, truth: str) -> None:
    assert gsm8k.ground_truth(answer) == truth
    assert default_compute_score(gsm8k.DATA_SOURCE, answer, truth) == 1.0


@pytest.mark.parametrize("answer", ["72", "####72", "#### $72", "#### seventy", "#### 72 apples", "#### ", "#### 72."])
def test_an_answer_that_verl_could_not_score_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="does not end with `#### number`"):
        gsm8k.ground_truth(answer)


def test_explicit_files_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    assert command("--train", SMALL / "test.jsonl", "--test", SMALL / "train.jsonl", "--out", out) == 0
    assert capsys.readouterr().out == f"{out}/train.parquet: 32 rows\n{out}/test.parquet: 64 rows\n"


def test_reads_a_hub_data_set_laid_out_as_on_the_hub(tmp_path: Path) -> None:
    files = "".join(f"    - split: {split}\n      path: main/{split}.jsonl\n" for split in gsm8k.SPLITS)
    repository = tmp_path / "gsm8k"
    repository.mkdir()
    (repository / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    write_pair(repository / "main", (SMALL / "train.jsonl").read_text(), (SMALL / "test.jsonl").read_text())
    assert command("--hub", repository, "--out", tmp_path / "hub") == 0
    assert command("--jsonl", SMALL, "--out", tmp_path / "jsonl") == 0
    for split in gsm8k.SPLITS:
        name = f"{split}.parquet"
        assert (tmp_path / "hub" / name).read_bytes() == (tmp_path / "jsonl" / name).read_bytes()


def test_blank_lines_and_a_byte_order_mark_are_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_pair(tmp_path / "in", f"\ufeff{GOOD}\n\n{GOOD}\n")
    assert command("--jsonl", folder, "--out", tmp_path) == 0
    assert "train.parquet: 2 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"answer": "#### 3"}', "`question` is missing"),
        ('{"question": "  ", "answer": "#### 3"}', "`question` is missing, empty"),
        ('{"question": "How many?", "answer": 3}', "`answer` is missing, empty, or not text"),
        ('{"question": "How many?", "answer": "three"}', "does not end with `#### number`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str) -> None:
    folder = write_pair(tmp_path / "in", f"{GOOD}\n{line}\n{GOOD}\n")
    message = refusal(capsys, "--jsonl", folder, "--out", tmp_path / "out")
    assert f"{folder}/train.jsonl:2: " in message
    assert complaint in message
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_no_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_pair(tmp_path / "in", GOOD)
    (folder / "test.jsonl").write_bytes(GOOD.encode() + b"\n\xff\xfe\n")
    assert f"{folder}/test.jsonl:2: not JSON" in refusal(capsys, "--jsonl", folder, "--out", tmp_path)


def test_a_missing_file_names_the_path_and_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--jsonl", tmp_path, "--out", tmp_path)
    assert f"{tmp_path}/train.jsonl does not exist" in message
    assert "--jsonl" in message
    assert "--hub" in message


def test_an_empty_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_pair(tmp_path / "in", GOOD, "\n\n")
    assert f"{folder}/test.jsonl is empty" in refusal(capsys, "--jsonl", folder, "--out", tmp_path)


def test_a_data_set_that_cannot_be_loaded_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--hub", tmp_path / "nowhere", "--out", tmp_path)
    assert f"could not load the train split of {tmp_path}/nowhere (main)" in message
    assert "--jsonl DIR" in message


@pytest.mark.parametrize("arguments", [(), ("--jsonl", "a", "--hub"), ("--jsonl", "a", "--train", "b", "--test", "c")])
def test_exactly_one_source_is_asked_for(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert "choose one source" in refusal(capsys, *arguments)


@pytest.mark.parametrize("only", ["--train", "--test"])
def test_one_file_alone_is_refused(capsys: pytest.CaptureFixture[str], only: str) -> None:
    assert "--train and --test go together" in refusal(capsys, only, SMALL / "train.jsonl")


def test_a_refusal_leaves_older_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert command("--jsonl", SMALL, "--out", out) == 0
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refusal(capsys, "--jsonl", write_pair(tmp_path / "in", GOOD, "{"), "--out", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_write_that_fails_leaves_older_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    assert command("--jsonl", SMALL, "--out", tmp_path) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write, written = pyarrow.parquet.write_table, []

    def fail_second(table: object, path: Path) -> None:
        write(table, path)
        written.append(path)
        if len(written) == 2:
            raise OSError("no space left")

    monkeypatch.setattr(pyarrow.parquet, "write_table", fail_second)
    assert command("--train", SMALL / "test.jsonl", "--test", SMALL / "train.jsonl", "--out", tmp_path) == 2
    assert len(written) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert f"{tmp_path}/out" in refusal(capsys, "--jsonl", SMALL, "--out", tmp_path / "out")


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        assert command("--jsonl", SMALL, "--out", tmp_path) == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "train.parquet").stat().st_mode) == 0o644
