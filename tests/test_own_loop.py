"""The examples of docs/own-loop.md: run as they stand, and their expected gradients by enumeration of every draw."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from pruning.pivotal_tree import every_path
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.pruning import deal_mini_batches

DOCS = Path(__file__).parents[1] / "docs"
EXACT, FAULT = 1e-12, 1e-2


def example(name):
    spec = importlib.util.spec_from_file_location(f"own_loop_{name}", DOCS / "own_loop" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain, trl_grpo = example("plain_pytorch"), example("trl_grpo")


def error(mean, full):
    return float((mean - full).norm() / full.norm())


def flat_gradient(model):
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()
    model.zero_grad()
    return gradient


@pytest.mark.parametrize("name", ["plain_pytorch", "trl_grpo"])
def test_the_example_runs_as_it_stands(name):
    script = DOCS / "own_loop" / f"{name}.py"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    trained_on = [int(share) for share in re.findall(r"^step \d+: .* trained on (\d+)% of", done.stdout, re.MULTILINE)]
    assert len(trained_on) >= 3
    assert all(0 < share < 80 for share in trained_on)


@pytest.mark.parametrize("name", ["plain_pytorch", "trl_grpo"])
def test_the_page_shows_the_code_of_the_files(name):
    blocks = re.findall(
        rf"```python\n# docs/own_loop/{name}\.py\n(.*?)```", (DOCS / "own-loop.md").read_text(), re.DOTALL
    )
    assert blocks
    text = (DOCS / "own_loop" / f"{name}.py").read_text()
    for block in blocks:
        assert any(textwrap.indent(block, " " * depth) in text for depth in (0, 4, 8)), block


# ---- the plain loop -------------------------------------------------------------------------------------------------

EVERY_TERM = [
    plain.Settings(),
    plain.Settings(kl=0.3),
    plain.Settings(entropy=0.2, loss_agg_mode="seq-mean-token-mean"),
    plain.Settings(kl=0.3, entropy=0.2),
]
each_term = pytest.mark.parametrize("settings", EVERY_TERM, ids=lambda s: f"{s.loss_agg_mode}-kl{s.kl}-H{s.entropy}")


@functools.cache
def plain_case():
    """Twelve completions in float64, dealt to two mini-batches, and a policy that has moved since they were sampled.

    The rewards of one of the three groups are equal.
    """
    torch.manual_seed(3)
    policy, reference = plain.Policy(6).double(), plain.Policy(6).double()
    batch = plain.sample(policy, 3, 4, torch.Generator().manual_seed(42))
    batch = replace(batch, log_prob=batch.log_prob + 0.3 * torch.randn_like(batch.log_prob), mask=batch.mask.double())
    assert np.unique(batch.length).size > 3
    assert (batch.advantage != 0).sum() == 8
    return policy, reference, batch, deal_mini_batches(batch.advantage != 0, batch.group, 2, np.random.default_rng(0))


def gradient_of_plan(batch, plan, k, settings):
    policy, reference, _, _ = plain_case()
    plain.mini_batch_loss(policy, reference, batch, plan, k, settings).backward()
    return flat_gradient(policy)


def gradient_of_all(batch, whole, settings):
    """The un-pruned gradient of a mini-batch, written apart from the example."""
    policy, reference, _, _ = plain_case()
    loss, tokens = 0.0, batch.mask[whole].sum()
    for i in np.flatnonzero(whole):
        n = int(batch.mask[i].sum())
        response, old, a = batch.response[i, :n], batch.log_prob[i, :n], batch.advantage[i]
        dist = policy(batch.prompt[i : i + 1], batch.response[i : i + 1])[0, :n]
        fixed = reference(batch.prompt[i : i + 1], batch.response[i : i + 1])[0, :n].detach()
        for t in range(n):
            new, ref = dist[t, response[t]], fixed[t, response[t]]
            ratio = torch.exp(new - old[t])
            term = -min(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a)
            term = term + settings.kl * (torch.exp(ref - new) - 1 - (ref - new))
            term = term + settings.entropy * (dist[t] * dist[t].exp()).sum()
            share = tokens if settings.loss_agg_mode == "token-mean" else n * whole.sum()
            loss = loss + term / share
    loss.backward()
    return flat_gradient(policy)


def expected_gradients(settings, fault=lambda batch, plan: (batch, plan)):
    """Return, for both mini-batches, the mean gradient over every path of the draw, and the number of outcomes."""
    _, _, batch, mini_batch = plain_case()
    outcomes, plans = {}, {}
    for probability, plan in every_path(lambda rng: plain.plan_step(batch, mini_batch, settings, rng)):
        for k in range(2):
            key = k, plan.weight[mini_batch == k].tobytes()
            outcomes[key], plans[key] = outcomes.get(key, 0.0) + probability, plan
    mean = [0.0, 0.0]
    for (k, weights), probability in outcomes.items():
        seen, plan = fault(batch, plans[k, weights])
        mean[k] = mean[k] + probability * gradient_of_plan(seen, plan, k, settings)
    return mean, len(outcomes)


@each_term
def test_the_plain_loops_expected_gradient_is_that_of_the_whole_mini_batch(settings):
    mean, outcomes = expected_gradients(settings)
    assert outcomes >= 8
    _, _, batch, mini_batch = plain_case()
    for k in range(2):
        assert error(mean[k], gradient_of_all(batch, mini_batch == k, settings)) < EXACT


def no_weights(batch, plan):
    return batch, replace(plan, weight=(plan.weight > 0).astype(float))


def count_of_what_is_left(batch, plan):
    return batch, replace(
        plan, mini_batch=np.where(np.isin(np.arange(plan.weight.size), plan.kept), plan.mini_batch, -1)
    )


def advantages_of_what_is_left(batch, plan):
    advantage = np.zeros_like(batch.advantage)
    advantage[plan.kept] = plain.full_group_advantage(batch.reward[plan.kept], batch.group[plan.kept])
    return replace(batch, advantage=advantage), plan


@pytest.mark.parametrize("settings", [EVERY_TERM[0], EVERY_TERM[2]], ids=["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("fault", [no_weights, count_of_what_is_left, advantages_of_what_is_left])
def test_the_plain_loops_enumeration_sees_a_fault(settings, fault):
    mean, _ = expected_gradients(settings, fault)
    _, _, batch, mini_batch = plain_case()
    assert max(error(mean[k], gradient_of_all(batch, mini_batch == k, settings)) for k in range(2)) > FAULT


def test_the_plain_loop_with_a_budget_of_everything_is_the_unpruned_one():
    _, _, batch, mini_batch = plain_case()
    settings = plain.Settings(keep=1.0, kl=0.3)  # every row has a gradient
    plan = plain.plan_step(batch, mini_batch, settings, np.random.default_rng(0))
    assert (plan.weight == 1).all()
    for k in range(2):
        full = gradient_of_all(batch, mini_batch == k, settings)
        assert error(gradient_of_plan(batch, plan, k, settings), full) < EXACT


def test_dropped_rows_do_not_go_through_the_plain_policy():
    policy, _, batch, mini_batch = plain_case()
    plan = plain.plan_step(batch, mini_batch, plain.Settings(), np.random.default_rng(0))
    seen = []
    handle = policy.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    for k in range(2):
        gradient_of_plan(batch, plan, k, plain.Settings())
    handle.remove()
    assert seen == [rows.size for rows in plan.rows]
    assert sum(seen) < 8


@pytest.mark.parametrize("keep", [0.25, 1.0])
def test_the_plain_loop_takes_as_many_optimiser_steps_whatever_it_keeps(keep, monkeypatch):
    steps = []
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: steps.append(1))
    plain.train(steps=3, settings=plain.Settings(keep=keep, mini_batches=4))
    assert len(steps) == 12


# ---- TRL ------------------------------------------------------------------------------------------------------------

ROWS, GROUP = 8, 4
each_loss = pytest.mark.parametrize("loss_type", sorted(trl_grpo.EXACT_LOSSES))


def remainder(completions, **_):
    return [float(sum(map(ord, text)) % 11) for text in completions]


def configuration(folder, loss_type="dapo", per_step=2, slots=4, **others):
    common = {"use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return GRPOConfig(
        output_dir=str(folder),
        loss_type=loss_type,
        per_device_train_batch_size=ROWS // slots,
        gradient_accumulation_steps=per_step,
        steps_per_generation=slots,
        num_generations=GROUP,
        max_completion_length=6,
        gradient_checkpointing=False,
        **common | others,
    )


def trainer_of(kind, args, **keep):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    shape = {"vocab_size": 260, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "eos_token_id": 2}
    config = GPT2Config(**shape, initializer_range=0.5, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    data = Dataset.from_list([{"prompt": text} for text in ("1 + 2 =", "30 - 4 =", "5 + 6 + 7 =", "8 =")])
    model = GPT2LMHeadModel(config).double()
    return kind(model, remainder, args, train_dataset=data, processing_class=tokenizer, **keep)


def recorded(trainer):
    """Let TRL generate and score once, in float64, with completions of several lengths; then move the policy."""
    prompts = [row for row in list(trainer.train_dataset)[: ROWS // GROUP] for _ in range(GROUP)]
    trainer.model.train()
    output = trainer._generate_and_score_completions(prompts)
    length = torch.tensor([6, 2, 4, 1, 3, 6, 5, 2])
    output["completion_mask"] = (torch.arange(output["completion_ids"].shape[1]) < length[:, None]).long()
    output["num_items_in_batch"] = output["completion_mask"].sum()
    output["advantages"] = torch.tensor([1.3, -0.7, 0.4, -1.9, 0.9, -0.2, -0.5, 0.7], dtype=torch.float64)
    if "old_per_token_logps" in output:
        torch.manual_seed(1)
        output["old_per_token_logps"] += 0.3 * torch.randn_like(output["old_per_token_logps"])
    return output


def gradients(trainer, generation):
    """Return the gradient of every optimiser step on a generation, through TRL's own `training_step`."""
    trainer._generate_and_score_completions = lambda batch: dict(generation)
    trainer._step, trainer._buffered_inputs = 0, None
    per_step, slots = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation
    trainer.current_gradient_accumulation_steps = per_step
    torch.manual_seed(0)
    found = []
    for slot in range(slots):
        trainer.training_step(trainer.model, [None], None)
        if (slot + 1) % min(per_step, slots) == 0:
            found.append(flat_gradient(trainer.model))
    return torch.stack(found)


