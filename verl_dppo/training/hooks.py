"""What DPPO adds to a trainer of verl, of either kind: the decisions of a step, its reports, and the checkpoint."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.utils.losses import ppo_loss

from verl_dppo.settings import DPPOSettings
from verl_dppo.training.completion_level import CompletionLevel, PlannedStep
from verl_dppo.training.full_batch import FullBatch
from verl_dppo.training.loss import dppo_loss
from verl_dppo.training.metrics import over_drawn_prompts, rank_seconds, saved_time
from verl_dppo.training.prompt_level import PromptLevel, PromptsOfRows
from verl_dppo.training.state import Stateful, load_state, save_state
from verl_dppo.training.step_order import StepOrder
from verl_dppo.training.worker import BUSY_SECONDS, WALL_SECONDS

logger = logging.getLogger(__name__)

SubmittedRows = tuple[FullBatch, NDArray[np.int64]]
"""The completions of a step, and (n,) the place of each one's prompt in the submission."""


class DPPOHooks:
    """Stands before a trainer of verl among the bases of ours, and relies on what both kinds of trainer have."""

    config: DictConfig
    tokenizer: Any
    actor_rollout_wg: Any
    train_dataset: Any
    train_dataloader: Any
    timing_raw: dict[str, float]
    global_steps: int
    total_training_steps: int
    local_trigger_step = 0
    reads_rollout_n = True
    """Whether verl's trainer samples a prompt as often as its column of that name says."""

    def begin_run(self, settings: DPPOSettings) -> None:
        """Set up what lasts for a run, before verl's own trainer is."""
        self.dppo = settings
        self._step: PlannedStep | None = None
        self._weighted = False
        self._actor_config: Any = None
        self._completions = CompletionLevel(settings, self.config)
        self._remembered: dict[str, Stateful] = {
            "budget": self._completions.budget,
            "norms": self._completions.norms,
        }
        self._prompts: PromptLevel | None = None
        self._order: StepOrder | None = None

    def remember_prompts(self, next_pass: Callable[[], NDArray[np.int64]], collate: Any = None) -> None:
        """Name the prompts of verl's data set, and put a loader that yields what each step draws in place of verl's.

        Args:
            next_pass: the order of the rows in each pass.
            collate: makes columns of rows; None: verl's own function.
        """
        self._prompts = PromptLevel(
            self.dppo, self.config, self.train_dataset, next_pass, collate, self.reads_rollout_n
        )
        self._remembered["prompts"] = self._prompts
        self.train_dataloader = DrawnPrompts(self)
        self.plan_steps(done=0)

    def plan_steps(self, done: int) -> None:
        """Plan the steps that all passes over the data set take, or fewer, if the user gave a number."""
        if self._prompts is None:
            return
        planned, given = self._prompts.planned_steps(done), self.config.trainer.total_training_steps
        self.total_training_steps = planned if given is None else min(planned, int(given))

    @property
    def drawn_steps_per_epoch(self) -> int:
        """After so many steps verl takes a pass for over, and would end the last one without its last step's work."""
        assert self._prompts is not None
        return -(-self.total_training_steps // self._prompts.epochs)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """Add what the next step depends on to verl's checkpoint, before verl marks it as complete."""
        if self.dppo.prunes:
            folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            if self._prompts is not None:
                self._prompts.save(folder)
            save_state(folder, self._remembered)
        super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()  # type: ignore[misc]
        if not self.dppo.prunes or not self.global_steps:
            return
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        if self.config.trainer.resume_mode == "resume_path":
            folder = self.config.trainer.resume_from_path
        found = load_state(folder, self._remembered, optional=frozenset({"prompts"}))
        if not found:
            logger.warning("%s holds no state of DPPO: its budget and norm model start afresh", folder)
        if self._prompts is not None:
            if "prompts" in found:
                logger.warning("%s: %s", folder, self._prompts.load(folder))
            else:
                self._prompts.follow(self.global_steps)
                logger.warning("%s holds no prompt history: nothing is known of any prompt yet", folder)
            self.plan_steps(self.global_steps)

    # ---- the decisions of a step ------------------------------------------------------------------------------------

    def _annealed(self) -> bool:
        return self.dppo.anneals(self.global_steps, self.total_training_steps)

    def _generator(self, stage: int) -> np.random.Generator:
        """Return the generator of one decision of this step, a function of seed and step: a resumed run repeats it."""
        return np.random.default_rng([self.dppo.seed, self.global_steps, self.local_trigger_step, stage])

    def has_steps_left(self) -> bool:
        """Whether verl may fetch prompts for another step; it ends the run by its own count of steps."""
        return True

    def draw_prompts(self) -> dict[str, Any]:
        """Return the columns of the prompts that this step samples."""
        assert self._prompts is not None
        return self._prompts.next_batch(self._annealed(), self._generator(3), self._generator(4))

    def decide(self, read: Callable[[], SubmittedRows], metrics: dict) -> PlannedStep | None:
        """Learn from the prompts of a step, and draw its completions.

        Args:
            read: gives the step's completions, in the order of submission; not called where nothing depends on them.
            metrics: where figures go.

        Returns:
            What was decided, or None where every completion is trained on by verl's own code.
        """
        self._step = None
        made = self._prompts.submission if self._prompts is not None else None
        prunes_completions = self.dppo.prunes_completions and not self._annealed()
        pruned = prunes_completions or (made is not None and made.plan.pruned)
        self._use_weighted_loss(pruned)
        if made is None and not pruned:
            return None
        with marked_timer("dppo_prune", self.timing_raw):
            full, prompt = read()
            prompts, part = PromptsOfRows.all_of(full.group), np.zeros(full.group.size, dtype=np.int64)
            if made is not None and made.plan.pruned:
                part = made.mini_batch[prompt]
            magnitude = self._completions.magnitude(full, part)
            if self._prompts is not None:
                prompts, figures = self._prompts.observe(self.global_steps, full, prompt, magnitude)
                metrics.update(figures)
            if pruned:
                self._step = self._completions.draw(full, magnitude, prompts, prunes_completions, self._generator)
                metrics.update(self._step.metrics)
        return self._step

    def _use_weighted_loss(self, weighted: bool) -> None:
        """Give the workers the weighted loss, or verl's own, where they do not have it yet."""
        if weighted != self._weighted:
            self.remember_actor_config()
            self.actor_rollout_wg.set_loss_fn(partial(dppo_loss if weighted else ppo_loss, config=self._actor_config))
            self._weighted = weighted

    def probe_settings(self) -> dict[str, Any]:
        """Return what workers need to know to measure gradient norms as the update would have them."""
        actor = self.config.actor_rollout_ref.actor
        return {
            "calculate_entropy": bool(actor.calculate_entropy or actor.entropy_coeff),
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }

    def remember_actor_config(self) -> None:
        """Keep the actor's configuration as the workers have it: verl may write into it in a later step."""
        if self._actor_config is None:
            self._actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)

    def data_parallel_size(self) -> int:
        """Return the data-parallel ranks of the actor."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return max(group._dispatch_info["actor"]) + 1

    def whole_mini_batches(self, rows: int) -> NDArray[np.int64]:
        """Return the mini-batch of each row of a batch that is not pruned: those that verl would cut."""
        of_one = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        # In steps without an update (trainer.critic_warmup) verl does not fill the last mini-batch up.
        return self.mini_batch_of_rows(rows, 1 if rows % of_one else rows // of_one)

    def mini_batch_of_rows(self, rows: int, mini_batches: int) -> NDArray[np.int64]:
        """Return the mini-batch of each row, from its place: each rank has its part of all of them in turn."""
        ranks = self.data_parallel_size()
        return np.tile(np.repeat(np.arange(mini_batches), rows // (ranks * mini_batches)), ranks)

    # ---- reports ----------------------------------------------------------------------------------------------------

    def report(self, metrics: dict, timing: dict[str, float]) -> None:
        """Add what is known at the end of a pruned step, and count skipped prompts into verl's means.

        Args:
            metrics: with verl's own, over all completions that were sampled.
            timing: seconds of each phase as verl names them.
        """
        assert self._step is not None
        full, prompts = self._step.full, self._step.prompts
        if prompts.mini_batch is not None:
            metrics.update(over_drawn_prompts(full, prompts.weight))
        whole = float((prompts.weight * full.sequence_length).sum())
        trained = float(full.sequence_length[self._step.plan.kept].sum())
        rollout_ratio = whole / max(float(full.sequence_length.sum()), 1.0)
        rho, per_token = self._step.metrics["dppo/variance_inflation"], self._completions.seconds_per_token()
        metrics.update(saved_time(timing, rollout_ratio, whole - trained, trained, per_token, rho))


class DrawnPrompts:
    """What verl takes for its training loader where prompts are pruned: each fetch is what one step keeps."""

    def __init__(self, trainer: DPPOHooks) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._trainer.has_steps_left():
            yield self._trainer.draw_prompts()

    def __len__(self) -> int:
        return self._trainer.drawn_steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is saved with the history. verl's own loader takes it for a new pass."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Pass over the state of verl's own loader, which a run without prompt pruning left."""


@contextmanager
def around_update(worker_group: Any, rows: int | None, metrics: dict) -> Iterator[None]:
    """Correct what the update of one step is asked for, and take our own figures from its answer.

    `_update_actor` sets the size of mini-batches itself right before it calls the worker group, and reads the answer
    right after, so both can only be had in between. What it sets as `global_batch_size` is not used where rows are
    pruned: the denominators come as columns.

    Args:
        worker_group: of the actor.
        rows: rows of a mini-batch, where verl counts un-pruned ones; None: verl is right.
        metrics: where the figures go.
    """
    of_verl = worker_group.update_actor

    def update_actor(batch: Any) -> Any:
        if rows is not None:
            if hasattr(batch, "extra_info"):
                batch.extra_info["mini_batch_size"] = rows
            else:
                tu.assign_non_tensor(batch, mini_batch_size=rows)
        output = of_verl(batch)
        of_workers = output["metrics"]
        if BUSY_SECONDS in of_workers:
            metrics.update(rank_seconds(of_workers.pop(BUSY_SECONDS), of_workers.pop(WALL_SECONDS, None)))
        return output

    worker_group.update_actor = update_actor
    try:
        yield
    finally:
        worker_group.update_actor = of_verl
