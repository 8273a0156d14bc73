"""The settings behind `algorithm.dppo.*`: frozen, and refused with the setting, its value and the way out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl_dppo.pruning.budget import LOWEST_KEEP
from verl_dppo.pruning.prompt_budget import LOWEST_PROMPT_KEEP
from verl_dppo.pruning.prompts import PROMPT_RULES, SCHEDULES
from verl_dppo.pruning.sampling import DESIGNS

RULES = ("neyman", "threshold")
AUTO = "auto"
COSTS = (AUTO, "flops", "tokens")
# Named in the design of this plugin but not built: asking for one must not look as if it did something.
NOT_BUILT = {
    "preset": "set `algorithm.dppo.completion.rule=threshold` for a paper-like completion rule",
}


class RefusedSettingError(ValueError):
    """A setting, or a combination of settings, that would not train what it says."""


def refuse(name: str, value: Any, reason: str, way_out: str) -> RefusedSettingError:
    """Return the error for one refused setting, in the wording that all refusals share."""
    return RefusedSettingError(f"{name}={value} is refused: {reason}. Way out: {way_out}.")


def _number(name: str, value: Any, kind: type) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        valid = valid and isinstance(value, int)
    if not valid:
        raise refuse(name, repr(value), f"it is not {'an integer' if kind is int else 'a number'}", "give one")


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise refuse(name, value, "no such choice", f"use one of {', '.join(choices)}")


def _share_or_auto(prefix: str, keep: Any, of_what: str, instead: str) -> None:
    """Refuse a `keep` that is neither a share nor auto."""
    if keep == AUTO:
        return
    if isinstance(keep, str):
        raise refuse(prefix + "keep", repr(keep), "no such choice", "give a share in (0, 1], or auto")
    _number(prefix + "keep", keep, float)
    if not 0 < keep <= 1:
        way_out = f"give a share in (0, 1]; to {instead} set {prefix}enable=false"
        raise refuse(prefix + "keep", keep, f"a share of the {of_what} must be kept", way_out)


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise refuse(name, repr(value), "it is neither true nor false", "give one of the two")


@dataclass(frozen=True, kw_only=True)
class CompletionSettings:
    """Which completions of a group are trained on, after the rewards are known."""

    enable: bool = True
    """Prune completions. Off, every completion is trained on with weight 1 by verl's own code."""

    rule: str = "neyman"
    """`neyman`: least variance for a token budget. `threshold`: paper-like, on whether |advantage| is below mean."""

    keep: float | str = AUTO
    """Neyman: expected share of the response tokens of informative rows that is kept, in (0, 1], or `auto`: what past
    steps show to give the best noise-equivalent speed-up, starting at .6."""

    floor: float | None = None
    """Neyman: smallest inclusion probability of an informative row, in (0, keep], with `auto` in (0, .2]; null means
    keep / 4."""

    rate: float | None = None
    """Threshold: probability that a below-mean row is dropped, in [0, 1); null means .5 with that rule."""

    design: str = "pivotal"
    """How the sample is drawn: `pivotal` (fixed size, alike rows compete), `cube` (fixed size, nearly fixed tokens) or
    `poisson` (independent)."""

    probe_every: int | None = 10
    """Every so many steps the true gradient norms of a few completions are measured, to check the magnitudes and to
    improve later ones; null: never."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning, and what the chosen rule would ignore."""
        prefix = "algorithm.dppo.completion."
        _flag(prefix + "enable", self.enable)
        _choice(prefix + "rule", self.rule, RULES)
        _choice(prefix + "design", self.design, DESIGNS)
        _share_or_auto(prefix, self.keep, "tokens", "train on everything")
        if self.probe_every is not None:
            _number(prefix + "probe_every", self.probe_every, int)
            if self.probe_every < 1:
                reason = "it counts the steps from one measurement to the next"
                raise refuse(prefix + "probe_every", self.probe_every, reason, "give an integer >= 1, or null for none")
        if self.rule == "neyman":
            self._check_neyman(prefix)
        else:
            self._check_threshold(prefix)

    def _check_neyman(self, prefix: str) -> None:
        if self.rate is not None:
            raise refuse(
                prefix + "rate",
                self.rate,
                "rule=neyman does not use it",
                f"set {prefix}keep, or {prefix}rule=threshold",
            )
        if self.floor is not None:
            _number(prefix + "floor", self.floor, float)
            highest = LOWEST_KEEP if isinstance(self.keep, str) else self.keep
            if not 0 < self.floor <= highest:
                reason = "a row below it could never be kept, or the budget could not be met"
                bound = f"{highest}, the smallest keep of auto" if self.keep == AUTO else f"keep={highest}"
                raise refuse(prefix + "floor", self.floor, reason, f"give a value in (0, {bound}] or null")

    def _check_threshold(self, prefix: str) -> None:
        if self.floor is not None or self.keep != type(self).keep:
            name, value = ("floor", self.floor) if self.floor is not None else ("keep", self.keep)
            raise refuse(prefix + name, value, "rule=threshold does not use it", f"set {prefix}rate instead")
        if self.rate is not None:
            _number(prefix + "rate", self.rate, float)
            if not 0 <= self.rate < 1:
                reason = (
                    "a below-mean row could never be kept, and no weight repairs that"
                    if self.rate >= 1
                    else "a negative rate"
                )
                raise refuse(prefix + "rate", self.rate, reason, "give a rate in [0, 1)")

    @property
    def drop_rate(self) -> float:
        """The threshold rule's rate, with its default."""
        return 0.5 if self.rate is None else self.rate

    def lowest_pi(self, keep: float) -> float:
        """Return the smallest inclusion probability that the rule gives an informative row at a budget of `keep`."""
        if self.rule == "threshold":
            return 1 - self.drop_rate
        return keep / 4 if self.floor is None else self.floor


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Which prompts are sampled at all, from what earlier visits to them showed."""

    enable: bool = True
    """Prune prompts. Off, verl's own loader decides what every step samples."""

    rule: str = "beta"
    """`beta`: probability proportional to the expected spread of a prompt's rewards. `threshold`: after the paper,
    prompts below the mean spread share a smaller one."""

    schedule: str = "refill"
    """`refill`: a step keeps data.train_batch_size prompts of more that it draws. `shrink`: it draws
    data.train_batch_size and keeps fewer."""

    keep: float | str = 0.9
    """Mean probability of prompts that were visited before, in (0, 1], or `auto`: what past steps show to give the best
    noise-equivalent speed-up, starting at 1."""

    floor: float = 0.3
    """Smallest probability of any prompt, in (0, keep], with `auto` in (0, .5]. The largest weight is its inverse."""

    warmup_visits: int = 1
    """How often a prompt must have been visited before it can be skipped, >= 1."""

    forgetting: float = 0.7
    """How much what was remembered of a prompt still counts at its next visit, in [0, 1]."""

    id_column: str | None = None
    """Column of the data set that names prompts, e.g. `extra_info.index`, unique within a data source; null: a hash of
    the prompt and its data source."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        prefix = "algorithm.dppo.prompt."
        _flag(prefix + "enable", self.enable)
        _choice(prefix + "rule", self.rule, PROMPT_RULES)
        _choice(prefix + "schedule", self.schedule, SCHEDULES)
        _share_or_auto(prefix, self.keep, "prompts", "sample every prompt")
        _number(prefix + "floor", self.floor, float)
        highest = LOWEST_PROMPT_KEEP if isinstance(self.keep, str) else self.keep
        if not 0 < self.floor <= highest:
            reason = "a prompt below it could never be sampled, or the mean probability could not be met"
            bound = f"{highest}, the smallest keep of auto" if self.keep == AUTO else f"keep={highest}"
            raise refuse(prefix + "floor", self.floor, reason, f"give a value in (0, {bound}]")
        _number(prefix + "warmup_visits", self.warmup_visits, int)
        if self.warmup_visits < 1:
            reason = "nothing is known of a prompt before its first visit"
            raise refuse(prefix + "warmup_visits", self.warmup_visits, reason, "give an integer >= 1")
        _number(prefix + "forgetting", self.forgetting, float)
        if not 0 <= self.forgetting <= 1:
            way_out = "give 0 to remember the last visit only, 1 to remember all alike, or something between"
            raise refuse(prefix + "forgetting", self.forgetting, "a weight outside [0, 1]", way_out)
        if self.id_column is not None and (not isinstance(self.id_column, str) or not self.id_column):
            raise refuse(prefix + "id_column", repr(self.id_column), "it names no column", "give a name, or null")


@dataclass(frozen=True, kw_only=True)
class PackingSettings:
    """How rows are packed into micro-batches, where verl cuts these by tokens."""

    enable: bool = True
    """Plan the micro-batches of every rank before the step. Off, each engine of verl cuts its own."""

    window: int | None = None
    """How many rows Dense Prompt Packing chooses from at a time, >= 1; null: all of a rank."""

    micro_batch_tokens: int | None = None
    """Largest number of tokens of a micro-batch, for each device; null: verl's ppo_max_token_len_per_gpu and
    log_prob_max_token_len_per_gpu, which it must not exceed."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        prefix = "algorithm.dppo.packing."
        _flag(prefix + "enable", self.enable)
        for name in ("window", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None:
                _number(prefix + name, value, int)
                if value < 1:
                    raise refuse(prefix + name, value, "nothing would fit", "give an integer >= 1, or null")
                if not self.enable:
                    raise refuse(
                        prefix + name, value, "nothing is packed", f"leave it null, or set {prefix}enable=true"
                    )


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """How the rows of each mini-batch are dealt to the data-parallel ranks."""

    enable: bool = True
    """Balance every mini-batch over the ranks. Off, rows stay in the order that verl gives them."""

    cost: str = AUTO
    """`flops`: what a sequence costs the model, from its configuration. `tokens`: its length. `auto`: flops where the
    configuration tells them, else tokens, with a warning."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        _flag("algorithm.dppo.balance.enable", self.enable)
        _choice("algorithm.dppo.balance.cost", self.cost, COSTS)


@dataclass(frozen=True, kw_only=True)
class DPPOSettings:
    """All of `algorithm.dppo.*`."""

    enable: bool = True
    """Off, the trainer is stock verl to the last bit."""

    seed: int = 0
    """Seed of every draw. A draw depends on it and on the training step only, so that a resumed run repeats it."""

    base_estimator: str | None = None
    """With RayPPOTrainer, algorithm.adv_estimator=dppo: the estimator of the full groups' advantage; null: grpo. The
    trainer sets both, from the estimator it is given."""

    completion: CompletionSettings = field(default_factory=CompletionSettings)
    """Pruning of completions."""

    prompt: PromptSettings = field(default_factory=PromptSettings)
    """Pruning of prompts."""

    packing: PackingSettings = field(default_factory=PackingSettings)
    """Packing into micro-batches."""

    balance: BalanceSettings = field(default_factory=BalanceSettings)
    """Balancing over data-parallel ranks."""

    anneal_fraction: float = 0.0
    """Share of the training steps, at their end, that train on full batches by verl's own code, in [0, 1]."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        _flag("algorithm.dppo.enable", self.enable)
        _number("algorithm.dppo.anneal_fraction", self.anneal_fraction, float)
        if not 0 <= self.anneal_fraction <= 1:
            way_out = "give a share in [0, 1]; .125 is what InfoBatch uses"
            raise refuse("algorithm.dppo.anneal_fraction", self.anneal_fraction, "not a share of the steps", way_out)
        if self.base_estimator is not None and not isinstance(self.base_estimator, str):
            raise refuse("algorithm.dppo.base_estimator", self.base_estimator, "it is not a name", "give one, or null")
        _number("algorithm.dppo.seed", self.seed, int)
        if self.seed < 0:
            raise refuse("algorithm.dppo.seed", self.seed, "a seed cannot be negative", "give an integer >= 0")

    @property
    def prunes(self) -> bool:
        """Whether anything is pruned."""
        return self.prunes_completions or self.prunes_prompts

    @property
    def prunes_completions(self) -> bool:
        """Whether completions are pruned, but for annealed steps."""
        return self.enable and self.completion.enable

    @property
    def prunes_prompts(self) -> bool:
        """Whether prompts are pruned, but for annealed steps."""
        return self.enable and self.prompt.enable

    @property
    def orders(self) -> bool:
        """Whether rows are ordered or packed otherwise than by verl."""
        return self.enable and (self.packing.enable or self.balance.enable)

    @property
    def needs_own_worker(self) -> bool:
        """Whether the actor's workers must be ours: they follow plans, and measure gradient norms."""
        return self.orders or (self.prunes_completions and self.completion.probe_every is not None)

    def anneals(self, step: int, total_steps: int) -> bool:
        """Whether step 1, ..., total_steps of training belongs to the full batches at the end."""
        return step > total_steps - round(self.anneal_fraction * total_steps)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "DPPOSettings":
        """Build the settings from plain nested mappings; a name that nobody reads is an error."""
        known = _known(cls, values, "")
        made = {name: kind(**_group(kind, known.pop(name, {}), name)) for name, kind in GROUPS.items()}
        return cls(**made, **known)


GROUPS: dict[str, type] = {
    "completion": CompletionSettings,
    "prompt": PromptSettings,
    "packing": PackingSettings,
    "balance": BalanceSettings,
}


def _group(cls: type, values: Any, name: str) -> dict[str, Any]:
    """Return the values of a group of settings as keyword arguments of `cls`."""
    if not isinstance(values, Mapping):
        raise refuse(f"algorithm.dppo.{name}", values, "it is not a group of settings", "see dppo.yaml")
    return _known(cls, values, f"{name}.")


def _known(cls: type, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values as keyword arguments of `cls`, refusing names it does not have."""
    names = {f.name for f in fields(cls)}
    for name, value in values.items():
        if name not in names:
            full = prefix + name
            reason = "not built yet" if full in NOT_BUILT else "no such setting"
            way_out = NOT_BUILT.get(full, f"the settings here are {', '.join(sorted(names))}")
            raise refuse(f"algorithm.dppo.{full}", value, reason, way_out)
    return dict(values)
