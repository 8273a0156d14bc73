"""The expected gradient of the weighted loss, by enumeration through verl's real actor loss in float64."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pruning.pivotal_tree import pivotal_tree
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils import losses

from verl_dppo.pruning import fixed_size_inclusion
from verl_dppo.training.loss import (
    BATCH_NUM_TOKENS,
    EXACT_AGG_MODES,
    EXACT_LOSS_MODES,
    GLOBAL_BATCH_SIZE,
    WEIGHT,
    dppo_loss,
)

ROWS = 6
PROMPT = [3, 4, 5, 3, 4, 5]
RESPONSE = [2, 7, 4, 6, 3, 5]
TOKENS = sum(RESPONSE)


@dataclass(frozen=True)
class Case:
    """One mini-batch of six completions, and the loss that trains on it."""

    agg_mode: str = "token-mean"
    loss_mode: str = "vanilla"
    kl: bool = False
    entropy: bool = False
    scale_factor: int | None = None
    rollout_correction: dict | None = None

    def config(self):
        policy = {"loss_mode": self.loss_mode, "dro_beta": 0.1}
        if self.rollout_correction:
            policy["rollout_correction"] = self.rollout_correction
        return FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=2,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode=self.agg_mode,
            use_kl_loss=self.kl,
            kl_loss_coef=0.3,
            entropy_coeff=0.2 if self.entropy else 0.0,
            loss_scale_factor=self.scale_factor,
            policy_loss=PolicyLossConfig(**policy),
        )


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def tensors():
    """Log-probs far enough from the old ones that ratios clip on both sides, advantages of both signs."""
    rng = torch.Generator().manual_seed(1)

    def noise(lengths, scale):
        return [torch.randn(n, generator=rng, dtype=torch.float64) * scale for n in lengths]

    total = [p + r for p, r in zip(PROMPT, RESPONSE, strict=True)]
    old = [x - 1 for x in noise(RESPONSE, 0.3)]
    return {
        "log_probs": [x - 1 for x in noise(total, 0.4)],
        "entropy": [x.abs() for x in noise(total, 1.0)],
        "old_log_probs": old,
        "rollout_is_weights": [1 + x.abs() for x in noise(RESPONSE, 0.3)],
        "ref_log_prob": [x - 1 for x in noise(RESPONSE, 0.3)],
        "advantages": [
            a * torch.ones(n, dtype=torch.float64)
            for a, n in zip([1.3, -0.7, 0.4, -1.9, 0.9, -0.2], RESPONSE, strict=True)
        ],
    }


def micro_batch(rows, data, case, weight=None, tokens=TOKENS, size=ROWS):
    columns = {
        "prompts": jagged(torch.zeros(PROMPT[i], dtype=torch.long) for i in rows),
        "responses": jagged(torch.zeros(RESPONSE[i], dtype=torch.long) for i in rows),
        "response_mask": jagged(torch.ones(RESPONSE[i], dtype=torch.long) for i in rows),
        **{name: jagged(data[name][i] for i in rows) for name in ("old_log_probs", "advantages", "ref_log_prob")},
    }
    if case.loss_mode not in ("bypass_mode",):
        columns["rollout_is_weights"] = jagged(data["rollout_is_weights"][i] for i in rows)
    if weight is not None:
        columns[WEIGHT] = torch.tensor([weight[i] for i in rows], dtype=torch.float64)
        columns[BATCH_NUM_TOKENS] = torch.full((len(rows),), float(tokens), dtype=torch.float64)
        columns[GLOBAL_BATCH_SIZE] = torch.full((len(rows),), float(size), dtype=torch.float64)
    return TensorDict(columns, batch_size=[len(rows)])


def of_the_engine(batch, kept):
    """Add what verl's engine counts by itself: the rows that are left, and their tokens."""
    tokens = sum(RESPONSE[i] for i in kept)
    tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(kept))
    return batch


def gradient(case, kept, weight=None, micro_batches=1, stock=False, **denominators):
    """Return the gradient of one optimiser step with respect to all log-probs and entropies of the mini-batch."""
    data = tensors()
    leaves = {name: [x.clone().requires_grad_(True) for x in data[name]] for name in ("log_probs", "entropy")}
    config, kept = case.config(), list(kept)
    for part in np.array_split(kept, micro_batches):
        rows = part.tolist()
        if not rows:
            continue
        batch = of_the_engine(micro_batch(rows, data, case, weight, **denominators), kept)
        output = {"log_probs": jagged(leaves["log_probs"][i] for i in rows)}
        if case.entropy:
            output["entropy"] = jagged(leaves["entropy"][i] for i in rows)
        loss, _ = (losses.ppo_loss if stock else dppo_loss)(config, output, batch)
        loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for name in leaves for x in leaves[name]]
    return torch.cat(grads)