def of_stock_and_expected(folder, loss_type, per_step=2, slots=4):
    """Return the gradients of stock TRL's optimiser steps, and the example's over every path of its draws."""
    args = configuration(folder, loss_type, per_step, slots)
    stock, pruned = trainer_of(GRPOTrainer, args), trainer_of(trl_grpo.PrunedGRPOTrainer, args, keep=0.5)
    generation = recorded(stock)

    def of_one_draw(rng):
        pruned._generator = lambda: rng
        return gradients(pruned, generation)

    paths = list(every_path(of_one_draw))
    assert len(paths) > 5
    return gradients(stock, generation), sum(probability * gradient for probability, gradient in paths)


def errors(full, mean):
    return [error(m, f) for m, f in zip(mean, full, strict=True)]


@each_loss
def test_the_expected_gradient_of_every_step_of_the_trl_example_is_that_of_stock_trl(loss_type, tmp_path):
    assert max(errors(*of_stock_and_expected(tmp_path, loss_type))) < EXACT


@pytest.mark.parametrize(("per_step", "slots"), [(4, 4), (4, 2), (1, 2)])
@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_that_holds_for_any_number_of_micro_batches_in_a_step(loss_type, per_step, slots, tmp_path):
    assert max(errors(*of_stock_and_expected(tmp_path, loss_type, per_step, slots))) < EXACT


