"""What a step says of the time of its ranks."""

import pytest

from verl_dppo.training.metrics import rank_seconds

BUSY = [[1.0, 3.0], [2.0, 1.0]]


def test_the_makespan_is_summed_over_mini_batches_and_the_wait_over_all():
    figures = rank_seconds(BUSY, [[2.0, 3.5], [2.5, 3.5]])
    assert figures["dppo/balance/measured"] == pytest.approx((2 + 3) / 3.5)
    assert figures["dppo/balance/waited"] == pytest.approx(1 - 7 / 11.5)


def test_where_work_is_not_counted_in_seconds_on_the_wall_no_wait_is_told():
    assert set(rank_seconds(BUSY, None)) == {"dppo/balance/measured"}
