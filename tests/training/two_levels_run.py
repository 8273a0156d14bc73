"""A run of the trainer on one process: its own hooks from the draw of prompts to the weighted loss, without Ray.

Around them stand a queue in memory, an agent loop that answers each candidate in a way fixed before the draw, and a
worker whose parameters are the log-probs and entropies themselves. Every random decision can be enumerated.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from pruning.pivotal_tree import every_path
from tensordict import TensorDict
from training.fake_queue import jagged
from training.two_levels_queue import Queue
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils import losses

from verl_dppo import plugin
from verl_dppo.pruning import PromptPlan
from verl_dppo.training import trainer as trainer_module
from verl_dppo.training.loss import EXACT_AGG_MODES, dppo_loss
from verl_dppo.training.prompt_level import FORGETTING, PromptLevel
from verl_dppo.training.refusals import check_run
from verl_dppo.training.step_order import StepOrder
from verl_dppo.training.trainer import DPPOTrainer

assert plugin  # registers the configurations
ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        contents: what each row of the data set asks; rows that ask the same are one prompt.
        order: row numbers pass after pass.
        steps: how many are taken.
        batch_size: prompts of a batch, K.
        mini_batches: of it.
        n: completions of a group, G.
        schedule, rule, keep, floor: of the prompt level.
        completions: share kept by the completion level, or None where it is off.
        terms: whether KL and entropy terms are on.
        deal: seed of what is dealt and answered.
    """

    contents: str
    order: tuple[int, ...]
    steps: int
    batch_size: int
    mini_batches: int = 1
    n: int = 2
    schedule: str = "refill"
    rule: str = "beta"
    keep: float = 0.6
    floor: float = 0.2
    completions: float | None = None
    terms: bool = False
    deal: int = 0


@cache
def configuration(cell: Cell, *more: str):
    """Return verl's configuration of a cell and of more overrides, with the actor's for each aggregation."""
    prompt, completion = "algorithm.dppo.prompt", "algorithm.dppo.completion"
    overrides = [
        "algorithm=dppo",
        f"data.train_batch_size={cell.batch_size}",
        f"{ACTOR}.ppo_mini_batch_size={cell.batch_size // cell.mini_batches}",
        f"{ACTOR}.use_dynamic_bsz=true",
        "trainer.n_gpus_per_node=1",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.rollout.n={cell.n}",
        f"{ACTOR}.use_kl_loss={cell.terms}",
        f"{ACTOR}.entropy_coeff={0.2 if cell.terms else 0.0}",
        f"{prompt}.schedule={cell.schedule}",
        f"{prompt}.rule={cell.rule}",
        f"{prompt}.keep={cell.keep}",
        f"{prompt}.floor={cell.floor}",
        f"{completion}.enable={cell.completions is not None}",
        f"{completion}.keep={cell.completions or 0.5}",
        f"{completion}.probe_every=null",
        # A completion has 9 tokens at most, see below.
        "algorithm.dppo.packing.micro_batch_tokens=12",
        "algorithm.dppo.balance.cost=tokens",
        "data.max_prompt_length=3",
        "data.max_response_length=6",
        *more,
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    # A coefficient other than verl's .001, with which a fault in the KL term would hardly show.
    return config, {
        mode: dataclasses.replace(
            actor,
            loss_agg_mode=mode,
            loss_scale_factor=7 if mode == "seq-mean-token-sum-norm" else None,
            kl_loss_coef=0.3,
        )
        for mode in EXACT_AGG_MODES
    }


class Rows:
    """A data set whose items hold what verl's do."""

    def __init__(self, contents: str) -> None:
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, row: int) -> dict:
        return {"raw_prompt": [{"content": self.contents[row]}], "data_source": "test", "dummy": torch.zeros(1)}


class Sampler:
    """The order of one pass after the other; `made` of them were asked for."""

    def __init__(self, order: Sequence[int], rows: int) -> None:
        self.order, self.rows, self.made = order, rows, 0

    def __iter__(self) -> Iterator[int]:
        self.made += 1
        return iter(self.order[(self.made - 1) * self.rows : self.made * self.rows])


@dataclass(frozen=True)
class Completion:
    """What a candidate would answer, and what the policy, the old one and the reference make of it."""

    prompt: int
    mask: torch.Tensor
    reward: float
    columns: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]


