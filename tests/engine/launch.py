"""Runs a module of these tests as the ranks of one job, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def run_on_ranks(module: str, processes: int, *arguments: object, **environment: str) -> None:
    """Run `module` with these arguments on so many ranks, each with one thread, and show its output if it fails."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("-m", module, *map(str, arguments)),
    ]
    shared = {
        "VERL_PLATFORM": "cpu",
        "RAY_LOCAL_WORLD_SIZE": str(os.cpu_count()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(TESTS),
        **environment,
    }
    done = subprocess.run(command, env={**os.environ, **shared}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
