"""What is claimed of every engine alike: how near its expected gradient comes to that of the full batch."""

import pytest
from engine.cases import Case


def on_ranks(cases: dict[str, list[Case]], *kinds: str) -> pytest.MarkDecorator:
    """Parametrize over the cases of these dtypes, faults apart, by the ranks they run on."""
    return pytest.mark.parametrize(
        ("ranks", "case"),
        [
            pytest.param(ranks, case, id=f"{ranks} {case.name}")
            for ranks, of_ranks in cases.items()
            for case in of_ranks
            if case.dtype in kinds and not case.fault
        ],
    )


def assert_exact(result: dict[str, float]) -> None:
    """In float64: all draws, and the expectation to rounding."""
    assert result["chance"] == pytest.approx(1, abs=1e-12)
    assert result["error"] < 1e-10


def assert_to_float32(result: dict[str, float]) -> None:
    assert result["error"] < 1e-5


def assert_to_the_noise_of_bfloat16(result: dict[str, float]) -> None:
    """The noise: what the same engine's full-batch gradient changes by where the loss is scaled and unscaled."""
    assert 1e-4 < result["noise"] < 0.05
    assert result["error"] < 2 * result["noise"]