@cache
def completion(content: str, step: int, candidate: int, j: int, seed: int) -> Completion:
    """Return completion j of a candidate; all that is random about it is fixed by these numbers."""
    rng = np.random.default_rng([seed, step, candidate, j])
    prompt, response = int(rng.integers(1, 4)), int(rng.integers(2, 7))
    mask = torch.ones(response, dtype=torch.long)
    if response > 4:
        mask[2] = 0  # as if a tool had said it

    def noise(n: int, scale: float) -> torch.Tensor:
        return torch.tensor(rng.normal(size=n) * scale - 1)

    # Pass rates of different prompts lie far apart, but none of them is certain.
    solved = rng.random() < 0.15 + 0.7 * ((ord(content) * 37) % 10) / 9
    log_prob = noise(response, 0.4)
    return Completion(
        prompt,
        mask,
        float(solved),
        {
            "rollout_log_probs": log_prob.clamp(max=-0.01).float(),
            "old_log_probs": log_prob,
            "ref_log_prob": noise(response, 0.3),
        },
        {"log_probs": noise(prompt + response, 0.4), "entropy": noise(prompt + response, 1.0).abs()},
    )


class Worker:
    """The actor's worker group of one rank; remembers its last update."""

    def __init__(self, run: "Run") -> None:
        self.run, self._dispatch_info = run, {"actor": [0]}
        self.loss = None
        self.gradients: list[np.ndarray] = []

    def set_loss_fn(self, loss) -> None:
        self.loss = loss

    def update_actor(self, batch) -> TensorDict:
        """Cut the batch into mini-batches as verl's worker does, and take the gradient of each."""
        self.gradients = []
        size = batch.extra_info["mini_batch_size"]
        assert len(batch) % size == 0
        for start in range(0, len(batch), size):
            self.gradients.append(self.run.weighted_gradient(batch.keys[start : start + size], batch.extra_info))
        return tu.get_tensordict({}, {"metrics": {"mfu": 0.0}})


@dataclass
class Node:
    """Where a run stands before a step.

    Attributes:
        level: the prompt level.
        passes: over the data set that were begun.
        past: of each step taken, (k,) response tokens of each kept prompt's group, and the probability it had.
    """

    level: PromptLevel
    passes: int = 0
    past: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def copy(self) -> "Node":
        shared = {id(self.level.loader): self.level.loader}
        return Node(copy.deepcopy(self.level, shared), self.passes, list(self.past))


@dataclass
class Drawn:
    """A step whose prompts were drawn and answered.

    Attributes:
        node: where the run stands now.
        number: of the step.
        candidates: what each of them asks.
        row_of_key: candidate and place in its group of each completion.
        submitted: what the trainer remembers of its submission.
    """

    node: Node
    number: int
    candidates: list[str]
    row_of_key: dict[str, tuple[int, int]]
    submitted: dict[str, int]

    @property
    def plan(self) -> PromptPlan:
        return self.node.level.submission.plan


@dataclass
class Update:
    """One path through the rest of a step.

    Attributes:
        node: after the step.
        step: what the trainer made of the completions, or None where verl's own update runs.
        gradients: (mini-batches, losses, parameters).
        weights: (mini-batches, candidates, G).
    """

    node: Node
    step: Any
    gradients: np.ndarray | None = None
    weights: np.ndarray | None = None


