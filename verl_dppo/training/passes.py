"""The ways in which verl runs over the rows of a step: with how many ranks, and how it cuts micro-batches."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_dppo.settings import PackingSettings, refuse

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"

UPDATE, LOG_PROB, REFERENCE_LOG_PROB = "update", "log_prob", "reference"
"""The update of the actor, the pass for its old log-probs, and that for those of a reference policy."""

# The role that runs a pass, and the settings of verl: micro-batches by tokens, these tokens, or so many rows.
_SETTINGS = {
    UPDATE: (
        ACTOR,
        f"{ACTOR}.use_dynamic_bsz",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    ),
    LOG_PROB: (
        ACTOR,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    ),
    REFERENCE_LOG_PROB: (
        REFERENCE,
        f"{REFERENCE}.log_prob_use_dynamic_bsz",
        f"{REFERENCE}.log_prob_max_token_len_per_gpu",
        f"{REFERENCE}.log_prob_micro_batch_size_per_gpu",
    ),
}
# Engines that run the actor.
ENGINES = ("fsdp", "fsdp2", "megatron")
# Settings of Megatron whose product, times the devices that share a sequence, is the span of a data-parallel rank.
MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


@dataclass(frozen=True)
class Pass:
    """A pass whose micro-batches are cut by tokens.

    Attributes:
        ranks: its data-parallel ranks.
        capacity: largest number of tokens of a micro-batch, over all devices of a rank that share a sequence.
        setting: verl's setting behind it.
        limit: its value, in tokens of one device.
    """

    ranks: int
    capacity: int
    setting: str
    limit: int


def select(config: DictConfig, name: str, default: Any = None) -> Any:
    """Return the value of a setting, or the default where it is missing or null."""
    value = OmegaConf.select(config, name)
    return default if value is None else value


def base_estimator(config: DictConfig) -> str:
    """Return the estimator of the full groups' advantage; `dppo` stands for what is recorded as its base."""
    named = select(config, "algorithm.adv_estimator")
    if named == "dppo":
        named = select(config, "algorithm.dppo.base_estimator", "grpo")
    return str(named.value if isinstance(named, Enum) else named)


def data_parallel_ranks(config: DictConfig, role: str = ACTOR) -> int:
    """Return the number of data-parallel ranks that the configuration asks for.

    Args:
        config: verl's composed configuration.
        role: the node of the actor or of the reference policy.

    Raises:
        RefusedSettingError: an engine that DPPO was not tested on, or devices that its ranks do not divide.
    """
    strategy = select(config, f"{ACTOR}.strategy")
    if strategy not in ENGINES:
        way_out = f"use one of {', '.join(ENGINES)}"
        raise refuse(f"{ACTOR}.strategy", strategy, "DPPO was not tested on this engine", way_out)
    devices = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    span = _devices_of_a_sequence(config, role)
    if strategy == "megatron":
        span *= math.prod(int(select(config, f"{role}.megatron.{name}", 1)) for name in MODEL_PARALLEL)
    if devices % span:
        reason = f"one data-parallel rank of {role} spans {span} devices"
        raise refuse("trainer.n_gpus_per_node * trainer.nnodes", devices, reason, f"use a multiple of {span}")
    return devices // span


def _devices_of_a_sequence(config: DictConfig, role: str) -> int:
    """Return over how many devices of a data-parallel rank the tokens of a sequence are spread."""
    if select(config, f"{ACTOR}.strategy") == "megatron":
        return int(select(config, f"{role}.megatron.context_parallel_size", 1))
    # verl's older name for it wins where both are set.
    older = int(select(config, f"{role}.ulysses_sequence_parallel_size", 1))
    return older if older > 1 else int(select(config, f"{role}.fsdp_config.ulysses_sequence_parallel_size", 1))


def _names(config: DictConfig) -> list[str]:
    """Return the passes of a run; under LoRA the actor without its adapter is the reference, in a pass like its own."""
    model = "actor_rollout_ref.model"
    adapted = int(select(config, f"{model}.lora.rank", 0)) > 0 or int(select(config, f"{model}.lora_rank", 0)) > 0
    adapted = adapted or select(config, f"{model}.lora_adapter_path") is not None
    asked = select(config, f"{ACTOR}.use_kl_loss", False) or select(config, "algorithm.use_kl_in_reward", False)
    own_reference = asked and not adapted
    return [name for name in _SETTINGS if name != REFERENCE_LOG_PROB or own_reference]


def rows_multiple(config: DictConfig) -> int:
    """Return what the rows of a mini-batch must be a multiple of: the ranks, times fixed micro-batch sizes.

    Raises:
        RefusedSettingError: a micro-batch size that is neither dynamic nor given, or from `data_parallel_ranks`.
    """
    multiple = 1
    for role, dynamic, _, rows in (_SETTINGS[name] for name in _names(config)):
        size = 1 if select(config, dynamic, False) else select(config, rows)
        if size is None:
            reason = "without dynamic micro-batches its size must be known"
            raise refuse(rows, None, reason, f"set it, or {dynamic}=true")
        multiple = math.lcm(multiple, data_parallel_ranks(config, role) * int(size))
    return multiple


def passes(config: DictConfig, packing: PackingSettings) -> dict[str, Pass]:
    """Return the passes of a run whose micro-batches are cut by tokens.

    Args:
        config: verl's composed configuration.
        packing: whose own limit holds where it is smaller than verl's.

    Raises:
        RefusedSettingError: from `data_parallel_ranks`.
    """
    found = {}
    for name in _names(config):
        role, dynamic, setting, _ = _SETTINGS[name]
        if select(config, dynamic, False) and select(config, setting) is not None:
            limit = int(select(config, setting))
            tokens = min(limit, packing.micro_batch_tokens or limit) * _devices_of_a_sequence(config, role)
            found[name] = Pass(data_parallel_ranks(config, role), tokens, setting, limit)
    return found