def test_that_holds_for_a_ratio_of_whole_completions(tmp_path, monkeypatch):
    gspo = functools.partial(configuration, importance_sampling_level="sequence")
    monkeypatch.setitem(globals(), "configuration", gspo)
    assert max(errors(*of_stock_and_expected(tmp_path, "grpo"))) < EXACT


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "grpo"])
def test_the_enumeration_of_trl_sees_weights_that_are_left_out(loss_type, tmp_path, monkeypatch):
    plan_of = trl_grpo.plan_of

    def unweighted(*args):
        plan = plan_of(*args)
        return replace(plan, weight=(plan.weight > 0).astype(float))

    monkeypatch.setattr(trl_grpo, "plan_of", unweighted)
    assert max(errors(*of_stock_and_expected(tmp_path, loss_type))) > FAULT


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo", "grpo"])
def test_the_enumeration_of_trl_sees_denominators_of_what_is_left(loss_type, tmp_path, monkeypatch):
    """The rows that are left where the loss divides by rows, their tokens where it divides by tokens."""
    prune, (mode, _) = trl_grpo.prune, trl_grpo.EXACT_LOSSES[loss_type]

    def with_own_tokens(*args):
        parts = prune(*args)
        tokens = sum(part["completion_mask"].sum() for part in parts)
        return [part | {"num_items_in_batch": tokens} for part in parts]

    monkeypatch.setattr(trl_grpo, "prune", with_own_tokens)
    monkeypatch.setitem(trl_grpo.EXACT_LOSSES, loss_type, (mode, False))
    assert max(errors(*of_stock_and_expected(tmp_path, loss_type))) > FAULT