class Run:
    """Steps of the trainer from any node, with the decisions of any generator."""

    def __init__(self, cell: Cell, monkeypatch) -> None:
        self.cell = cell
        self.config, self.actors = configuration(cell)
        self.queue = Queue()
        self.queue.install(monkeypatch)
        # Steps that prune nothing are verl's own from here on.
        monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda trainer, batch, metrics: batch)
        self.sampler = Sampler(cell.order, len(cell.contents))
        monkeypatch.setattr(PPOTrainerSync, "_init_dataloader", lambda trainer: None)
        monkeypatch.setattr(trainer_module, "create_rl_sampler", lambda data, dataset: self.sampler)
        self.worker = Worker(self)
        self.remembered: dict = {}
        self.trainer = self._trainer()

    def start(self) -> Node:
        """Return the node before the first step."""
        return Node(self.trainer._prompts, self.sampler.made)

    def _trainer(self) -> DPPOTrainer:
        trainer = object.__new__(DPPOTrainer)
        trainer.config = self.config
        trainer.begin_run(check_run(self.config))
        trainer.total_training_steps, trainer.local_trigger_step = 0, 0
        trainer._submitted = {}
        trainer._order = StepOrder(trainer.dppo, self.config)
        trainer.trainer_mode, trainer.timing_raw, trainer.train_dataloader_it = "sync", {}, None
        trainer.tokenizer = SimpleNamespace(eos_token_id=0)
        trainer.actor_rollout_wg = self.worker
        trainer.agent_loop_manager = SimpleNamespace(generate_sequences=self._submit)
        trainer.train_dataset = Rows(self.cell.contents)
        trainer._init_dataloader()
        return trainer

    # ---- one step ---------------------------------------------------------------------------------------------------

    def draw(self, node: Node, number: int, decisions) -> Drawn:
        """Draw and answer the prompts of step `number` (from 1); the node stays as it is."""
        node, trainer = node.copy(), self.trainer
        self._decided_by(node.level, number, decisions)
        self.sampler.made = node.passes
        self.queue.fields.clear()
        self.queue.tags.clear()
        trainer.prepare_step()
        node.passes = self.sampler.made
        return Drawn(node, number, self.candidates, dict(self.row_of_key), dict(trainer._submitted))

    def update(self, drawn: Drawn, decisions) -> Update:
        """Go on to the end of the step: completions drawn, and the gradient of every mini-batch taken."""
        node, trainer = drawn.node.copy(), self.trainer
        self._decided_by(node.level, drawn.number, decisions)
        self.number, self.candidates, self.row_of_key = drawn.number, drawn.candidates, drawn.row_of_key
        trainer._submitted = dict(drawn.submitted)
        for key in drawn.row_of_key:
            self._put_answer(key)
        made = node.level.submission
        tokens = np.array([self.tokens(c) for c in np.flatnonzero(made.plan.kept)])
        # Rollouts finish in any order.
        batch = self.queue.batch(sorted(drawn.row_of_key, key=lambda key: key[::-1]))
        batch = trainer._balance_batch(batch, {})
        node.past.append((tokens, made.pi))
        if trainer._step is None:
            return Update(node, None)
        for key in batch.keys:
            self._put_old_and_reference_log_probs(key)
        batch = trainer._compute_advantage(self.queue.batch(batch.keys), {})
        trainer._update_actor(batch, {})
        gradients, weights = zip(*self.worker.gradients, strict=True)
        return Update(node, trainer._step, np.array(gradients), np.array(weights))

    def _decided_by(self, level: PromptLevel, number: int, decisions) -> None:
        trainer, cell = self.trainer, self.cell
        trainer._prompts, trainer.global_steps = level, number
        # Those that sample; what deals has a seed.
        trainer._generator = lambda stage: (
            decisions if stage in (1, 4) else np.random.default_rng([cell.deal, number, stage])
        )
        self.number = number

    def completion(self, candidate: int, j: int) -> Completion:
        return completion(self.candidates[candidate], self.number, candidate, j, self.cell.deal)

    def tokens(self, candidate: int) -> int:
        """Return the response tokens of a candidate's group."""
        return sum(int(self.completion(candidate, j).mask.sum()) for j in range(self.cell.n))

    def _submit(self, batch: TensorDict) -> None:
        """Note what was submitted: the candidates are the next rows of the passes, its k-th prompt the k-th kept."""
        level = self.trainer._prompts
        kept, end = np.flatnonzero(level.submission.plan.kept), level.stream.position
        drawn = self.cell.order[end - level.submission.plan.kept.size : end]
        self.candidates = [self.cell.contents[row] for row in drawn]
        assert len(batch["uid"]) == kept.size
        self.row_of_key = {}
        for uid, raw, candidate in zip(batch["uid"], batch["raw_prompt"], kept, strict=True):
            assert getattr(raw, "data", raw)[0]["content"] == self.candidates[candidate]
            for j in range(self.cell.n):
                self.row_of_key[f"{getattr(uid, 'data', uid)}_{j}_0"] = (int(candidate), j)

    def _put_answer(self, key: str) -> None:
        candidate, j = self.row_of_key[key]
        own = self.completion(candidate, j)
        scores = torch.zeros(own.mask.numel(), dtype=torch.float64)
        scores[-1] = own.reward
        lengths = {"prompt_len": own.prompt, "response_len": own.mask.numel()}
        self.queue.put(
            key,
            lengths | {"seq_len": sum(lengths.values())},
            uid=key.rsplit("_", 2)[0],
            prompts=torch.zeros(own.prompt, dtype=torch.long),
            responses=torch.arange(own.mask.numel()) + j,
            response_mask=own.mask,
            rm_scores=scores,
            rollout_log_probs=own.columns["rollout_log_probs"],
        )

    def _put_old_and_reference_log_probs(self, key: str) -> None:
        names = ("old_log_probs", "ref_log_prob")
        if key in self.row_of_key:
            columns = self.completion(*self.row_of_key[key]).columns
            self.queue.put(key, {}, **{name: columns[name] for name in names})
        else:
            self.queue.put(key, {}, **{name: torch.zeros(1, dtype=torch.float64) for name in names})

    # ---- gradients --------------------------------------------------------------------------------------------------

    def weighted_gradient(self, keys: list[str], info: dict) -> tuple[np.ndarray, np.ndarray]:
        """Return (losses, parameters) from the loss that the trainer chose, and the (candidates, G) weights."""
        assert self.worker.loss.func is dppo_loss
        data = self.queue.kv_batch_get(keys, "train")
        rows = [self.row_of_key.get(key) for key in keys]
        weights = np.zeros((len(self.candidates), self.cell.n))
        for row, weight in zip(rows, data["dppo_weight"].tolist(), strict=True):
            if row is not None:
                weights[row] = weight
            else:
                assert weight == 0
        known = (self.number, len(self.candidates), tuple(rows), *(data[name].numpy().tobytes() for name in COLUMNS))
        known += (data["advantages"].values().numpy().tobytes(),)
        if known not in self.remembered:
            tokens = float(data["response_mask"].values().sum())
            self.remembered[known] = self._gradients(dppo_loss, data, rows, tokens, info["global_batch_size"])
        return self.remembered[known], weights

    def full_gradient(self, rows: list[tuple[int, int]], tokens: float, size: float) -> np.ndarray:
        """Return (losses, parameters) of verl's own loss on all of these completions, divided by these constants."""
        own, advantage = [self.completion(*row) for row in rows], self.advantages(rows)
        data = tu.get_tensordict(
            {
                "prompts": jagged(torch.zeros(o.prompt, dtype=torch.long) for o in own),
                "responses": jagged(torch.zeros_like(o.mask) for o in own),
                "response_mask": jagged(o.mask for o in own),
                "advantages": jagged(a * o.mask.float() for a, o in zip(advantage, own, strict=True)),
                **{name: jagged(o.columns[name] for o in own) for name in ("old_log_probs", "ref_log_prob")},
            }
        )
        return self._gradients(losses.ppo_loss, data, rows, tokens, size)

    def advantages(self, rows: list[tuple[int, int]]) -> list[float]:
        """Return the advantage of each of these completions in its full group."""
        rewards = {c: np.array([self.completion(c, j).reward for j in range(self.cell.n)]) for c, _ in rows}
        return [(rewards[c][j] - rewards[c].mean()) / (rewards[c].std(ddof=1) + 1e-6) for c, j in rows]

    def _gradients(self, loss_function, data: TensorDict, rows, tokens: float, size: float) -> np.ndarray:
        return np.array(
            [self._gradient(actor, loss_function, data, rows, tokens, size) for actor in self.actors.values()]
        )

    def _gradient(self, actor, loss_function, data, rows, tokens, size) -> np.ndarray:
        """Return the gradient with respect to the log-probs and entropies of all candidates' completions."""
        everything = [(c, j) for c in range(len(self.candidates)) for j in range(self.cell.n)]
        names = ("log_probs", "entropy")
        padding = torch.zeros(2, dtype=torch.float64)
        leaves = {
            (row, name): padding if row is None else self.completion(*row).leaves[name].clone().requires_grad_(True)
            for row in set(rows)
            for name in names
        }
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=size)
        output = {"log_probs": jagged(leaves[row, "log_probs"] for row in rows)}
        if actor.entropy_coeff:
            output["entropy"] = jagged(leaves[row, "entropy"] for row in rows)
        loss, _ = loss_function(actor, output, data)
        loss.backward()
        parts = []
        for row in everything:
            for name in names:
                leaf = leaves.get((row, name))
                missing = leaf is None or leaf.grad is None
                parts.append(torch.zeros_like(self.completion(*row).leaves[name]) if missing else leaf.grad)
        return torch.cat(parts).numpy()


