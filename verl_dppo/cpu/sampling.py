"""What a completion's tokens are drawn from, as a pure function of who asks.

Token t of a completion uses the t-th number of a counter-based random stream whose key is a hash of the run's seed,
the step, the prompt and the sample's index. Nothing else enters: not the order of requests, not the batch a request
lands in, not the replica that serves it, not what was generated before. A run therefore repeats, and a resumed run
continues, token for token.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class SampleKey:
    """Names one completion of a run. `step` None stands for the step that follows the weights' own."""

    step: int | None
    prompt: str
    sample: int


def uniforms(seed: int, key: str, prompt_ids: Sequence[int], count: int) -> list[float]:
    """Return the stream of `key`: `count` numbers in [0, 1), each a function of its index and the arguments alone.

    The prompt's tokens are part of the key, so that a second turn does not reuse the numbers of the first.
    """
    digest = hashlib.blake2b(f"{seed}/{key}/".encode(), digest_size=16)
    digest.update(np.asarray(prompt_ids, dtype=np.int64).tobytes())
    stream = np.random.Philox(key=int.from_bytes(digest.digest(), "little"))
    return np.random.Generator(stream).random(count).tolist()


@dataclass(frozen=True)
class SamplingRule:
    """How one completion is drawn. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"rollout.temperature={self.temperature}: must be 0 (greedy) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"rollout.top_p={self.top_p}: must be in (0, 1]; 1 is off")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"rollout.top_k={self.top_k}: must be positive, or -1 for off")

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "SamplingRule":
        """Read verl's `sampling_params`; refuse what would change the distribution and is not built here."""
        handled = {"temperature", "top_k", "top_p", "logprobs", "max_tokens", "max_new_tokens", "sample_key"}
        harmless = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
        for name, value in params.items():
            if name not in handled and value is not None and value != harmless.get(name):
                raise ValueError(f"sampling parameter {name}={value!r} is not supported by rollout.name=hf_cpu")
        top_k = int(params.get("top_k", -1))
        return cls(float(params.get("temperature", 1.0)), top_k if top_k != 0 else -1, float(params.get("top_p", 1.0)))


def choose(
    logits: torch.Tensor, uniform: torch.Tensor, rules: Sequence[SamplingRule]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row of `logits` (n, V) by inverting its distribution at `uniform` (n,).

    Returns the tokens (n,) and their log-probabilities (n,) under the distribution drawn from: after temperature, top-k
    and top-p, as verl's `logprobs_mode=processed_logprobs`. A greedy row reports its log-probability at temperature 1.
    """
    temperature = torch.tensor([rule.temperature for rule in rules], dtype=logits.dtype)
    greedy = temperature == 0
    logits = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if any(rule.top_k != -1 or rule.top_p != 1 for rule in rules):
        logits = _truncate(logits, rules)
    log_probs = torch.log_softmax(logits, dim=-1)
    cumulative = log_probs.exp().cumsum_(dim=-1)
    total = cumulative[:, -1:]
    # Rounding can put the threshold at the total; the last token of positive probability is the right answer then.
    drawn = (cumulative <= uniform[:, None] * total).sum(dim=-1)
    tokens = torch.minimum(drawn, (cumulative < total).sum(dim=-1))
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def _truncate(logits: torch.Tensor, rules: Sequence[SamplingRule]) -> torch.Tensor:
    """Set to -inf what top-k, then top-p, leave out of each row."""
    vocabulary = logits.shape[1]
    top_k = torch.tensor([rule.top_k if rule.top_k != -1 else vocabulary for rule in rules])[:, None]
    top_p = torch.tensor([rule.top_p for rule in rules], dtype=logits.dtype)[:, None]
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocabulary) >= top_k, -torch.inf)
    probability = ordered.softmax(dim=-1)
    # The token that crosses top_p stays.
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, index, ordered)