@each_loss
def test_a_budget_of_everything_is_stock_trl_to_the_bit(loss_type, tmp_path):
    args = configuration(tmp_path, loss_type)
    stock, pruned = trainer_of(GRPOTrainer, args), trainer_of(trl_grpo.PrunedGRPOTrainer, args, keep=1.0)
    generation = recorded(stock)
    assert torch.equal(gradients(pruned, generation), gradients(stock, generation))


def trained(kind, folder, **keep):
    """Train four optimiser steps, and return the trainer and the rows that it trained on in each micro-batch."""
    trainer, rows = trainer_of(kind, configuration(folder, max_steps=4, logging_steps=1), **keep), []

    def count(module, args, kwargs):
        if torch.is_grad_enabled():  # not when TRL generates
            rows.append(len(kwargs["input_ids"]))

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    return trainer, rows


def test_trl_trains_on_fewer_rows_in_as_many_optimiser_steps(tmp_path):
    stock, all_rows = trained(GRPOTrainer, tmp_path)
    pruned, rows = trained(trl_grpo.PrunedGRPOTrainer, tmp_path, keep=0.5)
    assert all_rows == [2] * 8
    assert rows == [1] * 8
    assert pruned.state.global_step == stock.state.global_step == 4
    rates = [[log["learning_rate"] for log in t.state.log_history if "learning_rate" in log] for t in (stock, pruned)]
    assert rates[0] == rates[1]
    assert [log["dppo/kept_rows"] for log in pruned.state.log_history if "dppo/kept_rows" in log] == [0.5, 0.5]


def test_what_is_kept_of_a_step_is_spread_evenly_over_its_micro_batches(tmp_path):
    """Four of eight rows have a gradient: one row for each of four micro-batches, wherever TRL had put them."""
    trainer = trainer_of(trl_grpo.PrunedGRPOTrainer, configuration(tmp_path, per_step=4), keep=1.0)
    generation = recorded(trainer)
    generation["advantages"][4:] = 0
    gradients(trainer, generation)
    kept = [part["advantages"].tolist() for part in trainer._buffered_inputs]
    assert [len(advantages) for advantages in kept] == [1, 1, 1, 1]
    assert sorted(a for (a,) in kept) == sorted(generation["advantages"][:4].tolist())