def pivotal_outcomes():
    pi = fixed_size_inclusion([1.0, 5.0, 2.0, 8.0, 3.0, 0.7], 3, 0.1)
    return pi, [(p, sorted(kept)) for p, kept in pivotal_tree(pi)]


def poisson_outcomes():
    pi = np.array([0.25, 0.9, 0.5, 1.0, 0.6, 0.35])
    outcomes = []
    for mask in range(2**ROWS):
        kept = [i for i in range(ROWS) if mask >> i & 1]
        p = float(np.prod([pi[i] if i in kept else 1 - pi[i] for i in range(ROWS)]))
        if p:
            outcomes.append((p, kept))
    return pi, outcomes


def expected_gradient(case, pi, outcomes, **how):
    total = torch.zeros_like(gradient(case, range(ROWS), stock=True))
    for probability, kept in outcomes:
        total += probability * gradient(case, kept, weight=1 / pi, **how)
    return total


def relative_error(case, design=pivotal_outcomes, **how):
    pi, outcomes = design()
    full = gradient(case, range(ROWS), stock=True)
    return float((expected_gradient(case, pi, outcomes, **how) - full).norm() / full.norm())


def scale_factor(agg_mode):
    return 7 if agg_mode == "seq-mean-token-sum-norm" else None


@pytest.mark.parametrize("terms", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("agg_mode", EXACT_AGG_MODES)
@pytest.mark.parametrize("design", [pivotal_outcomes, poisson_outcomes])
def test_the_expected_gradient_is_that_of_the_full_mini_batch(agg_mode, terms, design):
    kl, entropy = terms
    case = Case(agg_mode, kl=kl, entropy=entropy, scale_factor=scale_factor(agg_mode))
    assert relative_error(case, design) < 1e-10


@pytest.mark.parametrize("loss_mode", EXACT_LOSS_MODES)
@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-mean"])
def test_every_loss_mode_that_is_let_through_is_exact_with_all_terms_on(loss_mode, agg_mode):
    correction = None
    if loss_mode == "bypass_mode":
        correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None, "loss_type": "ppo_clip"}
    assert relative_error(Case(agg_mode, loss_mode, True, True, rollout_correction=correction)) < 1e-10


def test_bypass_reinforce_is_exact_too():
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None, "loss_type": "reinforce"}
    assert relative_error(Case("token-mean", "bypass_mode", True, True, rollout_correction=correction)) < 1e-10


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_the_split_into_micro_batches_does_not_matter(micro_batches):
    assert relative_error(Case(kl=True, entropy=True), micro_batches=micro_batches) < 1e-10


@pytest.mark.parametrize("agg_mode", EXACT_AGG_MODES)
def test_unit_weights_are_verls_own_loss_to_the_last_bit(agg_mode):
    case = Case(agg_mode, kl=True, entropy=True, scale_factor=scale_factor(agg_mode))
    assert torch.equal(gradient(case, range(ROWS), weight=np.ones(ROWS)), gradient(case, range(ROWS), stock=True))


def test_a_weight_of_zero_is_the_same_as_not_being_there():
    case, weight = Case(kl=True, entropy=True), np.array([2.0, 0.0, 3.0, 0.0, 1.5, 0.0])
    assert torch.equal(gradient(case, range(ROWS), weight=weight), gradient(case, [0, 2, 4], weight=weight))


class TestTheEnumerationSeesWhatIsBiased:
    """Each fault that the weights or denominators could have shows up far above the bound of the tests above."""

    def test_a_token_count_of_the_kept_rows(self):
        pi, outcomes = pivotal_outcomes()
        case, full = Case(), gradient(Case(), range(ROWS), stock=True)
        total = sum(
            p * gradient(case, kept, weight=1 / pi, tokens=sum(RESPONSE[i] for i in kept)) for p, kept in outcomes
        )
        assert (total - full).norm() / full.norm() > 0.02

    def test_a_size_of_the_kept_rows(self):
        pi, outcomes = poisson_outcomes()
        case = Case("seq-mean-token-sum")
        full = gradient(case, range(ROWS), stock=True)
        total = sum(p * gradient(case, kept, weight=1 / pi, size=max(1, len(kept))) for p, kept in outcomes)
        assert (total - full).norm() / full.norm() > 0.02

    def test_no_weights(self):
        _, outcomes = pivotal_outcomes()
        assert relative_error(Case(), lambda: (np.ones(ROWS), outcomes)) > 0.2

    def test_weights_of_another_pi(self):
        pi, outcomes = pivotal_outcomes()
        assert relative_error(Case(), lambda: (np.clip(pi * 1.05, 0, 1), outcomes)) > 0.02

    @pytest.mark.parametrize(
        ("loss_mode", "options"),
        [("clip_cov", {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0}), ("kl_cov", {"kl_cov_ratio": 0.3})],
    )
    def test_loss_modes_that_select_tokens_by_advantage(self, loss_mode, options, monkeypatch):
        """Their ratios are set so that the selecting branch is taken."""
        config = Case(loss_mode=loss_mode).config()
        for name, value in options.items():
            object.__setattr__(config.policy_loss, name, value)
        monkeypatch.setattr(Case, "config", lambda self: config)
        assert relative_error(Case(loss_mode=loss_mode)) > 1e-3
        assert loss_mode not in EXACT_LOSS_MODES

    def test_a_loss_that_reduces_its_rows_by_itself_raises(self):
        with pytest.raises(RuntimeError, match="some term is not weighted"):
            gradient(Case(loss_mode="geo_mean"), range(ROWS), weight=np.ones(ROWS))
        assert "geo_mean" not in EXACT_LOSS_MODES


