"""Each base algorithm, from its shipped configuration through verl's real loss in float64: the estimate is exact, and
the magnitude knows how the loss scales a completion."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from training.fake_queue import algorithm, jagged, read
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from verl.trainer.ppo.v1 import replay_buffer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils import losses

from verl_dppo import plugin
from verl_dppo.pruning import neyman_inclusion, score_magnitude
from verl_dppo.settings import RefusedSettingError
from verl_dppo.training.loss import (
    BATCH_NUM_TOKENS,
    EXACT_AGG_MODES,
    EXACT_LOSS_MODES,
    GLOBAL_BATCH_SIZE,
    WEIGHT,
    dppo_loss,
)
from verl_dppo.training.refusals import EXACT_ESTIMATORS, check_run

assert plugin  # registers the configurations
ACTOR = "actor_rollout_ref.actor"
ALGORITHMS = ("dppo", "dppo_dr_grpo", "dppo_dapo", "dppo_gspo", "dppo_rloo")
PUBLISHED = {
    "dppo_dr_grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": 512,
    },
    "dppo_dapo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        f"{ACTOR}.clip_ratio_low": 0.2,
        f"{ACTOR}.clip_ratio_high": 0.28,
        f"{ACTOR}.clip_ratio_c": 10,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        "reward.reward_manager.name": "dapo",
        "reward.reward_kwargs.max_resp_len": 512,
    },
    "dppo_gspo": {
        "algorithm.adv_estimator": "grpo",
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.clip_ratio_low": 3e-4,
        f"{ACTOR}.clip_ratio_high": 4e-4,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    },
    "dppo_rloo": {"algorithm.adv_estimator": "rloo", f"{ACTOR}.loss_agg_mode": "token-mean"},
}

PROMPT = [3, 4, 5, 3, 4, 5]
RESPONSE = [2, 7, 4, 6, 3, 5]
ROWS, TOKENS = len(RESPONSE), sum(RESPONSE)
# One group whose rewards differ in every way, and one of equal rewards.
REWARDS = [[0.0, 1.0, 0.2, 0.9], [1.0, 1.0]]
TERMS = {"none": (), "kl": ("kl",), "entropy": ("entropy",), "both": ("kl", "entropy")}

each_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
each_term = pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)


@cache
def config(name, *overrides):
    """Return verl's configuration with this algorithm; small batches, dynamic micro-batches."""
    run = ("actor_rollout_ref.rollout.n=8", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer", overrides=[f"algorithm={name}", *run, f"{ACTOR}.use_dynamic_bsz=true", *overrides]
        )


def actor_config(name, terms=(), agg_mode=None, **fields):
    """Return verl's ActorConfig of a shipped configuration, with terms added and a mode replaced."""
    config_of_actor = omega_conf_to_dataclass(config(name, "model_engine=dp").actor_rollout_ref.actor)
    if agg_mode:
        scale = 7 if agg_mode == "seq-mean-token-sum-norm" else None
        fields |= {"loss_agg_mode": agg_mode, "loss_scale_factor": scale}
    if "kl" in terms:
        fields |= {"use_kl_loss": True, "kl_loss_coef": 0.3}
    if "entropy" in terms:
        fields |= {"entropy_coeff": 0.2}
    return dataclasses.replace(config_of_actor, **fields)


def tensors(on_policy=False):
    """Log-probs as verl's engines give them, for prompt and response, and old ones for the response.

    Ratios lie on both sides of every clip; on one token of a completion with a negative advantage it is above 10.
    """
    rng = torch.Generator().manual_seed(3)

    def noise(lengths, scale):
        return [torch.randn(n, generator=rng, dtype=torch.float64) * scale - 1 for n in lengths]

    total = [p + r for p, r in zip(PROMPT, RESPONSE, strict=True)]
    log_probs, old = noise(total, 0.4), noise(RESPONSE, 0.3)
    # The log-prob of a token stands at the position before it.
    current = [x[p - 1 : -1] for x, p in zip(log_probs, PROMPT, strict=True)]
    if on_policy:
        old = [x.clone() for x in current]
    else:
        old[0][1] = current[0][1] - 3.0
    reference, entropy = noise(RESPONSE, 0.3), [-x for x in noise(total, 0.2)]
    return {"log_probs": log_probs, "entropy": entropy, "old_log_probs": old, "ref_log_prob": reference}