def test_every_generation_and_process_of_trl_has_a_draw_of_its_own_that_a_rerun_repeats(tmp_path):
    trainer = trainer_of(trl_grpo.PrunedGRPOTrainer, configuration(tmp_path), keep=0.5)
    first = trainer._generator().random()
    assert trainer._generator().random() == first
    trainer._step += 4
    assert trainer._generator().random() != first
    trainer._step -= 4
    trainer.accelerator = SimpleNamespace(process_index=1)
    assert trainer._generator().random() != first


def test_probabilities_take_surprise_from_log_probs_and_length_from_the_tokens_in_the_loss():
    log_prob = torch.tensor([[-0.1, -0.1], [-2.0, -2.0], [-0.1, float("nan")], [-2.0, -2.0]])
    batch = {
        "prompt_ids": torch.ones(4, 3),
        "completion_mask": torch.ones(4, 2),
        "tool_mask": torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]]),
        "advantages": torch.tensor([1.0, -1.0, 1.0, -1.0]),
        "sampling_per_token_logps": log_prob,
    }
    pi = trl_grpo.plan_of(batch, np.zeros(4, dtype=int), 1, "token-mean", 0.5, np.random.default_rng(0)).pi
    assert pi[1] > pi[0] > 0
    assert pi[2] > 0
    assert pi[3] == 0, "a completion without a token in the loss has no gradient"


def test_trl_evaluates_on_all_rows(tmp_path):
    trainer = trainer_of(trl_grpo.PrunedGRPOTrainer, configuration(tmp_path), keep=0.5)
    generation = recorded(trainer)
    trainer._generate_and_score_completions = lambda batch: dict(generation)
    trainer.model.eval()
    assert len(trainer._prepare_inputs([None])["advantages"]) == ROWS


def test_a_generation_without_any_gradient_trains_on_one_row_a_micro_batch(tmp_path):
    trainer = trainer_of(trl_grpo.PrunedGRPOTrainer, configuration(tmp_path), keep=0.5)
    generation = recorded(trainer)
    generation["advantages"] = torch.zeros_like(generation["advantages"])
    assert (gradients(trainer, generation) == 0).all()
    assert [len(part["advantages"]) for part in trainer._buffered_inputs] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("loss_type", "bnpo"),
        ("beta", 0.1),
        ("entropy_coef", 0.01),
        ("use_adaptive_entropy", True),
        ("top_entropy_quantile", 0.5),
        ("num_iterations", 2),
        ("use_liger_kernel", True),
        ("gradient_accumulation_steps", 3),
        ("keep", 0.0),
        ("keep", 1.5),
    ],
)
def test_trl_settings_that_are_not_exact_are_refused_by_name(setting, value, tmp_path):
    args, keep = configuration(tmp_path), 0.5
    if setting == "keep":
        keep = value
    else:
        setattr(args, setting, value)
    with pytest.raises(ValueError, match=f"{setting}=.*{re.escape(str(value))}"):
        trl_grpo.refuse_what_is_not_exact(SimpleNamespace(args=args, aux_loss_enabled=False), keep)


def test_the_trainer_itself_refuses_before_it_generates(tmp_path):
    with pytest.raises(ValueError, match="entropy_coef=0"):
        trainer_of(trl_grpo.PrunedGRPOTrainer, configuration(tmp_path, entropy_coef=0.04))


def test_a_router_loss_and_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        trl_grpo.refuse_what_is_not_exact(SimpleNamespace(args=configuration(tmp_path), aux_loss_enabled=True), 0.5)
    with pytest.raises(ValueError, match="num_images"):
        trl_grpo.joined([{"advantages": torch.ones(2), "num_images": [1, 1]}])
