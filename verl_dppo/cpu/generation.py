"""Decode a changing set of completions together.

Rows join between steps and leave when they end, so nobody waits for the longest. Completions of one prompt share its
prefill. What a completion says does not depend on its company: see `sampling` for the random numbers, and the model
runs in float64, where the company of other rows changes a logit too little to change a token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from verl_dppo.cpu.cache import RowCache
from verl_dppo.cpu.sampling import SamplingRule, choose


@dataclass(eq=False)
class Completion:
    """One completion, asked for and then filled in. `stop_reason` is None while it runs."""

    prompt: list[int]
    rule: SamplingRule
    uniforms: list[float]  # token t is drawn with uniforms[t]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str | None = None

    @property
    def limit(self) -> int:
        """The most tokens it may have."""
        return len(self.uniforms)


def build_model(config: PretrainedConfig) -> torch.nn.Module:
    """Build the model in float64 with random weights: verl pushes the real ones before the first request."""
    # Attention over a padded cache is a mask away from attention over the row alone; sdpa is the fast kernel for that.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    return model.eval().requires_grad_(False)


class Generator:
    """The rows being decoded. `add`, then `step` until nothing is active."""

    def __init__(self, model: torch.nn.Module, eos: Iterable[int], max_rows: int) -> None:
        self.model, self.eos, self.max_rows = model, frozenset(eos), max_rows
        self.active: list[Completion] = []
        self.cache = RowCache(torch.empty(0, dtype=torch.long))
        self.last = torch.empty(0, dtype=torch.long)  # each row's newest token

    @property
    def room(self) -> int:
        """How many rows may still join."""
        return self.max_rows - len(self.active)

    @torch.inference_mode()
    def add(self, completions: Sequence[Completion]) -> list[Completion]:
        """Run the prompts, draw each first token, and let the rows join. Returns those that have already ended."""
        if not completions:
            return []
        prompts = list(dict.fromkeys(tuple(c.prompt) for c in completions))
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        source = torch.tensor([row_of[tuple(c.prompt)] for c in completions])
        cache, logits = self._prefill(prompts)
        room = max(c.limit - len(c.tokens) for c in [*self.active, *completions])
        if self.active:
            self.cache.join(cache, source, room)
        else:
            self.cache, self.last = cache.select(source, room), self.last[:0]
        first = len(self.active)
        self.active.extend(completions)
        self.last = torch.cat([self.last, self._draw(logits[source], completions)])
        return self._retire(first)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draw one more token for every row. Returns the completions that ended."""
        position = self.cache.end - self.cache.start
        logits = self._forward(self.last[:, None], self.cache.mask(new=1), position[:, None], self.cache)
        self.last = self._draw(logits, self.active)
        return self._retire(0)

    def abort(self) -> list[Completion]:
        """End every row where it is and return them all."""
        aborted, self.active = self.active, []
        for completion in aborted:
            completion.stop_reason = "aborted"
        return aborted

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[RowCache, torch.Tensor]:
        width = max(map(len, prompts))
        start = torch.tensor([width - len(prompt) for prompt in prompts])
        # Padding is masked, so any valid id will do.
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        cache = RowCache(start)
        position = (torch.arange(width) - start[:, None]).clamp(min=0)
        return cache, self._forward(ids, cache.mask(new=width), position, cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """Return the logits (n, V) after the last column; the cache takes the new columns."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _draw(self, logits: torch.Tensor, completions: Sequence[Completion]) -> torch.Tensor:
        uniform = torch.tensor([c.uniforms[len(c.tokens)] for c in completions], dtype=logits.dtype)
        tokens, log_probs = choose(logits, uniform, [c.rule for c in completions])
        # verl carries log-probabilities as float32: what is returned is what training will see.
        for completion, token, log_prob in zip(completions, tokens.tolist(), log_probs.float().tolist(), strict=True):
            completion.tokens.append(token)
            completion.log_probs.append(log_prob)
            if token in self.eos:
                completion.stop_reason = "completed"
            elif len(completion.tokens) >= completion.limit:
                completion.stop_reason = "length"
        return tokens

    def _retire(self, first: int) -> list[Completion]:
        """Remove the rows from `first` on that have ended, moving the last rows into their places."""
        ended = [row for row in range(first, len(self.active)) if self.active[row].stop_reason is not None]
        if not ended:
            return []
        gone, keep = set(ended), len(self.active) - len(ended)
        retired = [self.active[row] for row in ended]
        holes = [row for row in ended if row < keep]
        movers = [row for row in range(keep, len(self.active)) if row not in gone]
        for hole, mover in zip(holes, movers, strict=True):
            self.active[hole] = self.active[mover]
        self.active = self.active[:keep]
        into, out_of = torch.tensor(holes, dtype=torch.long), torch.tensor(movers, dtype=torch.long)
        self.cache.leave(into, out_of, keep)
        self.last[into] = self.last[out_of]
        self.last = self.last[:keep].clone()
        return retired
