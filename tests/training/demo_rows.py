"""Rows of the demo task as verl's own data set reads them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.demo.task import write_parquet


def demo_rows(folder: Path, count: int, seed: int = 0) -> list[dict]:
    return pq.read_table(write_parquet(folder, train_rows=count, validation_rows=1, seed=seed)["train"]).to_pylist()


def data_config(folder: Path, **values) -> DictConfig:
    return OmegaConf.create({"cache_dir": str(folder / "cache"), "filter_overlong_prompts": False, **values})


def as_verl(folder: Path, rows: list[dict], config: DictConfig | None = None, name: str = "rows") -> RLHFDataset:
    """Write the rows to a parquet file and let verl's data set read it."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    return RLHFDataset(str(folder / f"{name}.parquet"), tokenizer, config or data_config(folder))
