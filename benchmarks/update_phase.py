"""What completion pruning saves of the update phase, on a load where that phase is large.

    VERL_PLATFORM=cpu python benchmarks/update_phase.py [--keep .5] [--steps 6] [--out runs/update-phase]

GRPO, then DPPO, on the same problems through verl's own entry point: 32 prompts x 16 completions of problems with many
terms. The table is that of the demo; the first step of each run, which warms up, is left out of every mean.
"""

import argparse
import os
from itertools import islice
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"

import pyarrow as pa
import pyarrow.parquet as pq

from verl_dppo.cpu.demo.comparison import table, train
from verl_dppo.cpu.demo.task import problems, to_row

LONG = {"min_terms": 4, "max_terms": 6, "min_digits": 2, "max_digits": 2}


def write_long_problems(folder: Path, rows: int) -> dict[str, Path]:
    """Write parquet files of problems whose answers take some 100 tokens on average."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split in ("train", "validation"):
        entries = islice(problems(split, 0, **LONG), rows if split == "train" else 16)
        files[split] = folder / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist([to_row(e, split, i) for i, e in enumerate(entries)]), files[split])
    return files


def main() -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/update-phase"))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    files = write_long_problems(out / "data", 32 * arguments.steps)
    keep = {"GRPO": [], "DPPO": [f"algorithm.dppo.completion.keep={arguments.keep}"]}
    runs = {}
    for name, overrides in keep.items():
        load = ["data.train_batch_size=32", "actor_rollout_ref.rollout.n=16", *overrides]
        folder = out / name.lower()
        runs[name] = train(name, 0, files, load, arguments.steps, folder, lambda line: print(line, flush=True))
    text = table([runs["GRPO"]], [runs["DPPO"]])
    length = runs["GRPO"].mean("response_length/mean")
    informative = runs["DPPO"].mean("dppo/informative_fraction")
    text += f"\n\nkeep={arguments.keep}; mean response {length:.0f} tokens; informative completions {informative:.0%}"
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
