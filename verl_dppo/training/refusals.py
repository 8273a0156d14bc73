"""What a DPPO run refuses before any worker starts, each with the setting, its value and the way out.

A refusal stands for something that would train with a biased gradient, or would quietly not train with DPPO at all.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from packaging.specifiers import SpecifierSet

from verl_dppo.settings import DPPOSettings, PackingSettings, RefusedSettingError, refuse
from verl_dppo.training.passes import (
    ACTOR,
    REFERENCE,
    ROLLOUT,
    base_estimator,
    data_parallel_ranks,
    passes,
    rows_multiple,
    select,
)

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")
ROLLOUT_CORRECTION = "algorithm.rollout_correction"
# Advantage estimators that are exact under pruning (tests/training/test_algorithms.py). Each gives a completion one
# number, from rewards and lengths of the full batch; that number is 0 where the group's rewards are equal; and verl can
# compute it on what is left of a group too, which it does before the trainer puts the full group's numbers back.
EXACT_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg")


def settings_of(config: DictConfig) -> DPPOSettings:
    """Return the validated settings of a composed verl configuration.

    Raises:
        RefusedSettingError: `algorithm.dppo` is missing, or holds something that is refused.
    """
    node = OmegaConf.select(config, "algorithm.dppo")
    if node is None:
        way_out = "choose `algorithm=dppo` (on a config that is not verl's own: `+algorithm=dppo`)"
        raise refuse("algorithm.dppo", None, "the DPPO trainer has no settings", way_out)
    plain = OmegaConf.to_container(node, resolve=True)
    if not isinstance(plain, dict):
        raise refuse("algorithm.dppo", plain, "it is not a group of settings", "choose `algorithm=dppo`")
    return DPPOSettings.from_mapping({str(name): value for name, value in plain.items()})


def _switch(config: DictConfig, name: str, reason: str, way_out: str) -> Iterator[RefusedSettingError]:
    value = select(config, name)
    if value not in (None, False, ""):
        yield refuse(name, value, reason, way_out)


def _of_the_entry(config: DictConfig, uses_v1: bool) -> Iterator[RefusedSettingError]:
    yield from _of_v1(config) if uses_v1 else _of_ray_ppo_trainer(config)
    way_out = "set critic.enable=false"
    if select(config, "critic.enable") is None and select(config, "algorithm.adv_estimator") == "gae":
        reason = "this estimator trains a critic, whose batches DPPO does not order"
        yield refuse("algorithm.adv_estimator", "gae", reason, "use another estimator, or the trainer sync")
    yield from _switch(config, "critic.enable", "DPPO prunes and orders what a critic would train on", way_out)
    yield from _of_the_engine(config)


def _of_v1(config: DictConfig) -> Iterator[RefusedSettingError]:
    mode = select(config, "trainer.v1.trainer_mode")
    if mode != "dppo":
        reason = f"the {mode} trainer would train plain GRPO without a word"
        yield refuse(
            "trainer.v1.trainer_mode", mode, reason, "leave it at dppo, which is verl's sync trainer with hooks"
        )
    updates = int(select(config, "trainer.v1.sync.parameter_sync_step", 1))
    if updates != 1:
        reason = "a step would hold several batches, of which the metrics would describe the last"
        yield refuse("trainer.v1.sync.parameter_sync_step", updates, reason, "leave it at 1")
    reason, way_out = "the v1 trainer takes algorithm.adv_estimator itself", "leave it null, and set that"
    yield from _switch(config, "algorithm.dppo.base_estimator", reason, way_out)


def _of_ray_ppo_trainer(config: DictConfig) -> Iterator[RefusedSettingError]:
    if not select(config, "trainer.balance_batch", False):
        reason = "RayPPOTrainer hands out its batch, to be pruned and ordered, only where it balances it"
        yield refuse("trainer.balance_batch", False, reason, "set it to true")
    sampling, way_out = "algorithm.filter_groups.enable", "set it to false, or use the v1 trainer (trainer.use_v1=true)"
    yield from _switch(config, sampling, "RayPPOTrainer has no dynamic sampling, and would ignore it", way_out)
    model = "reward.reward_model"
    if select(config, f"{model}.enable", False) and not select(config, f"{model}.enable_resource_pool", False):
        reason = "a reward model on the actor's devices scores after RayPPOTrainer has balanced the batch"
        way_out = f"set {model}.enable_resource_pool=true, or use the v1 trainer (trainer.use_v1=true)"
        yield refuse(f"{model}.enable_resource_pool", False, reason, way_out)
    fetched, mini = select(config, "data.gen_batch_size"), int(select(config, f"{ACTOR}.ppo_mini_batch_size"))
    if fetched is not None and int(fetched) % mini:
        reason = f"RayPPOTrainer makes a step of each fetch, which does not divide into mini-batches of {mini} prompts"
        yield refuse("data.gen_batch_size", fetched, reason, f"leave it null, or use a multiple of {mini}")
    warmup = int(select(config, "trainer.critic_warmup", 0))
    if warmup:
        reason = "without a critic these steps sample, and train nothing"
        yield refuse("trainer.critic_warmup", warmup, reason, "leave it at 0")
    estimator, base = (select(config, f"algorithm.{name}") for name in ("adv_estimator", "dppo.base_estimator"))
    if base is not None and estimator not in ("dppo", base):
        reason = f"algorithm.adv_estimator={estimator} names another one"
        yield refuse("algorithm.dppo.base_estimator", base, reason, "leave it null")


def _of_the_engine(config: DictConfig) -> Iterator[RefusedSettingError]:
    untested = "DPPO was not tested with it"
    for name, off in (("dynamic_context_parallel", "false"), ("virtual_pipeline_model_parallel_size", "null")):
        of_actor, of_reference = (f"{role}.megatron.{name}" for role in (ACTOR, REFERENCE))
        setting = (
            of_actor if select(config, of_actor) else of_reference
        )  # which takes the actor's, unless it has its own
        yield from _switch(config, setting, untested, f"set {setting}={off}")


def _of_the_advantage(config: DictConfig, uses_v1: bool) -> Iterator[RefusedSettingError]:
    estimator = base_estimator(config) if not uses_v1 else select(config, "algorithm.adv_estimator")
    if estimator not in EXACT_ESTIMATORS:
        reason = (
            "pruning is exact where a completion has one advantage, which is 0 where its group's rewards are equal and "
            "which verl can compute on what is left of a group"
        )
        yield refuse("algorithm.adv_estimator", estimator, reason, f"use one of {', '.join(EXACT_ESTIMATORS)}")
    n = int(select(config, f"{ROLLOUT}.n", 1))
    if n < 2:
        reason = "the advantage of a group of one is not defined"
        yield refuse(f"{ROLLOUT}.n", n, reason, "sample at least 2 completions for each prompt")


def _of_the_loss(config: DictConfig) -> Iterator[RefusedSettingError]:
    from verl_dppo.training.loss import EXACT_AGG_MODES, EXACT_LOSS_MODES

    yield from _switch(
        config,
        "algorithm.use_kl_in_reward",
        "the penalty needs log-probs of completions before they are pruned",
        f"use the KL loss instead, which DPPO weights: {ACTOR}.use_kl_loss=true",
    )
    loss_mode = select(config, f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if loss_mode not in EXACT_LOSS_MODES:
        reason = "its gradient is not linear in a completion's weight, so that pruning would bias it"
        way_out = f"use one of {', '.join(EXACT_LOSS_MODES)}"
        yield refuse(f"{ACTOR}.policy_loss.loss_mode", loss_mode, reason, way_out)
    agg_mode = select(config, f"{ACTOR}.loss_agg_mode", "token-mean")
    if agg_mode not in EXACT_AGG_MODES:
        yield refuse(f"{ACTOR}.loss_agg_mode", agg_mode, "unknown to DPPO", f"use one of {', '.join(EXACT_AGG_MODES)}")
    if agg_mode == "seq-mean-token-sum-norm" and not select(config, f"{ACTOR}.loss_scale_factor"):
        reason = f"{agg_mode} then divides by the longest response of whatever micro-batch is left"
        way_out = "set a constant, e.g. data.max_response_length"
        yield refuse(f"{ACTOR}.loss_scale_factor", None, reason, way_out)
    for node in (ROLLOUT_CORRECTION, f"{ACTOR}.policy_loss.rollout_correction"):
        for name, what in (("rollout_rs", "rejects"), ("rollout_is_batch_normalize", "normalises over")):
            reason = f"it {what} survivors of the pruning, on which the rest of the batch then depends"
            yield from _switch(config, f"{node}.{name}", reason, f"set {node}.{name}=null")
    yield from _switch(
        config,
        "distillation.enabled",
        "DPPO's loss would replace the distillation loss",
        "set distillation.enabled=false",
    )
    yield from _switch(
        config,
        "actor_rollout_ref.model.mtp.enable_train",
        "the engine adds the multi-token-prediction loss outside the actor loss, without weights",
        "set actor_rollout_ref.model.mtp.enable_train=false",
    )
    yield from _of_megatron(config)


def _of_megatron(config: DictConfig) -> Iterator[RefusedSettingError]:
    transformer = f"{ACTOR}.megatron.override_transformer_config"
    outside = "the engine adds this router loss outside the actor loss, without weights"
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        yield from _switch(config, f"{transformer}.{name}", outside, f"set {transformer}.{name}=0")
    balancing = f"{transformer}.moe_router_load_balancing_type"
    if select(config, balancing, "none") != "none":
        yield refuse(balancing, select(config, balancing), outside, f"set {balancing}=none")
    coupled = "what happens to a token would depend on the other rows that are kept"
    for name, off in (("moe_expert_capacity_factor", "null"), ("moe_router_enable_expert_bias", "false")):
        yield from _switch(config, f"{transformer}.{name}", coupled, f"set {transformer}.{name}={off}")


def _of_the_batch(config: DictConfig, prunes: bool) -> Iterator[RefusedSettingError]:
    prompts, mini = int(config.data.train_batch_size), int(select(config, f"{ACTOR}.ppo_mini_batch_size"))
    if prunes and prompts % mini:
        reason = f"it does not divide into mini-batches of {mini} prompts"
        yield refuse("data.train_batch_size", prompts, reason, f"use a multiple of {ACTOR}.ppo_mini_batch_size={mini}")
    yield from _switch(
        config,
        f"{ACTOR}.shuffle",
        "it would move rows between mini-batches after the draw",
        f"set {ACTOR}.shuffle=false",
    )
    yield from _switch(
        config,
        f"{ACTOR}.use_prefix_grouper",
        "it needs whole groups in a micro-batch",
        f"set {ACTOR}.use_prefix_grouper=false",
    )
    try:
        ranks, multiple = data_parallel_ranks(config), rows_multiple(config)
    except RefusedSettingError as error:
        yield error
        return
    rows = mini * int(select(config, f"{ROLLOUT}.n", 1))
    if rows % multiple:
        reason = f"its {rows} completions do not divide over {ranks} data-parallel ranks ({multiple} rows at a time)"
        way_out = f"make ppo_mini_batch_size * rollout.n a multiple of {multiple}, or set {ACTOR}.use_dynamic_bsz=true"
        yield refuse(f"{ACTOR}.ppo_mini_batch_size", mini, reason, way_out)


def _of_the_prompts(config: DictConfig, uses_v1: bool) -> Iterator[RefusedSettingError]:
    way_out = "set algorithm.dppo.prompt.enable=false; completions are then pruned as before"
    drawn = "how many prompts it draws depends on their rollouts, so that no prompt has an exact weight"
    yield from _switch(config, "algorithm.filter_groups.enable", f"dynamic sampling: {drawn}", way_out)
    yield from _switch(config, "trainer.v1.sampler.sync_refill_failed_groups", drawn, f"leave it false, or {way_out}")
    replayed = "rollouts from a file belong to prompts that this run did not draw"
    yield from _switch(config, "skip.rollout_tq.enable" if uses_v1 else "skip.rollout.enable", replayed, way_out)
    if base_estimator(config) == "gpg":
        reason = "it scales advantages by a count over the whole batch, in which the skipped prompts are missing"
        yield refuse("algorithm.adv_estimator", "gpg", reason, f"use another estimator, or {way_out}")
    fetched, prompts = select(config, "data.gen_batch_size"), int(config.data.train_batch_size)
    if fetched not in (None, prompts):
        reason = "a step draws all its prompts at once"
        yield refuse("data.gen_batch_size", fetched, reason, f"leave it null, or {way_out}")
    if not uses_v1:
        yield from _of_agent_loop_workers(config)


def _of_agent_loop_workers(config: DictConfig) -> Iterator[RefusedSettingError]:
    """Refuse numbers of completions that RayPPOTrainer could not split over its agent loop workers."""
    schedule = "algorithm.dppo.prompt.schedule"
    mini_batches = int(config.data.train_batch_size) // int(select(config, f"{ACTOR}.ppo_mini_batch_size"))
    kept, workers = (
        mini_batches * int(select(config, f"{ROLLOUT}.n", 1)),
        int(select(config, f"{ROLLOUT}.agent.num_workers", 1)),
    )
    if select(config, schedule) == "shrink" and kept % workers:
        reason = f"kept completions come in multiples of {kept}, and RayPPOTrainer splits them over {workers} workers"
        way_out = f"use refill, or make {ROLLOUT}.agent.num_workers a divisor of {kept}"
        yield refuse(schedule, "shrink", reason, way_out)


def _of_the_packing(config: DictConfig, packing: PackingSettings) -> Iterator[RefusedSettingError]:
    if not packing.enable:
        return
    cut_by_tokens = passes(config, packing)
    for name in ("window", "micro_batch_tokens") if not cut_by_tokens else ():
        way_out = f"leave it null, or set {ACTOR}.use_dynamic_bsz=true"
        reason = "micro-batches have a fixed number of rows, so that nothing is packed"
        yield from _switch(config, f"algorithm.dppo.packing.{name}", reason, way_out)
    for made in cut_by_tokens.values():
        if packing.micro_batch_tokens is not None and packing.micro_batch_tokens > made.limit:
            reason = f"the engine takes {made.limit} tokens at most"
            way_out = f"raise {made.setting}, or give a smaller number, or null to use that"
            yield refuse("algorithm.dppo.packing.micro_batch_tokens", packing.micro_batch_tokens, reason, way_out)


def check_verl_version(installed: str) -> None:
    """Refuse a verl outside the supported range.

    Raises:
        RefusedSettingError: `installed` is such a version.
    """
    if not SUPPORTED_VERL.contains(installed, prereleases=True):
        reason = f"verl_dppo attaches to hooks of verl {SUPPORTED_VERL}"
        raise refuse("verl", installed, reason, f"pip install 'verl{SUPPORTED_VERL}'")


def check_run(config: DictConfig, uses_v1: bool | None = None) -> DPPOSettings:
    """Check a composed configuration and return its settings; with DPPO off nothing but the settings is checked.

    Args:
        config: verl's.
        uses_v1: whether verl's v1 trainer runs it, or RayPPOTrainer; None: as `trainer.use_v1` says.

    Raises:
        RefusedSettingError: with one line for each thing that is refused.
    """
    settings = settings_of(config)
    if uses_v1 is None:
        uses_v1 = bool(select(config, "trainer.use_v1", True))
    check_verl_version(version("verl"))
    check_plugin()
    if settings.prunes or settings.orders:
        found = [*_of_the_entry(config, uses_v1), *_of_the_batch(config, settings.prunes)]
        if settings.prunes:
            found += [*_of_the_advantage(config, uses_v1), *_of_the_loss(config)]
        if settings.prunes_prompts:
            found += _of_the_prompts(config, uses_v1)
        if not found:
            found += _of_the_packing(config, settings.packing)
        if found:
            raise RefusedSettingError("\n".join(map(str, found)))
    return settings


def check_plugin() -> None:
    """Refuse to run with a plugin that is only partly there.

    Raises:
        RefusedSettingError: a registration failed in this process.
    """
    plugin = sys.modules.get("verl_dppo.plugin")  # not imported here: that would register what verl was told not to
    for what, error in getattr(plugin, "failures", {}).items():
        raise refuse("verl_dppo", what, f"it could not be registered: {error}", "see `verl-dppo check`")


def check_entry_point(task_function: Any) -> None:
    """Refuse verl's other entry points, whose trainers never look at `trainer.v1.trainer_mode`.

    Raises:
        RefusedSettingError: the job belongs to such a module of verl.
    """
    module = getattr(task_function, "__module__", "")
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if module == "__main__" and spec is not None:
        module = spec.name
    if module.startswith("verl.") and module != "verl.trainer.main_ppo":
        reason = "its own trainer would train plain GRPO without a word"
        raise refuse("entry point", module, reason, "use python -m verl.trainer.main_ppo")


def check_substitution() -> None:
    """Refuse to run where verl's entry point would build its own RayPPOTrainer.

    Raises:
        RefusedSettingError: the trainer's place in it could not be taken.
    """
    from verl.trainer import main_ppo_v0

    from verl_dppo.training.classic_entry import is_installed

    check_plugin()
    if not is_installed(main_ppo_v0):
        reason = "verl would build its own RayPPOTrainer, and train plain GRPO without a word"
        raise refuse("trainer.use_v1", False, reason, "set it to true, or see `verl-dppo check`")


class RefuseBeforeStart(Callback):
    """Hydra callback, named in dppo.yaml: checks the run on the driver, before Ray starts.

    Hydra turns an exception of a callback into a warning; SystemExit ends the run.
    """

    def on_job_start(self, config: DictConfig, *, task_function: Any = None, **_: Any) -> None:
        """Check one job, in a single run or a multirun."""
        try:
            settings = check_run(config)
            if settings.prunes or settings.orders:
                check_entry_point(task_function)
                if not select(config, "trainer.use_v1", True):
                    check_substitution()
        except RefusedSettingError as error:
            raise SystemExit(f"algorithm=dppo will not start this run:\n{error}") from error