COLUMNS = ("dppo_weight", "dppo_batch_num_tokens", "dppo_global_batch_size")


# ---- enumeration ----------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What an enumeration of all steps came to.

    Attributes:
        error: largest relative error of an expected gradient, of any mini-batch, loss, step and past.
        compared: gradients of a mini-batch that were not zero in any loss.
        paths: that were followed.
        histories: different pasts that the last step was enumerated from.
        features: what occurred in steps that could skip a prompt.
        probabilities: of prompts in the last step, from each past.
    """

    error: float = 0.0
    compared: int = 0
    paths: int = 0
    histories: int = 0
    features: set[str] = field(default_factory=set)
    probabilities: set[tuple[float, ...]] = field(default_factory=set, repr=False)


def enumerate_steps(run: Run) -> Found:
    """Take every path through the draws of all steps, each step from every past that its predecessors can leave."""
    found, nodes = Found(), [run.start()]
    for number in range(1, run.cell.steps + 1):
        found.histories, found.probabilities = len(nodes), set()
        nodes = [after for node in nodes for after in _enumerate_step(run, node, number, found)]
        if len(found.probabilities) > 1:
            found.features.add("probabilities that depend on earlier draws")
    return found


def every_update(run: Run, node: Node, number: int) -> Iterator[tuple[float, Drawn, Update]]:
    """Yield every path through one step with its probability; draws that keep the same prompts are taken together."""
    chance: dict[bytes, float] = {}
    representative: dict[bytes, Drawn] = {}
    for probability, drawn in every_path(lambda rng: run.draw(node, number, rng)):
        kept = drawn.plan.kept.tobytes()
        chance[kept] = chance.get(kept, 0.0) + probability
        representative.setdefault(kept, drawn)
    for kept, drawn in representative.items():
        for probability, update in every_path(lambda rng, drawn=drawn: run.update(drawn, rng)):
            yield chance[kept] * probability, drawn, update


def _enumerate_step(run: Run, node: Node, number: int, found: Found) -> list[Node]:
    """Compare the expected gradients of a step with the full batch's, and return the nodes it can lead to."""
    expected, total, after = 0.0, 0.0, {}
    for probability, drawn, update in every_update(run, node, number):
        found.paths, total, last = found.paths + 1, total + probability, update
        after[drawn.plan.kept.tobytes()] = update.node
        if update.gradients is not None:
            expected = expected + probability * update.gradients
    assert abs(total - 1) < 1e-12
    if last.step is not None:
        reference = _full_batch(run, node, drawn, last)
        scale = np.linalg.norm(reference, axis=-1)
        error = np.linalg.norm(expected - reference, axis=-1)
        found.error = max(found.error, float((error / np.where(scale > 0, scale, 1.0)).max()))
        found.compared += int((scale.min(axis=1) > 1e-3).sum())
    if drawn.plan.pruned:
        found.features |= _features(drawn)
    found.probabilities.add(tuple(drawn.plan.pi.round(6).tolist()))
    return list(after.values())


