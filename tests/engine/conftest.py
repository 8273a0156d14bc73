"""Enumerations through verl's engines, in processes of their own: a process has one platform and one process group."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from cpu.tiny import save_model
from engine.batches import VOCABULARY

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Two layers, and weights large enough that every one of them has a gradient worth comparing."""
    folder = tmp_path_factory.mktemp("model")
    save_model(
        folder,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return folder


@pytest.fixture(scope="session")
def enumerate_through(model, tmp_path_factory):
    """Return a function that measures cases on some ranks of an engine, once."""

    def run(engine, ranks, cases, **environment):
        result = tmp_path_factory.mktemp(engine) / "measured.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {
            "VERL_PLATFORM": "cpu",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RAY_LOCAL_WORLD_SIZE": str(os.cpu_count()),  # one thread each
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(TESTS),
            **environment,
        }
        text = json.dumps([asdict(case) for case in cases])
        logs = [result.with_name(f"rank{rank}.log") for rank in range(ranks)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "engine.measure", engine, str(model), str(result)],
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            process.stdin.write(text)
            process.stdin.close()
            processes.append(process)
        codes = [process.wait(timeout=900) for process in processes]
        assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)
        return json.loads(result.read_text())

    return run
