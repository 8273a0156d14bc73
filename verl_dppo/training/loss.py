"""verl's own actor loss, with a weight on every per-completion term and denominators from before pruning.

verl reduces its policy, entropy and KL terms through one function, `agg_loss`. Within a call of `dppo_loss` that
function first multiplies each completion's row by its weight; outside it is verl's, argument for argument. Nothing of
verl's loss is copied, and FSDP and Megatron share it, because verl hands the loss to whichever engine runs.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.utils import losses

WEIGHT = "dppo_weight"
"""Column of the batch: (rows,) float64, Horvitz-Thompson weight of each completion, 0 for fillers and padding."""

BATCH_NUM_TOKENS = "dppo_batch_num_tokens"
"""Column of the batch: (rows,) float64, response tokens of the row's whole mini-batch before pruning. Where prompts
were skipped it is a constant in their place, fixed before the step."""

GLOBAL_BATCH_SIZE = "dppo_global_batch_size"
"""Column of the batch: (rows,) float64, completions of the row's whole mini-batch before pruning, those of skipped
prompts included."""

EXACT_LOSS_MODES = ("vanilla", "gspo", "sapo", "gpg", "dro", "cispo", "dppo_tv", "dppo_kl", "bypass_mode")
"""Policy losses whose expected gradient is exact under the weights, by enumeration (tests/training/test_loss.py)."""

EXACT_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""Aggregation modes for which that holds, the `-norm` one with a constant `loss_scale_factor`."""


@dataclass
class _Weighting:
    weight: torch.Tensor
    calls: int = 0


_installing = Lock()
_current: ContextVar[_Weighting | None] = ContextVar("dppo_weighting", default=None)


def _weighted(aggregate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return verl's aggregation with the current weights on the rows, where there are any."""

    def agg_loss(loss_mat: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weighting = _current.get()
        if weighting is None:
            return aggregate(loss_mat, *args, **kwargs)
        if loss_mat.dim() != 2 or loss_mat.shape[0] != weighting.weight.shape[0]:
            raise RuntimeError(
                f"DPPO has weights for {weighting.weight.shape[0]} rows, verl aggregates {tuple(loss_mat.shape)}"
            )
        weighting.calls += 1
        return aggregate(loss_mat * weighting.weight.to(loss_mat)[:, None], *args, **kwargs)

    agg_loss.verl_original = aggregate  # type: ignore[attr-defined]
    return agg_loss


def install_weighted_aggregation() -> None:
    """Put the weighted aggregation in the two places where verl looks `agg_loss` up; once per process.

    Not undone after a call: threads share the module, and the context variable already confines the weights to a call.
    """
    with _installing:
        if hasattr(core_algos.agg_loss, "verl_original"):
            return
        if losses.agg_loss is not core_algos.agg_loss or core_algos.agg_loss.__module__ != core_algos.__name__:
            raise RuntimeError("agg_loss in verl is not verl's own: another plugin has replaced it")
        core_algos.agg_loss = losses.agg_loss = _weighted(core_algos.agg_loss)


def _column(data: TensorDict, name: str) -> torch.Tensor:
    if name not in data:
        raise RuntimeError(
            f"the column {name!r} did not reach the worker, so the loss would be unweighted and biased; "
            f"columns that did: {sorted(map(str, data.keys()))}"
        )
    column = data[name]
    if column.dim() != 1 or not bool(torch.isfinite(column).all()) or bool((column < 0).any()):
        raise RuntimeError(f"the column {name!r} must hold one finite value >= 0 for each row, got {column}")
    return column


def dppo_loss(config: Any, model_output: Any, data: TensorDict, dp_group: Any = None) -> tuple[torch.Tensor, dict]:
    """Compute verl's `ppo_loss` with every completion's whole term (policy, KL, entropy) times its weight.

    Args:
        config: verl's ActorConfig.
        model_output: `log_probs` and, where computed, `entropy`, as verl's engines give them.
        data: a micro-batch with verl's columns, WEIGHT, and the denominators BATCH_NUM_TOKENS and GLOBAL_BATCH_SIZE,
            which replace the token count that verl took of the kept rows, and the size that it takes a mini-batch for.
        dp_group: passed on.

    Returns:
        The loss and verl's metrics; `pg_loss`, `entropy_loss`, `kl_loss` among them estimate those of the full batch.

    Raises:
        RuntimeError: an unusable column, rows of two mini-batches in one, or a loss that reduces its rows by itself.
    """
    install_weighted_aggregation()
    weight, tokens, size = (_column(data, name) for name in (WEIGHT, BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE))
    if not bool((tokens == tokens[0]).all() and (size == size[0]).all()):
        raise RuntimeError(
            f"rows of different mini-batches in one micro-batch: token counts {tokens.unique().tolist()}, "
            f"sizes {size.unique().tolist()}"
        )
    weighting = _Weighting(weight)
    of_verl = {name: data[name] for name in ("batch_num_tokens", "global_batch_size")}
    tu.assign_non_tensor(data, batch_num_tokens=float(tokens[0]), global_batch_size=float(size[0]))
    token = _current.set(weighting)
    try:
        loss, metrics = losses.ppo_loss(config, model_output, data, dp_group)
    finally:
        _current.reset(token)
        tu.assign_non_tensor(data, **of_verl)
    expected = 1 + (model_output.get("entropy", None) is not None) + bool(config.use_kl_loss)
    if weighting.calls != expected:
        raise RuntimeError(
            f"loss_mode={config.policy_loss.get('loss_mode', 'vanilla')!r} aggregated {weighting.calls} terms through "
            f"verl's agg_loss where {expected} were expected: some term is not weighted"
        )
    return loss, metrics