def _full_batch(run: Run, node: Node, drawn: Drawn, update: Update) -> np.ndarray:
    """Return (mini-batches, losses, parameters) of verl's own loss on all candidates, and what it is divided by."""
    n, plan = run.cell.n, drawn.plan
    rows = [(c, j) for c in range(len(drawn.candidates)) for j in range(n)]
    if plan.pruned:
        of_row = np.repeat(plan.mini_batch, n)
        per_prompt = _tokens_of_the_past(node)
    else:
        of_row = update.step.plan.mini_batch
        per_prompt = None
    gradients = []
    for k in range(int(of_row.max()) + 1):
        mine = [row for row, m in zip(rows, of_row, strict=True) if m == k]
        tokens = sum(int(run.completion(*row).mask.sum()) for row in mine)
        if per_prompt is not None:
            tokens = per_prompt * len(mine) / n
        gradients.append(run.full_gradient(mine, tokens, len(mine)))
    return np.array(gradients)


def _tokens_of_the_past(node: Node) -> float:
    """Return the mean response tokens of a group over past steps, each candidate counted, later steps more."""
    age = len(node.past)
    tokens = sum(FORGETTING ** (age - s) * (own / pi).sum() for s, (own, pi) in enumerate(node.past))
    return tokens / sum(FORGETTING ** (age - s) * (1 / pi).sum() for s, (_, pi) in enumerate(node.past))


def _features(drawn: Drawn) -> set[str]:
    made, plan = drawn.node.level.submission, drawn.plan
    found = {"pruned"}
    if made.known.any() and not made.known.all():
        found.add("seen and unseen")
    if (plan.pi[~made.known] < 1).any():
        found.add("unseen below 1")
    if len(set(plan.drawn)) > 1:
        found.add("uneven mini-batches")
    if len(set(drawn.candidates)) < len(drawn.candidates):
        found.add("one prompt twice")
    if len(set(plan.pi.round(9))) > 2:
        found.add("three probabilities")
    return found
