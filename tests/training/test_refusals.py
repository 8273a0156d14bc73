"""Every refusal, by its message, before any worker starts."""

import copy
import os
import subprocess
import sys
from functools import cache

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.core_algos import AdvantageEstimator

from verl_dppo import plugin
from verl_dppo.settings import PackingSettings, RefusedSettingError
from verl_dppo.training.passes import (
    LOG_PROB,
    REFERENCE_LOG_PROB,
    UPDATE,
    Pass,
    base_estimator,
    data_parallel_ranks,
    passes,
    rows_multiple,
)
from verl_dppo.training.refusals import RefuseBeforeStart, check_entry_point, check_run, check_verl_version

ACTOR, ROLLOUT, REFERENCE = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
RUN = (
    "algorithm=dppo",
    "actor_rollout_ref.rollout.n=8",
    "data.train_batch_size=64",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.use_dynamic_bsz=true",
)
NO_PRUNING = ("algorithm.dppo.completion.enable=false", "algorithm.dppo.prompt.enable=false")
NO_ORDER = ("algorithm.dppo.packing.enable=false", "algorithm.dppo.balance.enable=false")


@cache
def composed(*choices):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*RUN, *choices])


def config(*overrides):
    """Return what Hydra composes, with each choice of files composed once: that takes it ten times as long."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    made = copy.deepcopy(composed(*(one.input_line for one in parsed if "." not in one.key_or_group)))
    for one in parsed:
        if "." in one.key_or_group:
            OmegaConf.update(made, one.key_or_group, one.value(), force_add=one.is_add())
    return made


def test_a_configuration_of_these_tests_is_what_hydra_composes():
    overrides = ("model_engine=megatron", f"{ACTOR}.shuffle=true", "data.gen_batch_size=null", "+trainer.v1.new.one=2")
    assert config(*overrides) == composed(*overrides)


def test_a_plain_run_is_let_through():
    assert check_run(config()).prunes_completions


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.dppo.completion.keep=0"], r"algorithm\.dppo\.completion\.keep=0 is refused"),
        (["algorithm.dppo.completion.keep=1.01"], r"algorithm\.dppo\.completion\.keep=1\.01 is refused"),
        (["algorithm.dppo.completion.rule=threshold", "algorithm.dppo.completion.rate=1"], r"rate=1 is refused"),
        (["algorithm.dppo.completion.design=systematic"], r"design=systematic is refused.*pivotal"),
        (["algorithm.dppo.prompt.keep=0"], r"algorithm\.dppo\.prompt\.keep=0 is refused"),
        (["algorithm.dppo.packing.window=0"], r"algorithm\.dppo\.packing\.window=0 is refused"),
        (["algorithm.dppo.balance.cost=seconds"], r"algorithm\.dppo\.balance\.cost=seconds is refused.*tokens"),
        (["+algorithm.dppo.preset=paper"], r"algorithm\.dppo\.preset=paper is refused: not built yet"),
        (["trainer.v1.trainer_mode=sync"], r"trainer_mode=sync is refused.*plain GRPO"),
        (["trainer.v1.trainer_mode=colocate_async"], r"trainer_mode=colocate_async is refused"),
        (["actor_rollout_ref.rollout.n=1"], r"rollout\.n=1 is refused.*at least 2"),
        (["algorithm.adv_estimator=gae"], r"adv_estimator=gae is refused.*grpo"),
        (["algorithm.adv_estimator=dppo"], r"adv_estimator=dppo is refused"),
        (["critic.enable=true"], r"critic\.enable=True is refused"),
        (["algorithm.use_kl_in_reward=true"], r"use_kl_in_reward=True is refused.*use_kl_loss=true"),
        (["algorithm.adv_estimator=reinforce_plus_plus_baseline"], r"reinforce_plus_plus_baseline is refused.*rloo"),
        (["algorithm.adv_estimator=grpo_passk"], r"adv_estimator=grpo_passk is refused.*what is left of a group"),
        ([f"{ACTOR}.policy_loss.loss_mode=clip_cov"], r"loss_mode=clip_cov is refused.*vanilla"),
        ([f"{ACTOR}.policy_loss.loss_mode=kl_cov"], r"loss_mode=kl_cov is refused"),
        ([f"{ACTOR}.policy_loss.loss_mode=geo_mean"], r"loss_mode=geo_mean is refused"),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], r"loss_scale_factor=None is refused.*constant"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], r"rollout_rs=token_k1 is refused.*survivors"),
        (
            ["algorithm.rollout_correction.rollout_is_batch_normalize=true"],
            r"rollout_is_batch_normalize=True is refused",
        ),
        (
            [f"+{ACTOR}.policy_loss.rollout_correction.rollout_is_batch_normalize=true"],
            r"actor\.policy_loss\.rollout_correction\.rollout_is_batch_normalize=True is refused",
        ),
        (["+trainer.v1.sync.parameter_sync_step=2"], r"sync\.parameter_sync_step=2 is refused"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=3"], r"nnodes=8 is refused.*multiple of 3"),
        (["distillation.enabled=true"], r"distillation\.enabled=True is refused"),
        (["actor_rollout_ref.model.mtp.enable_train=true"], r"mtp\.enable_train=True is refused"),
        (["data.train_batch_size=48"], r"data\.train_batch_size=48 is refused.*multiple of .*ppo_mini_batch_size=32"),
        ([f"{ACTOR}.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=16"], r"ppo_mini_batch_size=1 is refused.*16"),
        ([f"{ACTOR}.use_dynamic_bsz=false"], r"ppo_micro_batch_size_per_gpu=None is refused.*use_dynamic_bsz=true"),
        ([f"{ACTOR}.shuffle=true"], r"shuffle=True is refused"),
        ([f"{ACTOR}.use_prefix_grouper=true"], r"use_prefix_grouper=True is refused"),
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=3"], r"nnodes=8 is refused.*multiple of 3"),
    ],
)
def test_what_is_not_exact_is_refused_with_its_name_value_and_way_out(overrides, message):
    with pytest.raises(RefusedSettingError, match=message) as refusal:
        check_run(config(*overrides))
    assert "Way out:" in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.filter_groups.enable=true"],
            r"algorithm\.filter_groups\.enable=True is refused: dynamic sampling",
        ),
        (
            ["trainer.v1.sampler.sync_refill_failed_groups=true"],
            r"trainer\.v1\.sampler\.sync_refill_failed_groups=True is refused: .*no prompt has an exact weight",
        ),
        (["skip.rollout_tq.enable=true"], r"skip\.rollout_tq\.enable=True is refused: rollouts from a file"),
        (["data.gen_batch_size=32"], r"data\.gen_batch_size=32 is refused: a step draws all its prompts at once"),
    ],
)
def test_what_prompts_cannot_be_pruned_with_is_refused_and_let_through_where_they_are_not(overrides, message):
    """Completions are pruned of a batch that is full, whatever filled it."""
    with pytest.raises(RefusedSettingError, match=message) as refusal:
        check_run(config(*overrides))
    assert len(str(refusal.value).splitlines()) == 1
    assert "Way out: " in str(refusal.value)
    assert "set algorithm.dppo.prompt.enable=false" in str(refusal.value)
    settings = check_run(config(*overrides, "algorithm.dppo.prompt.enable=false"))
    assert (settings.prunes_completions, settings.prunes_prompts) == (True, False)


def test_a_step_that_fetches_what_it_trains_on_is_let_through():
    assert check_run(config("data.gen_batch_size=64")).prunes_prompts


def test_with_prompts_alone_everything_is_checked_too():
    alone = "algorithm.dppo.completion.enable=false"
    assert check_run(config(alone)).prunes_prompts
    with pytest.raises(RefusedSettingError, match=r"shuffle=True is refused"):
        check_run(config(alone, f"{ACTOR}.shuffle=true"))


def test_a_fixed_micro_batch_that_does_not_divide_is_refused():
    sizes = ["ppo_micro_batch_size_per_gpu=12", "use_dynamic_bsz=false"]
    overrides = [f"{ACTOR}.{size}" for size in sizes]
    with pytest.raises(
        RefusedSettingError, match=r"ppo_mini_batch_size=32 is refused: its 256 completions do not divide"
    ):
        check_run(config(*overrides, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("override_transformer_config.moe_aux_loss_coeff", 0.01),
        ("override_transformer_config.moe_z_loss_coeff", 0.01),
        ("override_transformer_config.moe_router_load_balancing_type", "aux_loss"),
        ("override_transformer_config.moe_expert_capacity_factor", 1.25),
        ("override_transformer_config.moe_router_enable_expert_bias", True),
        ("dynamic_context_parallel", True),
        ("virtual_pipeline_model_parallel_size", 2),
    ],
)
def test_what_megatron_adds_outside_the_actor_loss_or_was_not_tested_is_refused(name, value):
    run = config("model_engine=megatron")
    assert check_run(run).prunes_completions
    with open_dict(run):
        OmegaConf.update(run, f"{ACTOR}.megatron.{name}", value, force_add=True)
    with pytest.raises(RefusedSettingError, match=rf"{name.split('.')[-1]}={value} is refused"):
        check_run(run)


def test_verls_other_entry_points_are_refused():
    def job(config):
        return None

    job.__module__ = "verl.experimental.one_step_off_policy.main_ppo"
    with pytest.raises(RefusedSettingError, match=r"entry point=verl\.experimental.*plain GRPO"):
        check_entry_point(job)
    with pytest.raises(SystemExit, match=r"entry point=verl\.experimental"):
        RefuseBeforeStart().on_job_start(config(), task_function=job)
    levels_off = ("algorithm.dppo.completion.enable=false", "algorithm.dppo.prompt.enable=false")
    with pytest.raises(SystemExit, match=r"entry point=verl\.experimental"):
        RefuseBeforeStart().on_job_start(config(*levels_off), task_function=job)
    RefuseBeforeStart().on_job_start(config("algorithm.dppo.enable=false"), task_function=job)
    job.__module__ = "my.own.main"
    check_entry_point(job)


def test_the_critic_of_an_estimator_is_refused_where_only_ordering_is_on():
    levels_off = ("algorithm.dppo.completion.enable=false", "algorithm.dppo.prompt.enable=false")
    with pytest.raises(RefusedSettingError, match=r"adv_estimator=gae is refused: .*critic"):
        check_run(config(*levels_off, "algorithm.adv_estimator=gae"))
    check_run(config(*levels_off, "algorithm.adv_estimator=gae", "critic.enable=false"))


def test_a_plugin_that_is_only_partly_there_is_refused(monkeypatch):
    monkeypatch.setitem(plugin.failures, "trainer dppo", ImportError("no such thing"))
    with pytest.raises(RefusedSettingError, match=r"verl_dppo=trainer dppo is refused.*no such thing"):
        check_run(config())


def test_the_ranks_and_micro_batches_of_the_reference_count_too():
    run = config(
        "trainer.n_gpus_per_node=8",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    )
    reference = data_parallel_ranks(run, "actor_rollout_ref.ref")
    assert rows_multiple(run) == max(4, reference * 2)


def test_everything_that_is_wrong_is_named_at_once():
    with pytest.raises(RefusedSettingError) as refusal:
        check_run(config("actor_rollout_ref.rollout.n=1", "algorithm.use_kl_in_reward=true", f"{ACTOR}.shuffle=true"))
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.10.0", "1.0"])
def test_a_verl_outside_the_range_is_refused(version):
    with pytest.raises(RefusedSettingError, match=rf"verl={version} is refused.*pip install 'verl<0.10,>=0.9.1'"):
        check_verl_version(version)


@pytest.mark.parametrize("version", ["0.9.1", "0.9.2", "0.9.3.dev0"])
def test_a_verl_inside_the_range_is_not(version):
    check_verl_version(version)


@pytest.mark.parametrize(
    "off",
    [
        ("algorithm.dppo.enable=false",),
        (*NO_PRUNING, *NO_ORDER),
    ],
)
def test_switched_off_nothing_of_verl_is_refused(off):
    of_verl = ("trainer.use_v1=false", "critic.enable=true", f"{ROLLOUT}.n=1", f"{ACTOR}.shuffle=true")
    settings = check_run(config(*off, *of_verl))
    assert not settings.prunes
    assert not settings.orders


FIXED_ROWS = [
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
]


def test_without_settings_the_trainer_names_the_choice():
    with initialize_config_module("verl.trainer.config", version_base=None):
        stock = compose("ppo_trainer")
    with pytest.raises(RefusedSettingError, match=r"choose `algorithm=dppo`"):
        check_run(stock)


def test_data_parallel_ranks_of_each_engine():
    assert data_parallel_ranks(config("trainer.n_gpus_per_node=8")) == 8
    assert data_parallel_ranks(config(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2")) == 4
    megatron = [f"{ACTOR}.megatron.{name}=2" for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")]
    assert data_parallel_ranks(config("model_engine=megatron", "trainer.nnodes=2", *megatron)) == 4


def test_rows_are_counted_in_ranks_and_fixed_micro_batches():
    assert rows_multiple(config()) == 8
    fixed = config(
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=6",
    )
    assert rows_multiple(fixed) == 8 * 12


def command(*overrides):
    asked = [sys.executable, "-m", "verl.trainer.main_ppo", *RUN, *overrides]
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    return subprocess.run(asked, capture_output=True, text=True, env=env, timeout=180)


def test_the_real_command_ends_before_ray_starts():
    result = command("algorithm.use_kl_in_reward=true")
    assert result.returncode == 1
    assert "algorithm=dppo will not start this run:\nalgorithm.use_kl_in_reward=True is refused" in result.stderr
    assert "ray init kwargs" not in result.stdout


# ---- RayPPOTrainer --------------------------------------------------------------------------------------------------

CLASSIC = "trainer.use_v1=false"
REWARD_MODEL = "reward.reward_model"


def test_a_plain_run_of_ray_ppo_trainer_is_let_through():
    assert check_run(config(CLASSIC)).prunes_prompts


@pytest.mark.parametrize("off", [(), NO_PRUNING])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.balance_batch=false"], r"trainer\.balance_batch=False is refused: .*hands out.*set it to true"),
        (["trainer.critic_warmup=2"], r"trainer\.critic_warmup=2 is refused: .*train nothing.*leave it at 0"),
        (["algorithm.adv_estimator=gae"], r"adv_estimator=gae is refused: .*critic"),
        (["critic.enable=true"], r"critic\.enable=True is refused"),
        (
            ["algorithm.filter_groups.enable=true"],
            r"filter_groups\.enable=True is refused: .*no dynamic sampling.*use_v1=true",
        ),
        (
            [f"{REWARD_MODEL}.enable=true"],
            r"enable_resource_pool=False is refused: .*after RayPPOTrainer has balanced.*enable_resource_pool=true",
        ),
        (["data.gen_batch_size=40"], r"data\.gen_batch_size=40 is refused: .*mini-batches of 32.*multiple of 32"),
        (
            ["algorithm.dppo.base_estimator=rloo"],
            r"dppo\.base_estimator=rloo is refused: algorithm\.adv_estimator=grpo names another one.*leave it null",
        ),
        ([f"{ACTOR}.shuffle=true"], r"shuffle=True is refused"),
    ],
)
def test_what_ray_ppo_trainer_would_train_wrongly_is_refused(overrides, message, off):
    with pytest.raises(RefusedSettingError, match=message) as refusal:
        check_run(config(CLASSIC, *off, *overrides))
    assert "Way out:" in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{REWARD_MODEL}.enable=true", f"{REWARD_MODEL}.enable_resource_pool=true"],
        ["algorithm.adv_estimator=dppo"],
        ["algorithm.adv_estimator=dppo", "algorithm.dppo.base_estimator=rloo"],
        ["algorithm.adv_estimator=rloo", "algorithm.dppo.base_estimator=rloo"],
        ["trainer.v1.trainer_mode=sync"],
        ["+trainer.v1.sync.parameter_sync_step=2"],
        ["skip.rollout_tq.enable=true"],
    ],
)
def test_what_ray_ppo_trainer_takes_or_never_looks_at_is_let_through(overrides):
    check_run(config(CLASSIC, *overrides))


@pytest.mark.parametrize("base", ["gae", "reinforce_plus_plus_baseline", "dppo"])
def test_a_base_estimator_must_be_exact_too(base):
    asked = ("algorithm.adv_estimator=dppo", f"algorithm.dppo.base_estimator={base}")
    with pytest.raises(RefusedSettingError, match=rf"adv_estimator={base} is refused.*use one of grpo"):
        check_run(config(CLASSIC, *asked))


def test_an_estimator_given_as_verls_enum_is_that_estimator():
    run = config(CLASSIC)
    for estimator in (AdvantageEstimator.RLOO, AdvantageEstimator.GRPO):
        run.algorithm.adv_estimator = estimator
        assert check_run(run).prunes
        assert base_estimator(run) == estimator.value
    run.algorithm.adv_estimator = AdvantageEstimator.GRPO_PASSK
    with pytest.raises(RefusedSettingError, match=r"adv_estimator=grpo_passk is refused"):
        check_run(run)


def test_the_recorded_estimator_is_refused_where_verls_v1_trainer_would_not_read_it():
    with pytest.raises(RefusedSettingError, match=r"dppo\.base_estimator=rloo is refused: the v1 trainer takes"):
        check_run(config("algorithm.dppo.base_estimator=rloo"))


def test_which_trainer_is_checked_for_can_be_said():
    """A recipe builds its trainer whatever `trainer.use_v1` says."""
    unbalanced = config("trainer.balance_batch=false")
    check_run(unbalanced)
    with pytest.raises(RefusedSettingError, match=r"balance_batch=False is refused"):
        check_run(unbalanced, uses_v1=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["skip.rollout.enable=true"], r"skip\.rollout\.enable=True is refused: rollouts from a file"),
        (["data.gen_batch_size=32"], r"data\.gen_batch_size=32 is refused: a step draws all its prompts at once"),
        (["algorithm.adv_estimator=gpg"], r"adv_estimator=gpg is refused: .*count over the whole batch"),
        (
            ["algorithm.dppo.prompt.schedule=shrink", f"{ROLLOUT}.agent.num_workers=3"],
            r"schedule=shrink is refused: kept completions come in multiples of 16, .*over 3 workers.*divisor of 16",
        ),
    ],
)
def test_what_ray_ppo_trainer_cannot_skip_prompts_with_is_let_through_where_it_does_not(overrides, message):
    with pytest.raises(RefusedSettingError, match=message) as refusal:
        check_run(config(CLASSIC, *overrides))
    assert len(str(refusal.value).splitlines()) == 1
    assert not check_run(config(CLASSIC, *overrides, "algorithm.dppo.prompt.enable=false")).prunes_prompts


def test_shrinking_batches_are_let_through_where_agent_loop_workers_divide_them():
    shrink = "algorithm.dppo.prompt.schedule=shrink"
    check_run(config(CLASSIC, shrink, f"{ROLLOUT}.agent.num_workers=16"))
    check_run(config(shrink, f"{ROLLOUT}.agent.num_workers=3"))


def test_the_real_command_ends_before_ray_starts_on_ray_ppo_trainer_too():
    result = command(CLASSIC, "trainer.balance_batch=false")
    assert result.returncode == 1
    assert "algorithm=dppo will not start this run:\ntrainer.balance_batch=False is refused" in result.stderr
    assert "ray init kwargs" not in result.stdout


# ---- packing and balance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "off", [(), ("algorithm.dppo.packing.enable=false",), ("algorithm.dppo.balance.enable=false",)]
)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.v1.trainer_mode=sync"], r"trainer_mode=sync is refused"),
        (["+trainer.v1.sync.parameter_sync_step=2"], r"sync\.parameter_sync_step=2 is refused"),
        (["critic.enable=true"], r"critic\.enable=True is refused: .*orders.*set critic\.enable=false"),
        ([f"{ACTOR}.shuffle=true"], r"shuffle=True is refused: it would move rows.*shuffle=false"),
        ([f"{ACTOR}.use_prefix_grouper=true"], r"use_prefix_grouper=True is refused: it needs whole groups"),
        ([f"{ACTOR}.strategy=veomni"], r"actor\.strategy=veomni is refused.*fsdp, fsdp2, megatron"),
        (
            [f"{ACTOR}.ppo_mini_batch_size=3"],
            r"ppo_mini_batch_size=3 is refused: its 9 completions do not divide over 8",
        ),
        ([f"{ACTOR}.use_dynamic_bsz=false"], r"ppo_micro_batch_size_per_gpu=None is refused"),
        (
            ["model_engine=megatron", f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"],
            r"megatron\.virtual_pipeline_model_parallel_size=2 is refused.*virtual_pipeline_model_parallel_size=null",
        ),
        (
            ["model_engine=megatron", f"{ACTOR}.megatron.dynamic_context_parallel=true"],
            r"megatron\.dynamic_context_parallel=True is refused.*dynamic_context_parallel=false",
        ),
        (
            ["model_engine=megatron", f"{REFERENCE}.megatron.dynamic_context_parallel=true"],
            r"ref\.megatron\.dynamic_context_parallel=True is refused.*ref\.megatron\.dynamic_context_parallel=false",
        ),
    ],
)
def test_without_pruning_what_rows_cannot_be_ordered_with_is_refused(overrides, message, off):
    run = config(*NO_PRUNING, *off, f"{ROLLOUT}.n=3", f"{ACTOR}.ppo_mini_batch_size=8", *overrides)
    with pytest.raises(RefusedSettingError, match=message) as refusal:
        check_run(run)
    assert len(str(refusal.value).splitlines()) == 1
    assert "Way out:" in str(refusal.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
        ["algorithm.adv_estimator=grpo_passk"],
        ["algorithm.use_kl_in_reward=true"],
        [f"{ROLLOUT}.n=1"],
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov"],
        [f"{ACTOR}.policy_loss.loss_mode=geo_mean"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
        ["algorithm.rollout_correction.rollout_rs=token_k1"],
        ["algorithm.rollout_correction.rollout_is_batch_normalize=true"],
        ["distillation.enabled=true"],
        ["actor_rollout_ref.model.mtp.enable_train=true"],
        ["data.train_batch_size=48"],
        ["algorithm.filter_groups.enable=true"],
        ["trainer.v1.sampler.sync_refill_failed_groups=true"],
        ["skip.rollout_tq.enable=true"],
        ["data.gen_batch_size=32"],
        ["model_engine=megatron", f"+{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff=0.01"],
    ],
)
def test_without_pruning_nothing_is_refused_for_its_sake(overrides):
    settings = check_run(config(*NO_PRUNING, *overrides))
    assert settings.orders
    assert not settings.prunes
    if overrides:
        with pytest.raises(RefusedSettingError):
            check_run(config(*overrides))


LIMITS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu=8000",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=9000",
    f"{REFERENCE}.log_prob_max_token_len_per_gpu=7000",
)


@pytest.mark.parametrize(
    ("tokens", "overrides", "setting", "limit"),
    [
        (8001, [], f"{ACTOR}.ppo_max_token_len_per_gpu", 8000),
        (8001, [f"{ACTOR}.use_kl_loss=true", f"{ROLLOUT}.n=4"], f"{REFERENCE}.log_prob_max_token_len_per_gpu", 7000),
        (9001, [f"{ACTOR}.use_dynamic_bsz=false"], f"{ROLLOUT}.log_prob_max_token_len_per_gpu", 9000),
    ],
)
def test_micro_batches_above_what_an_engine_takes_are_refused_with_the_setting_behind_it(
    tokens, overrides, setting, limit
):
    fixed = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"]
    asked = f"algorithm.dppo.packing.micro_batch_tokens={tokens}"
    with pytest.raises(RefusedSettingError) as refusal:
        check_run(config(*NO_PRUNING, *LIMITS, *fixed, *overrides, asked))
    assert (
        f"{asked} is refused: the engine takes {limit} tokens at most. Way out: raise {setting}, or give a smaller "
        "number, or null to use that."
    ) in str(refusal.value).splitlines()


def test_micro_batches_of_what_all_engines_take_are_let_through():
    asked = "algorithm.dppo.packing.micro_batch_tokens"
    check_run(config(*LIMITS, f"{asked}=8000"))
    check_run(config(*LIMITS, f"{asked}=7000", f"{ACTOR}.use_kl_loss=true"))
    with pytest.raises(RefusedSettingError, match="takes 7000 tokens"):
        check_run(config(*LIMITS, f"{asked}=7001", f"{ACTOR}.use_kl_loss=true"))


@pytest.mark.parametrize("name", ["window", "micro_batch_tokens"])
def test_settings_of_a_packing_that_does_not_happen_are_refused(name):
    asked, fixed = f"algorithm.dppo.packing.{name}=10", [f"{ACTOR}.use_dynamic_bsz=false", *FIXED_ROWS]
    with pytest.raises(RefusedSettingError, match=rf"{asked} is refused: nothing is packed.*enable=true"):
        check_run(config(asked, "algorithm.dppo.packing.enable=false"))
    with pytest.raises(RefusedSettingError, match=rf"{asked} is refused: .*fixed number.*use_dynamic_bsz=true"):
        check_run(config(*fixed, asked))
    check_run(config(*fixed))


def test_where_something_else_is_refused_too_the_packing_is_left_for_later():
    """Devices that do not divide have no ranks that passes could be counted for."""
    with pytest.raises(RefusedSettingError, match=r"nnodes=8 is refused") as refusal:
        check_run(
            config(
                *LIMITS,
                "algorithm.dppo.packing.micro_batch_tokens=8001",
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=3",
            )
        )
    assert len(str(refusal.value).splitlines()) == 1


# ---- the passes of a run --------------------------------------------------------------------------------------------


def names(role):
    limit = "ppo_max_token_len_per_gpu" if role == ACTOR else "log_prob_max_token_len_per_gpu"
    return f"{role}.{limit}"


def test_the_passes_of_fsdp_have_the_ranks_of_all_devices_and_the_limits_of_verl():
    assert passes(config(*LIMITS), PackingSettings()) == {
        UPDATE: Pass(8, 8000, names(ACTOR), 8000),
        LOG_PROB: Pass(8, 9000, names(ROLLOUT), 9000),
    }


def test_a_smaller_limit_of_ones_own_holds_for_every_pass():
    found = passes(config(*LIMITS, f"{ACTOR}.use_kl_loss=true"), PackingSettings(micro_batch_tokens=5000))
    assert {name: (one.capacity, one.limit) for name, one in found.items()} == {
        UPDATE: (5000, 8000),
        LOG_PROB: (5000, 9000),
        REFERENCE_LOG_PROB: (5000, 7000),
    }


def test_with_ulysses_fewer_ranks_hold_more_tokens():
    run = config(*LIMITS, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", "trainer.nnodes=2")
    for packing, capacity in ((PackingSettings(), 16000), (PackingSettings(micro_batch_tokens=5000), 10000)):
        assert passes(run, packing)[UPDATE] == Pass(8, capacity, names(ACTOR), 8000)
    assert passes(run, PackingSettings())[LOG_PROB] == Pass(8, 18000, names(ROLLOUT), 9000)


def test_on_megatron_context_parallelism_spreads_tokens_and_other_parallelism_does_not():
    parallel = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 4,
    }
    run = config(
        "model_engine=megatron",
        "trainer.nnodes=4",
        *LIMITS,
        *(f"{ACTOR}.megatron.{name}={size}" for name, size in parallel.items()),
    )
    assert passes(run, PackingSettings()) == {
        UPDATE: Pass(2, 32000, names(ACTOR), 8000),
        LOG_PROB: Pass(2, 36000, names(ROLLOUT), 9000),
    }


def test_a_reference_policy_has_ranks_of_its_own():
    run = config(
        *LIMITS,
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{REFERENCE}.ulysses_sequence_parallel_size=4",
    )
    found = passes(run, PackingSettings())
    assert (found[UPDATE].ranks, found[UPDATE].capacity) == (4, 16000)
    assert (found[LOG_PROB].ranks, found[LOG_PROB].capacity) == (4, 18000)
    assert found[REFERENCE_LOG_PROB] == Pass(2, 28000, names(REFERENCE), 7000)


def test_under_lora_and_without_a_kl_term_there_is_no_reference_policy_of_its_own():
    asked = f"{ACTOR}.use_kl_loss=true"
    for adapter in ("lora_rank=8", "lora.rank=8", "lora_adapter_path=somewhere"):
        run = config(*LIMITS, asked, f"actor_rollout_ref.model.{adapter}")
        assert set(passes(run, PackingSettings())) == {UPDATE, LOG_PROB}, adapter
    assert set(passes(config(*LIMITS), PackingSettings())) == {UPDATE, LOG_PROB}
    for term in (asked, "algorithm.use_kl_in_reward=true"):
        assert REFERENCE_LOG_PROB in passes(config(*LIMITS, term), PackingSettings()), term


def test_passes_with_micro_batches_of_fixed_size_are_not_packed():
    run = config(*LIMITS, f"{ACTOR}.use_kl_loss=true", f"{ROLLOUT}.log_prob_use_dynamic_bsz=false")
    assert set(passes(run, PackingSettings())) == {UPDATE, REFERENCE_LOG_PROB}
    run = config(*LIMITS, f"{ACTOR}.use_dynamic_bsz=false", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true")
    assert set(passes(run, PackingSettings())) == {LOG_PROB}