def gradient(actor, advantage, kept=None, weight=None, on_policy=False, mask=None):
    """Return the gradient of the mini-batch's loss with respect to each completion's log-probs, then entropies.

    Without weights it is that of verl's own loss; rows that are not kept do not exist.
    """
    rows = list(range(ROWS)) if kept is None else list(kept)
    data = tensors(on_policy)
    leaves = {name: [x.clone().requires_grad_(True) for x in data[name]] for name in ("log_probs", "entropy")}
    mask = [torch.ones(n, dtype=torch.long) for n in RESPONSE] if mask is None else mask
    if rows:
        columns = {
            "prompts": jagged(torch.zeros(PROMPT[i], dtype=torch.long) for i in rows),
            "responses": jagged(torch.zeros(RESPONSE[i], dtype=torch.long) for i in rows),
            "response_mask": jagged(mask[i] for i in rows),
            "advantages": jagged(torch.full((RESPONSE[i],), float(advantage[i]), dtype=torch.float64) for i in rows),
            **{name: jagged(data[name][i] for i in rows) for name in ("old_log_probs", "ref_log_prob")},
        }
        if weight is not None:
            columns[WEIGHT] = torch.tensor([weight[i] for i in rows], dtype=torch.float64)
            columns[BATCH_NUM_TOKENS] = torch.full((len(rows),), float(TOKENS), dtype=torch.float64)
            columns[GLOBAL_BATCH_SIZE] = torch.full((len(rows),), float(ROWS), dtype=torch.float64)
        batch = TensorDict(columns, batch_size=[len(rows)])
        left = sum(int(mask[i].sum()) for i in rows)
        tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=left, global_batch_size=len(rows))
        output = {"log_probs": jagged(leaves["log_probs"][i] for i in rows)}
        if actor.entropy_coeff:
            output["entropy"] = jagged(leaves["entropy"][i] for i in rows)
        loss, _ = (losses.ppo_loss if weight is None else dppo_loss)(actor, output, batch)
        loss.backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for own in leaves.values() for x in own]


def inclusion(full, actor):
    """Return pi as the trainer does: none for groups of equal rewards while no other term is on."""
    magnitude = score_magnitude(full.advantage, full.length, None, actor.loss_agg_mode)
    magnitude = np.where(full.has_advantage, magnitude, 0.0)
    if actor.use_kl_loss or actor.entropy_coeff:
        magnitude = np.maximum(magnitude, 0.05 * magnitude.mean())
    return neyman_inclusion(magnitude, full.length, keep=0.5)


def relative_error(full, actor):
    """Return the error of the expected gradient over all keep-sets of independent draws."""
    pi = inclusion(full, actor)
    live = np.flatnonzero(pi > 0)
    assert (pi[live] < 1).sum() > 1, "hardly anything is left to chance: the test is empty"
    weight = np.divide(1.0, pi, out=np.zeros(ROWS), where=pi > 0)
    whole = torch.cat(gradient(actor, full.advantage))
    expected = torch.zeros_like(whole)
    for mask in range(2**live.size):
        kept = [i for k, i in enumerate(live) if mask >> k & 1]
        probability = float(np.prod([pi[i] if i in kept else 1 - pi[i] for i in live]))
        if probability:
            expected += probability * torch.cat(gradient(actor, full.advantage, kept, weight))
    assert whole.norm() > 0
    return float((expected - whole).norm() / whole.norm())


def batch_of(monkeypatch, name):
    return read(monkeypatch, REWARDS, config_of_advantage(name), lengths=RESPONSE)


def config_of_advantage(name):
    node = config(name).algorithm
    return algorithm(node.adv_estimator, node.norm_adv_by_std_in_grpo)


# ---- configurations -------------------------------------------------------------------------------------------------


