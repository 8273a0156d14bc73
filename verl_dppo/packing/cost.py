"""What one sequence costs a training step, in FLOPs that follow from its length and the model's config alone.

A forward pass multiplies every token with the same weights, and every query-key pair that the mask allows with the
same head sizes. So a cost is a share per token plus a share per pair, summed over the layers once.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.packing.model_sizes import read_sizes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SequenceCost:
    """Forward FLOPs of one sequence, as a function of its length in tokens.

    Training costs three times as much for every sequence alike (the backward pass is twice the forward pass), and
    balancing reads ratios alone, so the factor is left out. Counted are the matrix products, as PyTorch's FLOPs counter
    counts them: projections, attention, MLP or the experts a token is routed to, and the LM head at every token. Extra
    layers that predict tokens further ahead are not.

    Attributes:
        per_token: FLOPs per token of everything but attention.
        attention: (FLOPs per query-key pair, window), one for all layers that share a window. A token sees itself and
            the window - 1 tokens before it; None is everything before it.
        causal: count the pairs that the mask allows, as kernels for packed sequences do. False counts all length**2
            pairs whatever the mask, as a kernel that fills the whole score matrix does.
    """

    per_token: float
    attention: tuple[tuple[float, int | None], ...] = ()
    causal: bool = True

    def __post_init__(self) -> None:
        """Refuse figures that no model has."""
        for flops in (self.per_token, *(per_pair for per_pair, _ in self.attention)):
            if not 0 <= flops < np.inf:
                raise ValueError(f"FLOPs must be finite and at least 0, got {flops}")
        for _, window in self.attention:
            if window is not None and window < 1:
                raise ValueError(f"window must be at least 1 token or None, got {window}")

    @classmethod
    def tokens(cls) -> "SequenceCost":
        """Return the cost that is the length itself."""
        return cls(per_token=1.0)

    @classmethod
    def from_config(cls, hf_config: Any, causal: bool = True) -> "SequenceCost":
        """Read a Hugging Face config: dense, grouped-query, mixture of experts and multi-head latent attention.

        Args:
            hf_config: object with the config's fields as attributes, or a mapping of them. Of a multi-modal config the
                `text_config` is read: what the vision part costs does not follow from the length.
            causal: see the class.

        Raises:
            ValueError: a model type whose computation is not known, a field that is missing or no positive integer, or
                layers of a kind that is not counted. It names the model type, the field and the way out.
        """
        sizes = read_sizes(hf_config)
        layers = Counter(sizes.windows)
        attention = tuple((2.0 * sizes.pair * count, window) for window, count in layers.items())
        return cls(2.0 * sizes.weights, attention, causal)

    def __call__(self, length: ArrayLike) -> Array:
        """Return the cost of each sequence.

        Args:
            length: (n,) tokens, whole numbers of at least 0.

        Returns:
            (n,) float64, in FLOPs (in tokens for `tokens()`).

        Raises:
            ValueError: another shape, or lengths that are not such numbers.
        """
        tokens = np.asarray(length)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iuf":
            raise ValueError(f"length must be (n,) whole numbers, got shape {tokens.shape} of {tokens.dtype}")
        tokens = tokens.astype(np.float64)
        bad = ~((tokens >= 0) & (tokens == np.floor(tokens)) & np.isfinite(tokens))
        if bad.any():
            raise ValueError(f"length must be whole numbers of at least 0, got {tokens[bad][:3]}")
        cost = self.per_token * tokens
        for per_pair, window in self.attention:
            cost += per_pair * self._pairs(tokens, window)
        return cost

    def _pairs(self, tokens: Array, window: int | None) -> Array:
        """Return how many query-key pairs a layer computes: a token sees at most `window`, the first ones fewer."""
        if not self.causal:
            return tokens**2
        rising = tokens if window is None else np.minimum(tokens, window)
        return rising * (rising + 1) / 2 + (tokens - rising) * rising
