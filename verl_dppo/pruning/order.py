"""The order of a fixed-size draw: completions with similar gradients side by side.

Neighbours compete for a place, and a competition adds variance as far as the two gradients differ. Similar gradients
are recognised by what the rollout already knows: the score of a token is large where the token was a surprise, and it
pushes up the row of the output layer that belongs to the token. So the surprise per token id, with the sign of the
advantage, stands for the direction of a completion's gradient.

An order is a function of what is known before the draw. It moves the variance, never the expectation.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# An odd multiplier of 64 bits; the upper bits of the product spread evenly (Knuth 1998, section 6.4).
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SMALLEST_SURPRISE = 0.02
"""A token that was all but certain says nothing about the direction, and most tokens of a trained policy are."""
COSINES = 2**20
SHORTEST_CHAIN = 64
"""A chain of k rows costs k^2 cosines. Chains have COSINES / n rows, so that all together cost the same for any n, but
not fewer than these."""


def surprise_signature(token: ArrayLike, surprise: ArrayLike, row: ArrayLike, n: int, dims: int = 128) -> Array:
    """Sum the surprise per token id of each completion, in a count sketch (Charikar, Chen and Farach-Colton 2002).

    A hash sends each token id to one of `dims` entries and to a sign, so that inner products of signatures estimate
    those of the vectors over the whole vocabulary. The hash is fixed: equal completions have equal signatures.

    Args:
        token: (T,) integer ids >= 0 of the response tokens of all completions.
        surprise: (T,) 1 - p_t of each under the rollout policy.
        row: (T,) integer in [0, n), the completion it belongs to.
        n: number of completions.
        dims: entries of a signature, at least 1.

    Returns:
        (n, dims) float64.

    Raises:
        ValueError: shapes that differ, `dims` below 1, or rows outside [0, n).
    """
    ids, values, rows = np.asarray(token), np.asarray(surprise, dtype=np.float64), np.asarray(row, dtype=np.int64)
    if ids.ndim != 1 or ids.shape != values.shape or ids.shape != rows.shape:
        raise ValueError(f"token, surprise and row have shapes {ids.shape}, {values.shape} and {rows.shape}, not (T,)")
    if dims < 1:
        raise ValueError(f"dims={dims} must be at least 1")
    if rows.size and (rows.min() < 0 or rows.max() >= n):
        raise ValueError(f"row must be in [0, {n}), got {rows.min()} to {rows.max()}")
    tells = np.flatnonzero(values > SMALLEST_SURPRISE)
    key = ids[tells].astype(np.uint64) * MULTIPLIER
    entry = ((key >> np.uint64(40)) % np.uint64(dims)).astype(np.int64)
    signed = np.where(key >> np.uint64(63), values[tells], -values[tells])
    total = np.bincount(rows[tells] * dims + entry, signed, minlength=n * dims)
    return total.astype(np.float64, copy=False).reshape(n, dims)


def chain_order(signature: ArrayLike, advantage: ArrayLike, group: ArrayLike) -> Index:
    """Order completions so that neighbours have similar gradients.

    A greedy chain: after each completion comes the one, of those left, whose signed signature has the largest cosine
    with it. Up to 1,024 completions are one chain. More are taken prompt by prompt and cut into blocks, each a
    chain of its own.

    Args:
        signature: (n, d) from `surprise_signature`.
        advantage: (n,) its sign is the sign of the gradient; completions with 0 have none and come last.
        group: (n,) integer labels; completions of one prompt share one.

    Returns:
        (n,) int64 permutation.

    Raises:
        ValueError: shapes that differ, or values that are not finite.
    """
    features, sign = np.asarray(signature, dtype=np.float32), np.sign(np.asarray(advantage, dtype=np.float32))
    label = np.asarray(group)
    if not (np.isfinite(features).all() and np.isfinite(np.asarray(advantage, dtype=np.float64)).all()):
        raise ValueError("signature and advantage must be finite")
    if features.ndim != 2 or sign.shape != features.shape[:1] or label.shape != sign.shape:
        raise ValueError(f"signature, advantage, group have shapes {features.shape}, {sign.shape} and {label.shape}")
    by_group = np.argsort(label, kind="stable")
    live = by_group[sign[by_group] != 0]
    idle = by_group[sign[by_group] == 0]
    if live.size == 0:
        return idle
    blocks = -(-live.size // max(COSINES // live.size, SHORTEST_CHAIN))
    rows = -(-live.size // blocks)
    padded = np.append(live, np.full(blocks * rows - live.size, live[0])).reshape(blocks, rows)
    absent = np.arange(blocks * rows).reshape(blocks, rows) >= live.size
    length = np.sqrt(np.einsum("nd,nd->n", features, features))
    direction = (features * (sign / np.maximum(length, np.finfo(np.float32).tiny))[:, None])[padded]
    place = _greedy_chains(direction @ direction.transpose(0, 2, 1), absent)
    return np.concatenate([np.take_along_axis(padded, place, axis=1).ravel()[: live.size], idle])


def snake_order(surprise: ArrayLike, advantage: ArrayLike, group: ArrayLike) -> Index:
    """Order completions by signed surprise inside each prompt, every other prompt backwards; needs no token ids.

    A prompt's completions run from the most surprising with a negative advantage over the least surprising to the most
    surprising with a positive one, and the next prompt begins where this one ended.

    Args:
        surprise: (n,) any measure that grows with the surprise of a completion's tokens, e.g. sum_t (1 - p_t)^2.
        advantage: (n,) its sign is the sign of the gradient.
        group: (n,) integer labels; completions of one prompt share one.

    Returns:
        (n,) int64 permutation.

    Raises:
        ValueError: shapes that differ.
    """
    size, sign, label = np.asarray(surprise, dtype=np.float64), np.sign(np.asarray(advantage)), np.asarray(group)
    if size.ndim != 1 or sign.shape != size.shape or label.shape != size.shape:
        raise ValueError(f"surprise, advantage, group have shapes {size.shape}, {sign.shape} and {label.shape}")
    _, prompt = np.unique(label, return_inverse=True)
    direction = 1 - 2 * (prompt % 2)
    return np.lexsort((direction * sign * size, prompt))


def _greedy_chains(similarity: NDArray, absent: NDArray[np.bool_]) -> Index:
    """Return (blocks, rows) chains, all blocks one step at a time. Each starts at row 0; absent rows come last."""
    blocks, rows, _ = similarity.shape
    block = np.arange(blocks)
    chain = np.zeros((blocks, rows), dtype=np.int64)
    # Below every cosine: rows that are taken are out of reach, absent ones wait until nothing else is left.
    handicap = np.where(absent, np.float32(-100), np.float32(0))
    current = chain[:, 0]
    for step in range(1, rows):
        handicap[block, current] = -np.inf
        current = (similarity[block, current] + handicap).argmax(axis=1)
        chain[:, step] = current
    return chain