def test_threads_do_not_share_weights():
    """A weighted and a stock loss computed side by side give what each gives alone."""
    case, weight = Case(kl=True, entropy=True), np.linspace(0.5, 3, ROWS)
    alone = gradient(case, range(ROWS), weight=weight), gradient(case, range(ROWS), stock=True)
    wrong = []

    def work(weighted):
        for _ in range(60):
            mine = gradient(case, range(ROWS), weight=weight) if weighted else gradient(case, range(ROWS), stock=True)
            if not torch.equal(mine, alone[0 if weighted else 1]):
                wrong.append(weighted)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("agg_mode", EXACT_AGG_MODES)
def test_the_size_and_the_token_count_are_those_of_the_columns_and_not_verls_own(agg_mode):
    """Twice the one or thrice the other divides by so much more, where the mode divides by it at all."""
    case = Case(agg_mode, kl=True, entropy=True, scale_factor=scale_factor(agg_mode))
    stock, ones = gradient(case, range(ROWS), stock=True), np.ones(ROWS)
    larger = gradient(case, range(ROWS), weight=ones, tokens=2 * TOKENS, size=3 * ROWS)
    factor = {"token-mean": 2, "token-sum": 1}.get(agg_mode, 3)
    torch.testing.assert_close(larger * factor, stock, rtol=1e-12, atol=1e-15)


def test_verls_own_denominators_are_put_back_afterwards():
    case, data = Case(), tensors()
    kept = [0, 2, 4]
    batch = of_the_engine(micro_batch(kept, data, case, np.ones(ROWS)), kept)
    dppo_loss(case.config(), {"log_probs": jagged(data["log_probs"][i] for i in kept)}, batch)
    assert (batch["global_batch_size"], batch["batch_num_tokens"]) == (3, 2 + 4 + 3)
    bad = case.config()
    object.__setattr__(bad, "loss_agg_mode", "no-such-mode")
    with pytest.raises(ValueError, match="no-such-mode"):
        dppo_loss(bad, {"log_probs": jagged(data["log_probs"][i] for i in kept)}, batch)
    assert (batch["global_batch_size"], batch["batch_num_tokens"]) == (3, 2 + 4 + 3)


@pytest.mark.parametrize("missing", [WEIGHT, BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE])
def test_a_missing_column_raises_and_names_it(missing):
    case, data = Case(), tensors()
    batch = of_the_engine(micro_batch(range(ROWS), data, case, np.ones(ROWS)), range(ROWS))
    del batch[missing]
    with pytest.raises(RuntimeError, match=f"'{missing}' did not reach the worker"):
        dppo_loss(case.config(), {"log_probs": jagged(data["log_probs"])}, batch)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_an_unusable_weight_raises(bad):
    case, data = Case(), tensors()
    batch = of_the_engine(micro_batch(range(ROWS), data, case, np.full(ROWS, bad)), range(ROWS))
    with pytest.raises(RuntimeError, match="finite value >= 0"):
        dppo_loss(case.config(), {"log_probs": jagged(data["log_probs"])}, batch)


@pytest.mark.parametrize("column", [BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE])
def test_rows_of_two_mini_batches_raise(column):
    case, data = Case(), tensors()
    batch = of_the_engine(micro_batch(range(ROWS), data, case, np.ones(ROWS)), range(ROWS))
    batch[column][0] += 1
    with pytest.raises(RuntimeError, match="different mini-batches"):
        dppo_loss(case.config(), {"log_probs": jagged(data["log_probs"])}, batch)


def test_verl_still_aggregates_through_the_two_names_that_are_replaced():
    """Fails when verl moves `agg_loss`, or reduces a term some other way."""
    gradient(Case(), range(ROWS), weight=np.ones(ROWS))
    assert core_algos.agg_loss is losses.agg_loss
    original = core_algos.agg_loss.verl_original
    assert original.__module__ == "verl.trainer.ppo.core_algos"
    assert original.__name__ == "agg_loss"
