"""What docs/metrics.md says to expect of `dppo/probe/*`: the record's figures over whole batches of true norms."""

import measured_batch
import numpy as np
import pytest
import retention

from verl_dppo.pruning import NormRecord, score_magnitude


@pytest.mark.parametrize("mode", measured_batch.MODES)
@pytest.mark.parametrize("path", sorted(retention.COPIES.glob("*.npz")), ids=lambda path: path.stem)
def test_the_expected_ranges_are_those_of_the_shipped_batches(path, mode):
    batch = measured_batch.load(path, 8)
    live = np.flatnonzero(batch.informative)
    surprise, scale = batch.surprise.ravel(), np.abs(batch.factor(mode))
    record, ones = NormRecord(window=live.size), np.ones(live.size)
    record.observe(
        1,
        sum_sq_one_minus_p=surprise[live],
        length=batch.tokens[live],
        prompt_length=ones,
        scale=scale[live],
        magnitude=score_magnitude(batch.advantage, batch.tokens, surprise, mode)[live],
        norm=(scale * batch.norm())[live],
        weight=ones,
    )
    figures = record.figures()
    assert 0.91 <= figures["correlation"] < 0.96
    assert 0.44 < figures["residual_std"] < 0.53
    assert 1.26 < figures["second_moment_ratio"] < 1.34