@each_algorithm
@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_the_configuration_composes_on_verls_own_and_is_let_through(name, engine):
    assert check_run(config(name, f"model_engine={engine}")).prunes_completions


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configuration_has_the_published_values(name):
    composed = config(name)
    assert {key: OmegaConf.select(composed, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert not composed.actor_rollout_ref.actor.use_kl_loss


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_command_line_still_decides_and_is_still_checked(name):
    assert config(name, "algorithm.dppo.completion.keep=0.25").algorithm.dppo.completion.keep == 0.25
    with pytest.raises(RefusedSettingError, match=r"loss_mode=clip_cov is refused"):
        check_run(config(name, f"{ACTOR}.policy_loss.loss_mode=clip_cov"))


def test_dr_grpo_without_its_constant_is_refused():
    with pytest.raises(RefusedSettingError, match=r"loss_scale_factor=None is refused.*constant"):
        check_run(config("dppo_dr_grpo", f"{ACTOR}.loss_scale_factor=null"))


# ---- the expected gradient ------------------------------------------------------------------------------------------


@each_algorithm
@each_term
def test_the_expected_gradient_of_each_algorithm_is_that_of_the_full_batch(monkeypatch, name, terms):
    assert relative_error(batch_of(monkeypatch, name), actor_config(name, terms)) < 1e-10


@each_algorithm
@pytest.mark.parametrize("agg_mode", EXACT_AGG_MODES)
def test_and_so_it_is_in_every_other_aggregation_mode(monkeypatch, name, agg_mode):
    actor = actor_config(name, ("kl", "entropy"), agg_mode)
    assert relative_error(batch_of(monkeypatch, name), actor) < 1e-10


@pytest.mark.parametrize("estimator", EXACT_ESTIMATORS)
@each_term
def test_every_estimator_that_is_let_through_is_exact(monkeypatch, estimator, terms):
    full = read(monkeypatch, REWARDS, algorithm(estimator), lengths=RESPONSE)
    assert relative_error(full, actor_config("dppo", terms)) < 1e-10


def test_every_other_estimator_of_verl_is_refused():
    others = {getattr(name, "value", name) for name in ADV_ESTIMATOR_REGISTRY} - set(EXACT_ESTIMATORS)
    assert {"gae", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "grpo_passk"} < others
    for name in others:
        with pytest.raises(RefusedSettingError, match=rf"adv_estimator={name} is refused.*use one of grpo, "):
            check_run(config("dppo", f"algorithm.adv_estimator={name}"))


class TestWhatTheAlgorithmsDifferIn:
    """The tests above would pass for nothing if these settings had no effect on the tensors they use."""

    def change(self, monkeypatch, name, **fields):
        full = batch_of(monkeypatch, name)
        actor = actor_config(name)
        changed = dataclasses.replace(actor, **fields)
        one, other = (torch.cat(gradient(a, full.advantage)) for a in (actor, changed))
        return float((one - other).norm() / one.norm())

    def test_clip_higher_and_the_bound_at_negative_advantages_take_effect(self, monkeypatch):
        assert self.change(monkeypatch, "dppo_dapo", clip_ratio_high=0.2) > 1e-3
        assert self.change(monkeypatch, "dppo_dapo", clip_ratio_c=1e6) > 1e-3

    def test_the_ratio_of_whole_completions_is_clipped(self, monkeypatch):
        assert self.change(monkeypatch, "dppo_gspo", clip_ratio_low=10.0, clip_ratio_high=10.0) > 1e-3

    def test_the_deviation_is_left_out(self, monkeypatch):
        advantage = batch_of(monkeypatch, "dppo_dr_grpo").advantage
        assert advantage == pytest.approx([-0.525, 0.475, -0.325, 0.375, 0, 0])

    def test_the_baseline_leaves_the_completion_out(self, monkeypatch):
        advantage = batch_of(monkeypatch, "dppo_rloo").advantage
        assert advantage == pytest.approx([-0.7, 1 - 1.1 / 3, 0.2 - 1.9 / 3, 0.5, 0, 0])


# ---- the estimators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", EXACT_ESTIMATORS)
def test_verl_can_compute_the_estimator_on_what_is_left_of_a_group(estimator):
    """One row of one group, two of another, and a row of padding: the numbers are put right afterwards."""
    rewards = torch.tensor([[0.0, 0.3], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    advantages, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards,
        response_mask=torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]]),
        index=np.array(["a", "b", "b", "pad0"], dtype=object),
        config=algorithm(estimator).algorithm,
    )
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("estimator", EXACT_ESTIMATORS)
def test_several_outputs_in_a_session_are_for_grpo_only(monkeypatch, estimator):
    keys = ["u0_0_0", "u0_0_1", "u0_1_0", "u0_2_0", "u1_0_0", "u1_1_0"]
    if estimator == "grpo":
        full = read(monkeypatch, [[1, 1, 0, 0.2], [1, 0]], algorithm(estimator), keys=keys)
        assert full.advantage[0] == full.advantage[1]
        return
    with pytest.raises(RefusedSettingError, match=rf"adv_estimator={estimator} is refused.*several outputs.*use grpo"):
        read(monkeypatch, [[1, 1, 0, 0.2], [1, 0]], algorithm(estimator), keys=keys)


