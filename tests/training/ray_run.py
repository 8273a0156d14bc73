"""Steps of DPPORayPPOTrainer on one process, without Ray: its own hooks on padded DataProtos, in the order of `fit`.

As in two_levels_run, every completion is fixed before a draw, the parameters of the worker group are the log-probs and
entropies themselves, and every random decision can be enumerated.
"""

import copy
from types import SimpleNamespace

import numpy as np
import ray
import torch
from pruning.pivotal_tree import every_path
from tensordict import TensorDict
from training.two_levels_run import Cell, Completion, Drawn, Found, Node, Rows, Run, Sampler, Update, configuration
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils import losses

from verl_dppo.training.data_proto import ROW, WEIGHT
from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, dppo_loss
from verl_dppo.training.ray_trainer import PROMPT, DPPORayPPOTrainer

COMPLETION = "completion"
"""Column of these tests: (rows, 2) candidate and place in its group of each row."""
WIDTHS = (3, 6)
CLASSIC = ("trainer.use_v1=false", "actor_rollout_ref.rollout.agent.num_workers=1")
NO_PROMPTS = "algorithm.dppo.prompt.enable=false"
# Response tokens and reward of each completion: the second group is constant, the third holds an empty response.
GROUPS = (
    ((2, 1.0), (5, 0.0), (3, 0.5)),
    ((4, 1.0), (2, 1.0), (6, 1.0)),
    ((0, 0.0), (3, 1.0), (5, 0.25)),
    ((6, 0.0), (1, 1.0), (4, 0.0)),
)


