"""Train GRPO and DPPO on a small arithmetic task with real verl on this machine's CPU, and compare them.

Both runs go through `python -m verl.trainer.main_ppo`; the commands are printed. Needs the extra `cpu`.
"""

import argparse
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of data, logs and the table")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run (default 20)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one pair of runs for each (default 0)")
    parser.add_argument("--train-rows", type=int, default=2048, help="training problems (default 2048)")
    parser.add_argument("--validation-rows", type=int, default=96, help="validation problems (default 96)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both runs, as verl takes them")


def run(arguments: argparse.Namespace) -> int:
    """Run the pairs, print and save the table; return 0."""
    try:
        version("reasoning-gym")
    except PackageNotFoundError:
        print("the demo's problems come from reasoning-gym: pip install 'verl-dppo[cpu]'")
        return 1
    if arguments.steps < 1:
        print(f"--steps={arguments.steps} is refused: there is nothing to compare. Way out: give at least 1.")
        return 1
    # The switch that this process's own import of verl, and every process below it, reads.
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl_dppo.cpu.demo.comparison import table, train
    from verl_dppo.cpu.demo.task import write_parquet

    def report(line: str) -> None:
        print(line, flush=True)

    out = arguments.out.resolve()
    files = {str(k): v for k, v in write_parquet(out / "data", arguments.train_rows, arguments.validation_rows).items()}
    report(
        f"data: {arguments.train_rows} training and {arguments.validation_rows} validation problems in {out / 'data'}"
    )
    finished: dict[str, list] = {"GRPO": [], "DPPO": []}
    for seed in arguments.seeds:
        for name, trainings in finished.items():
            folder = out / f"{name.lower()}-seed{seed}"
            trainings.append(train(name, seed, files, arguments.overrides, arguments.steps, folder, report))
    text = table(finished["GRPO"], finished["DPPO"])
    (out / "table.md").write_text(text + "\n")
    report(f"\n{text}\n\nsaved in {out / 'table.md'}")
    return 0