def test_a_whitened_estimator_gives_groups_of_equal_rewards_an_advantage():
    """Why it is refused: DPPO drops such groups, and would bias the gradient."""
    rewards = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0], [0.0, 0, 0]])
    advantages, _ = get_adv_estimator_fn("reinforce_plus_plus_baseline")(
        token_level_rewards=rewards,
        response_mask=torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]]),
        index=np.array(["a", "a", "b", "b"], dtype=object),
    )
    assert advantages[0, 0].abs() > 0.1


# ---- the magnitude --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mode", [mode for mode in EXACT_LOSS_MODES if mode != "bypass_mode"])
@pytest.mark.parametrize("agg_mode", EXACT_AGG_MODES)
def test_on_policy_each_token_has_a_gradient_of_advantage_times_factor_times_a_constant(agg_mode, loss_mode):
    """Through verl's own loss; one completion has tokens that do not enter it, as those of a tool."""
    advantage = np.array([1.3, -0.7, 0.4, -1.9, 0.9, -0.2])
    mask = [torch.ones(n, dtype=torch.long) for n in RESPONSE]
    mask[1][2:4] = 0
    length = np.array([int(m.sum()) for m in mask])
    actor = actor_config("dppo", agg_mode=agg_mode)
    policy = dataclasses.replace(actor.policy_loss, loss_mode=loss_mode, dro_beta=0.1)
    actor = dataclasses.replace(actor, policy_loss=policy)
    found = gradient(actor, advantage, on_policy=True, mask=mask)[:ROWS]
    # verl's sapo has an aggregation of its own, whatever the setting says.
    mode = "seq-mean-token-mean" if loss_mode == "sapo" else agg_mode
    factor = score_magnitude(advantage, length, None, mode) / np.abs(advantage)
    constants = []
    for i, own in enumerate(found):
        response = own[PROMPT[i] - 1 : -1]
        assert (response[mask[i] == 0] == 0).all()
        constants.extend((response[mask[i] == 1] / (-advantage[i] * factor[i])).tolist())
    assert constants[0] > 0
    assert constants == pytest.approx([constants[0]] * len(constants), rel=1e-6)


# ---- dynamic sampling -----------------------------------------------------------------------------------------------


class Queue:
    """verl's transfer queue as its replay buffer uses it; prompts are answered as soon as they are submitted."""

    def __init__(self, rewards):
        self.tags, self.scores, self.coming = {}, {}, list(rewards)

    def submit(self, prompts):
        for _ in range(prompts):
            uid = f"u{len(self.coming)}"
            self.tags[uid] = {"is_prompt": True, "status": "finished", "global_steps": 1}
            for i, reward in enumerate(self.coming.pop(0)):
                self.tags[f"{uid}_{i}_0"] = {"status": "success"}
                self.scores[f"{uid}_{i}_0"] = torch.tensor([0.0, reward])

    def kv_list(self):
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_get(self, keys, **_):
        return {"rm_scores": [self.scores[key] for key in keys]}

    def kv_clear(self, keys, **_):
        for key in keys:
            self.tags.pop(key, None)


def test_verls_dynamic_sampling_hands_over_a_full_batch_of_whole_groups(monkeypatch):
    """What makes it exact under pruning: sizes and denominators are those of a batch that is full before the draw."""
    constant, mixed = [0.1, 0.1, 0.1], [0.0, 1.0, 1.0]
    queue = Queue([constant, mixed, constant, mixed, mixed, mixed, constant])
    monkeypatch.setattr(replay_buffer, "tq", queue)
    buffer = replay_buffer.ReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        poll_interval=0,
        refill_fn=queue.submit,
        filter_groups_metric="reward",
        train_batch_size=3,
        gen_batch_size=1,
    )
    queue.submit(3)
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=3)
    uids = [key.split("_")[0] for key in batch.keys]
    assert sorted(map(uids.count, set(uids))) == [3, 3, 3]
    assert all(len({float(queue.scores[f"{uid}_{i}_0"].sum()) for i in range(3)}) == 2 for uid in uids)
    assert metrics["training/filter_groups/evicted_samples"] == 2
    assert metrics["training/filter_groups/discarded_surplus_samples"] == 1
    assert set(queue.tags) == set(batch.keys), "rows of other groups would be left for the next step"