class FakeWorkerGroup:
    """Stands in for the actor's worker group; remembers its last update."""

    def __init__(self, run: "RayRun") -> None:
        self.run = run
        self._dispatch_info = {"actor": list(range(run.config.trainer.n_gpus_per_node))}
        self.loss = None
        self.gradients: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.features: set[str] = set()

    def set_loss_fn(self, loss) -> None:
        self.loss = loss

    def update_actor(self, data: TensorDict) -> TensorDict:
        """Give each rank its rows, cut them into mini-batches as verl's worker does, and take the gradient of each."""
        loss = losses.ppo_loss if self.loss is None else self.loss.func
        ranks, size = len(self._dispatch_info["actor"]), data["mini_batch_size"]
        self.features |= {"idle rows"} if None in rows_of(data) else set()
        assert len(data) % ranks == size % ranks == 0
        parts = [
            tu.make_iterator(part, size // ranks, epochs=1, seed=0, dataloader_kwargs=data["dataloader_kwargs"])
            for part in tu.chunk_tensordict(data, ranks)
        ]
        self.gradients, self.weights = [], []
        for of_ranks in zip(*parts, strict=True):
            tokens = sum(float(part["response_mask"].sum()) for part in of_ranks)
            # Losses of ranks are multiplied by their number, and gradients averaged over it.
            self.gradients.append(sum(self.run.gradient(loss, part, tokens) for part in of_ranks))
            self.weights.append(sum(self.run.weights(part) for part in of_ranks))
        return tu.get_tensordict({}, {"metrics": {"mfu": 0.0}})


class OrderOfPasses(Sampler):
    """A sampler as verl's loader takes it."""

    def __len__(self) -> int:
        return self.rows


class RayRun(Run):
    """Steps of the trainer from any node, with the decisions of any generator."""

    def __init__(self, cell: Cell, *overrides: str, answers: tuple[Completion, ...] | None = None) -> None:
        """Build the trainer by its own constructor.

        Args:
            cell: what is run.
            overrides: of the configuration.
            answers: all completions, those of one candidate together; None: those of two_levels_run.
        """
        self.cell, self.answers = cell, answers
        of_all, self.actors = configuration(cell, *CLASSIC, *overrides)
        self.config = copy.deepcopy(of_all)  # which the trainer changes
        self.sampler = OrderOfPasses(cell.order, len(cell.contents))
        self.worker = FakeWorkerGroup(self)
        self.remembered: dict = {}
        rows = Rows(cell.contents)
        self.trainer = DPPORayPPOTrainer(
            self.config,
            SimpleNamespace(eos_token_id=0),
            {Role.ActorRollout: ray.remote(ActorRolloutRefWorker)},
            None,
            train_dataset=rows,
            val_dataset=rows,
            train_sampler=self.sampler,
        )
        self.trainer.actor_rollout_wg = self.worker
        self.number, self.candidates = 1, list(cell.contents[: cell.batch_size])
        self.every_row = [(c, j) for c in range(cell.batch_size) for j in range(cell.n)]

    # ---- what verl's `fit` does -------------------------------------------------------------------------------------

    def proto(self, rows: list[tuple[int, int]]) -> DataProto:
        """Return the rollouts of these completions, padded, as verl's agent loop hands them over."""
        prompt, response = WIDTHS
        own = [self.completion(*row) for row in rows]
        attended, mask, scores = torch.zeros(len(rows), sum(WIDTHS)), torch.zeros(len(rows), response), []
        log_probs = torch.zeros(len(rows), response)
        for i, one in enumerate(own):
            length = one.mask.numel()
            attended[i, prompt - one.prompt : prompt + length] = 1
            mask[i, :length], log_probs[i, :length] = one.mask, one.columns["rollout_log_probs"]
            scores.append(torch.zeros(response))
            scores[-1][length - 1] = one.reward  # of an empty response at the end of the padding, as in verl
        submitted = list(dict.fromkeys(c for c, _ in rows))
        ids = torch.arange(len(rows))[:, None] + torch.arange(sum(WIDTHS))
        columns = {
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "input_ids": ids,
            "attention_mask": attended.long(),
            "position_ids": (attended.cumsum(1) - 1).clamp(min=0).long(),
            "response_mask": mask.long(),
            "rm_scores": torch.stack(scores),
            "rollout_log_probs": log_probs,
            COMPLETION: torch.tensor(rows),
            PROMPT: torch.tensor([submitted.index(c) for c, _ in rows]),
        }
        objects = {
            "uid": np.array([f"uid of {c}" for c, _ in rows], dtype=object),
            "multi_modal_inputs": np.array([{} for _ in rows], dtype=object),
            "acc": np.array([one.reward for one in own]),
        }
        return DataProto(TensorDict(columns, batch_size=len(rows)), objects, {"reward_extra_keys": ["acc"]})

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return old and reference log-probs, in float64; those of idle rows are 0."""
        columns = {name: torch.zeros(len(batch), WIDTHS[1]).double() for name in ("old_log_probs", "ref_log_prob")}
        for i, row in enumerate(rows_of(batch.batch)):
            if row is not None:
                own = self.completion(*row)
                for name, column in columns.items():
                    column[i, : own.mask.numel()] = own.columns[name]
        return DataProto(TensorDict(columns, batch_size=len(batch)))

    def until_update(self, batch: DataProto, between=lambda batch: None) -> tuple[DataProto, dict]:
        """Return the batch as the update gets it, and the step's metrics so far; `between` sees it once balanced."""
        metrics: dict = {}
        self.trainer._balance_batch(batch, metrics=metrics)
        between(batch)
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        batch.meta_info["images_seqlens"] = []
        reward, extra = extract_reward(batch)
        batch = batch.union(self.log_probs(batch))
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = reward
        batch.non_tensor_batch.update({name: np.array(values) for name, values in extra.items()})
        return self.advantage(batch, self.config.algorithm.adv_estimator), metrics

    def advantage(self, batch: DataProto, estimator: str) -> DataProto:
        """Let verl compute the advantage, from what is in the batch."""
        node = self.config.algorithm
        return compute_advantage(
            batch,
            adv_estimator=estimator,
            gamma=node.gamma,
            lam=node.lam,
            num_repeat=self.cell.n,
            norm_adv_by_std_in_grpo=node.norm_adv_by_std_in_grpo,
            config=node,
        )

    def finish(self, metrics: dict) -> None:
        self.trainer.finish_step(metrics | {"timing_s/step": 1.0})

    def step(self, decisions, rows: list[tuple[int, int]] | None = None) -> Update:
        """Take the step of these rollouts, by default of all prompts, with its draws of completions decided."""
        self._decided_by(self.trainer._prompts, self.number, decisions)
        batch, metrics = self.until_update(self.proto(self.every_row if rows is None else rows))
        self.trainer._update_actor(batch)
        step = self.trainer._step
        self.finish(metrics)
        return Update(None, step, np.array(self.worker.gradients), np.array(self.worker.weights))

    # ---- with prompts drawn, as enumerate_steps takes them ----------------------------------------------------------

    def draw(self, node: Node, number: int, decisions) -> Drawn:
        node, trainer = node.copy(), self.trainer
        self._decided_by(node.level, number, decisions)
        self.sampler.made, trainer.total_training_steps = node.passes, number
        columns = next(iter(trainer.train_dataloader))
        node.passes = self.sampler.made
        self._submit({"uid": [f"{k}" for k in range(len(columns["raw_prompt"]))], **columns})
        return Drawn(node, number, self.candidates, dict(self.row_of_key), {})

    def update(self, drawn: Drawn, decisions) -> Update:
        node = drawn.node.copy()
        self._decided_by(node.level, drawn.number, decisions)
        self.number, self.candidates, made = drawn.number, drawn.candidates, node.level.submission
        tokens = np.array([self.tokens(c) for c in np.flatnonzero(made.plan.kept)])
        self.sampler.made = node.passes
        update = self.step(decisions, list(drawn.row_of_key.values()))
        node.passes = self.sampler.made  # the end of a step looks at the next pass, to plan its steps
        node.past.append((tokens, made.pi))
        if update.step is None:
            return Update(node, None)
        return Update(node, update.step, update.gradients, update.weights)

    # ---- completions and gradients ----------------------------------------------------------------------------------

    def completion(self, candidate: int, j: int) -> Completion:
        if self.answers is None:
            return super().completion(candidate, j)
        return self.answers[candidate * self.cell.n + j]

    def gradient(self, loss, data: TensorDict, tokens: float) -> np.ndarray:
        """Return (losses, parameters) of one rank's part of a mini-batch that has so many tokens in all."""
        rows = tuple(rows_of(data))
        columns = [data[name] for name in (WEIGHT, BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, "advantages") if name in data]
        known = (self.number, loss, tokens, rows, *(column.numpy().tobytes() for column in columns))
        if known not in self.remembered:
            self.remembered[known] = self._gradients(loss, data, rows, tokens, data["global_batch_size"])
        return self.remembered[known]

    def weights(self, data: TensorDict) -> np.ndarray:
        """Return (candidates, G) weights of a part of a mini-batch, 0 for completions that are not in it."""
        weights = np.zeros((len(self.candidates), self.cell.n))
        of_rows = data[WEIGHT].tolist() if WEIGHT in data else [1.0] * len(data)
        for row, weight in zip(rows_of(data), of_rows, strict=True):
            if row is not None:
                weights[row] = weight
        return weights

    def advantages(self, rows: list[tuple[int, int]]) -> list[float]:
        """Return the advantage of each completion as verl's own estimator gives it to the batch of all groups."""
        every = [(c, j) for c in range(len(self.candidates)) for j in range(self.cell.n)]
        batch = self.proto(every)
        batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
        batch = self.advantage(batch, self.trainer._base_estimator)
        first = batch.batch["response_mask"].argmax(1)
        found = batch.batch["advantages"][torch.arange(len(every)), first].tolist()
        return [found[every.index(row)] for row in rows]


def rows_of(data: TensorDict) -> list[tuple[int, int] | None]:
    """Return candidate and place in its group of each row, None for idle rows, which must not count."""
    rows = [(c, j) for c, j in data[COMPLETION].tolist()]
    if ROW not in data:
        return rows
    idle = data[ROW] < 0
    assert not data[WEIGHT][idle].any()
    assert not data["response_mask"][idle].any()
    assert (data["attention_mask"][idle].sum(1) == 2).all()
    return [None if out else row for out, row in zip(idle.tolist(), rows, strict=True)]


def answers() -> tuple[Completion, ...]:
    """Return the completions of GROUPS."""
    rng = np.random.default_rng(0)

    def noise(n: int, scale: float) -> torch.Tensor:
        return torch.tensor(rng.normal(size=n) * scale - 1)

    made = []
    for length, reward in (one for group in GROUPS for one in group):
        prompt, mask = int(rng.integers(1, 4)), torch.ones(length, dtype=torch.long)
        if length > 4:
            mask[2] = 0  # as if a tool had said it
        old = noise(length, 0.4)
        columns = {
            "rollout_log_probs": old.clamp(max=-0.01).float(),
            "old_log_probs": old,
            "ref_log_prob": noise(length, 0.3),
        }
        leaves = {"log_probs": noise(prompt + length, 0.4), "entropy": noise(prompt + length, 1.0).abs()}
        made.append(Completion(prompt, mask, reward, columns, leaves))
    return tuple(made)


def run_of_completions(*overrides: str, mini_batches: int = 1, terms: bool = False) -> RayRun:
    """Return a run of GROUPS, of which one mini-batch takes the first three; prompts are not pruned."""
    prompts = 3 if mini_batches == 1 else 4
    rows = tuple(range(prompts))
    cell = Cell("abcd"[:prompts], rows, 1, prompts, mini_batches=mini_batches, n=3, completions=0.5, terms=terms)
    return RayRun(cell, NO_PROMPTS, *overrides, answers=answers())


def compare(run: RayRun) -> Found:
    """Compare the expected gradients of one step, over all its draws, with the full batch's; prompts are not pruned."""
    found, expected, total = Found(features=run.worker.features), 0.0, 0.0
    for probability, update in every_path(run.step):
        assert run.worker.loss.func is dppo_loss
        found.paths, total = found.paths + 1, total + probability
        expected = expected + probability * update.gradients
    assert abs(total - 1) < 1e-12
    of_row = update.step.plan.mini_batch
    for k, own in enumerate(expected):
        mine = [row for row, m in zip(run.every_row, of_row, strict=True) if m == k]
        tokens = sum(int(run.completion(*row).mask.sum()) for row in mine)
        full = run.full_gradient(mine, tokens, len(mine))
        scale = np.linalg.norm(full, axis=-1)
        assert (scale > 1e-3).all()
        found.error = max(found.error, float((np.linalg.norm(own - full, axis=-1) / scale).max()))
        found.compared += 1
    return found
