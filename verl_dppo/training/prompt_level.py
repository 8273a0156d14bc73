"""The prompt level of a run: which rows of the data set a step samples, and what is learnt from them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from verl_dppo.pruning import (
    PromptHistory,
    PromptKeepController,
    PromptPlan,
    PromptStream,
    candidates,
    load_history,
    plan_prompts,
    planned_steps,
    prompt_inflation,
    rank_correlation,
    save_history,
    shrunk_size,
    skipped_energy,
)
from verl_dppo.settings import AUTO, DPPOSettings
from verl_dppo.training.full_batch import FullBatch
from verl_dppo.training.prompt_ids import fingerprint, prompt_ids
from verl_dppo.training.row_loader import RowLoader

HISTORY_FILE = "dppo_prompts.npz"
ROLLOUT_N = "__rollout_n__"
"""Column of a data set by which verl samples a prompt another number of times than `rollout.n`."""
SUMS = {"drawn": int, "kept": int, "prompts": float, "tokens": float, "groups": float}
"""What the level counts, in its state under these names."""
FORGETTING = 0.9
"""A step counts this much less with every later one for the mean response tokens of a prompt."""


@dataclass(frozen=True)
class Submission:
    """What one step sampled, and of which candidates.

    Attributes:
        rows: (k,) rows of the data set, in the order of submission.
        ids: (k,) their prompts.
        pi: (k,) probability with which each was to be kept.
        mini_batch: (k,) mini-batch of each.
        plan: of all N candidates.
        spread: (N,) as history had it.
        known: (N,) bool, whether it counted.
        keep: the share that was asked for.
        tokens_per_prompt: response tokens of one prompt's group, the mean over past steps.
        completions_per_prompt: the same of completions.
        epoch: passes over the data set that were complete before this step.
    """

    rows: NDArray[np.int64]
    ids: list[str]
    pi: NDArray[np.float64]
    mini_batch: NDArray[np.int64]
    plan: PromptPlan
    spread: NDArray[np.float64]
    known: NDArray[np.bool_]
    keep: float
    tokens_per_prompt: float
    completions_per_prompt: float
    epoch: int


@dataclass(frozen=True)
class PromptsOfRows:
    """What the prompt level decided, for each of n completions.

    Attributes:
        weight: (n,) of its prompt.
        mini_batch: (n,) of its prompt, or None where no prompt could be skipped; completions are then dealt one by one.
        drawn: (mini-batches,) candidates of each, skipped ones included.
        tokens_per_prompt: response tokens that each candidate counts for.
        completions_per_prompt: completions that it counts for.
        inflation: variance added by the draw over that of the rollouts.
    """

    weight: NDArray[np.float64]
    mini_batch: NDArray[np.int64] | None
    drawn: NDArray[np.int64]
    tokens_per_prompt: float
    completions_per_prompt: float
    inflation: float

    @classmethod
    def all_of(cls, group: NDArray[np.int64]) -> "PromptsOfRows":
        """Return what holds without a prompt level.

        Args:
            group: (n,) prompt of each completion, numbered from 0.
        """
        return cls(np.ones(group.size), None, np.array([group.max() + 1]), 0.0, 0.0, 0.0)


class PromptLevel:
    """Draws the prompts of each step, and remembers them. Its state is in two files of the checkpoint folder."""

    def __init__(
        self,
        settings: DPPOSettings,
        config: DictConfig,
        dataset: Any,
        next_pass: Callable[[], NDArray[np.int64]],
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
        reads_rollout_n: bool = True,
    ) -> None:
        """Name the prompts of the data set.

        Args:
            settings: validated.
            config: verl's composed configuration.
            dataset: of training prompts.
            next_pass: the order of the rows in each pass; see `PromptStream`.
            collate: makes columns of rows; None: verl's own function.
            reads_rollout_n: whether the trainer heeds the column ROLLOUT_N.

        Raises:
            RefusedSettingError: prompts that cannot be named; see `prompt_ids`.
            ValueError: a data set without rows.
        """
        self.settings, self.anneal_fraction = settings.prompt, settings.anneal_fraction
        self.batch_size = int(config.data.train_batch_size)
        self.mini_batches = self.batch_size // int(config.actor_rollout_ref.actor.ppo_mini_batch_size)
        self.epochs, self.group_size = int(config.trainer.total_epochs), int(config.actor_rollout_ref.rollout.n)
        self.ids = prompt_ids(dataset, config.data, self.settings.id_column)
        self.stream = PromptStream(len(self.ids), next_pass, fingerprint(self.ids))
        self.loader = RowLoader(dataset, int(config.data.get("dataloader_num_workers", 0)), collate)
        self.history = PromptHistory(self.settings.forgetting)
        self.controller = PromptKeepController()
        self.submission: Submission | None = None
        self.drawn, self.kept = 0, 0
        # Over past steps, weighted: prompts, their response tokens, and their groups in units of `rollout.n`.
        self.prompts, self.tokens, self.groups = 0.0, 0.0, 0.0
        self._group_share, self._reads_rollout_n = np.ones(0), reads_rollout_n
        self._checksum, self._interrupted = 0, False
        # The planned steps, and what they were planned for.
        self._plan: dict[str, float] = {"steps": 0, "epochs": 0, "anneal_fraction": 0.0}
        # Rows with the same id share a code, so that the known part of a whole pass is found without naming its rows.
        names, self._code = np.unique(np.array(self.ids), return_inverse=True)
        self._names = names.tolist()
        self._is_known = np.zeros(len(self._names), dtype=bool)

    # ---- before rollout ---------------------------------------------------------------------------------------------

    @property
    def keep(self) -> float:
        """The mean probability of known prompts in the next step."""
        return self.controller.keep if self.settings.keep == AUTO else float(self.settings.keep)

    def _candidates(self, keep: float, known_share: float | None = None) -> int:
        """Return how many prompts a step draws; without a given share of known prompts, the next one."""
        if self.settings.schedule == "shrink":
            return self.batch_size
        if known_share is None:
            known_share = float(self._is_known[self._code[self.stream.to_come()]].mean())
        return candidates(self.batch_size, keep, known_share, self.mini_batches, self.settings.floor)

    def next_batch(self, full: bool, deal: np.random.Generator, sample: np.random.Generator) -> dict[str, Any]:
        """Draw the prompts of a step and load those that are kept.

        Args:
            full: keep every candidate, as annealed steps do.
            deal: decides which candidates share a mini-batch.
            sample: decides which are kept.

        Returns:
            The columns of the kept rows.
        """
        keep, floor = (1.0 if full else self.keep), self.settings.floor
        epoch = self.stream.position // self.stream.rows
        drawn = self._candidates(keep)
        rows = self.stream.take(drawn)
        ids, known = [self.ids[row] for row in rows], self._is_known[self._code[rows]]
        kept_size = self.batch_size // self.mini_batches
        if self.settings.schedule == "shrink":
            kept_size = shrunk_size(known, keep, self.mini_batches, floor)
        spread = self.history.spread(ids)
        # Neighbours compete for a place: side by side stand prompts of one spread, easy ones apart from hard ones.
        order = np.lexsort((np.arange(drawn), self.history.mean(ids), known))
        plan = plan_prompts(spread, known, order, self.mini_batches, kept_size, floor, self.settings.rule, deal, sample)
        kept = np.flatnonzero(plan.kept)
        self.drawn, self.kept = self.drawn + drawn, self.kept + kept.size
        self.submission = Submission(
            rows=rows[kept],
            ids=[ids[k] for k in kept],
            pi=plan.pi[kept],
            mini_batch=plan.mini_batch[kept],
            plan=plan,
            spread=spread,
            known=known,
            keep=keep,
            tokens_per_prompt=max(self.tokens, 1.0) / self.prompts if self.prompts else 1.0,
            completions_per_prompt=self.group_size * (self.groups / self.prompts if self.prompts else 1.0),
            epoch=epoch,
        )
        columns = self.loader.fetch(rows[kept].tolist())
        self._group_share = np.ones(kept.size)
        if self._reads_rollout_n and ROLLOUT_N in columns:
            self._group_share = np.array([float(n) for n in columns[ROLLOUT_N]]) / self.group_size
        return columns

    # ---- after reward -----------------------------------------------------------------------------------------------

    def observe(
        self, step: int, full: FullBatch, prompt: NDArray[np.int64], magnitude: NDArray[np.float64]
    ) -> tuple[PromptsOfRows, dict[str, float]]:
        """Learn from the groups of a step, and say what its draw means for each completion.

        Args:
            step: of training.
            full: all n completions of the kept prompts.
            prompt: (n,) place of each completion's prompt in the submission.
            magnitude: (n,) estimated gradient norms, prompt weights left out.

        Returns:
            That, and `dppo/prompts/*`.
        """
        made = self.submission
        assert made is not None
        k = made.rows.size
        there = np.bincount(prompt, minlength=k) > 0
        tokens = np.bincount(prompt, full.length, minlength=k)
        energy = np.bincount(prompt, magnitude**2, minlength=k).astype(np.float64)
        kept = made.plan.kept.copy()
        kept[np.flatnonzero(kept)[~there]] = False
        pi, tokens, energy = made.pi[there], tokens[there], energy[there]
        share = self._group_share[there] * _outputs_of_a_session(full, prompt, k)[there]
        self.prompts = FORGETTING * self.prompts + float((1 / pi).sum())
        self.tokens = FORGETTING * self.tokens + float((tokens / pi).sum())
        self.groups = FORGETTING * self.groups + float((share / pi).sum())
        self.history.observe(made.ids, _rewards_by_prompt(full, prompt, k), step)
        code = np.unique(self._code[made.rows])
        names = [self._names[c] for c in code]
        self._is_known[code] = self.history.visits(names) >= self.settings.warmup_visits
        if self.settings.keep == AUTO and made.known.all() and energy.any():
            self.controller.observe(made.spread, self.settings.floor, self.settings.rule, kept, made.plan.pi, energy)
        figures = self._metrics(made, kept, pi, energy)
        of_rows = PromptsOfRows(
            weight=1 / made.pi[prompt],
            mini_batch=made.mini_batch[prompt] if made.plan.pruned else None,
            drawn=made.plan.drawn,
            tokens_per_prompt=made.tokens_per_prompt,
            completions_per_prompt=made.completions_per_prompt,
            inflation=figures["dppo/prompts/variance_inflation"],
        )
        return of_rows, figures

    def _metrics(
        self, made: Submission, kept: NDArray[np.bool_], pi: NDArray[np.float64], energy: NDArray[np.float64]
    ) -> dict[str, float]:
        plan, known = made.plan, made.known[kept]
        figures = {
            "drawn": float(plan.kept.size),
            "kept": float(plan.kept.sum()),
            "skipped": float((~plan.kept).sum()),
            "keep": made.keep,
            "unseen": float((~made.known).sum()),
            "pi_min": float(plan.pi.min()),
            "weight_max": float(plan.weight.max()),
            "variance_inflation": prompt_inflation(pi, energy),
            "skipped_energy": skipped_energy(pi, energy),
            "passes": self.stream.position / self.stream.rows,
            "total_drawn": float(self.drawn),
            "total_kept": float(self.kept),
            "total_skipped": float(self.drawn - self.kept),
            "remembered": float(len(self.history)),
        }
        if known.sum() > 1:
            figures["rank_correlation"] = rank_correlation(made.spread[kept][known], energy[known])
        return {f"dppo/prompts/{name}": value for name, value in figures.items()}

    # ---- the whole training -----------------------------------------------------------------------------------------

    def planned_steps(self, done: int) -> int:
        """Return the steps of the whole training as the present `keep` has it: all passes, nothing lost at their ends.

        From the last step before the annealed ones on, the plan stands. Made anew it would take their share off what is
        left to draw, and end them early.

        Args:
            done: steps that were taken.
        """
        goal, total = {"epochs": self.epochs, "anneal_fraction": self.anneal_fraction}, int(self._plan["steps"])
        if self._plan == goal | {"steps": total} and total - round(self.anneal_fraction * total) <= done < total:
            return total
        total = planned_steps(
            done,
            self.stream.position,
            self.epochs * self.stream.rows,
            self.settings.warmup_visits * self.stream.rows,
            self.batch_size,
            self._candidates(self.keep),
            self._candidates(self.keep, known_share=1.0),
            self.anneal_fraction,
        )
        self._plan = goal | {"steps": total}
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the history, and by which checksum its file is known; after `save`."""
        return {
            "stream": self.stream.state_dict(),
            "budget": self.controller.state_dict(),
            "plan": dict(self._plan),
            **{name: getattr(self, name) for name in SUMS},
            "history": {"file": HISTORY_FILE, "prompts": len(self.history), "checksum": self._checksum},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; `load` then reads the history.

        Raises:
            KeyError, ValueError, TypeError: figures that no run could have left.
        """
        sums = {name: kind(state[name]) for name, kind in SUMS.items()}
        if not all(0 <= value < np.inf for value in sums.values()) or sums["kept"] > sums["drawn"]:
            raise ValueError("the saved prompt level holds figures that no run leaves")
        plan = {name: state["plan"][name] for name in self._plan}
        self._checksum = int(state["history"]["checksum"])
        # Of another data set, or another order of its rows, the stream begins the pass anew.
        of_stream = self.stream.state_dict()
        self._interrupted = any(state["stream"][name] != of_stream[name] for name in ("rows", "fingerprint"))
        self.stream.load_state_dict(state["stream"])
        self.controller.load_state_dict(state["budget"])
        self._plan = plan
        for name, value in sums.items():
            setattr(self, name, value)

    def follow(self, steps: int) -> None:
        """Continue behind so many steps of verl's own loader, which ends each pass where no whole batch is left."""
        of_pass, rows = self.stream.rows // self.batch_size, self.stream.rows
        if of_pass:
            self.stream.position = steps // of_pass * rows + steps % of_pass * self.batch_size
        self.drawn = self.kept = steps * self.batch_size

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the history into a checkpoint folder, made where it is not there yet."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._checksum = save_history(Path(folder) / HISTORY_FILE, self.history)

    def load(self, folder: str | os.PathLike[str]) -> str:
        """Read the history that belongs to the state that was loaded.

        Returns:
            What of it is of use for this data set.

        Raises:
            ValueError: a file that is missing, damaged, or belongs to another state.
        """
        path = Path(folder) / HISTORY_FILE
        way_out = "delete it and dppo.json beside it to start their estimates afresh"
        try:
            checksum = load_history(path, self.history)
        except (OSError, ValueError) as error:
            raise ValueError(f"{error}; {way_out}") from error
        if checksum != self._checksum:
            raise ValueError(f"{path} and dppo.json beside it were not written together; {way_out}")
        self._is_known = self.history.visits(self._names) >= self.settings.warmup_visits
        matched = int((self.history.visits(self._names) > 0).sum())
        return (
            f"prompt history: {matched} of the {len(self._names)} prompts of the data set are remembered, "
            f"{len(self.history) - matched} that are remembered are not in it"
            + (
                "; rows came, went or changed their order, so the interrupted pass begins anew"
                if self._interrupted
                else ""
            )
        )


def _outputs_of_a_session(full: FullBatch, prompt: NDArray[np.int64], prompts: int) -> NDArray[np.float64]:
    """Return (prompts,) how many outputs a session of each prompt has in the mean; 1 where there is no session."""
    _, first = np.unique(full.session, return_index=True)
    sessions = np.bincount(prompt[first], minlength=prompts)
    return np.where(sessions > 0, np.bincount(prompt, minlength=prompts) / np.maximum(sessions, 1), 1.0)


def _rewards_by_prompt(full: FullBatch, prompt: NDArray[np.int64], prompts: int) -> NDArray[np.float64]:
    """Return (prompts, G) the reward of each session, NaN where there is none; outputs of a session share theirs."""
    _, first = np.unique(full.session, return_index=True)
    prompt_of_session, reward = prompt[first], full.reward[first]
    order = np.argsort(prompt_of_session, kind="stable")
    counts = np.bincount(prompt_of_session, minlength=prompts)
    column = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)
    rewards = np.full((prompts, max(int(counts.max(initial=0)), 1)), np.nan)
    rewards[prompt_of_session[order], column] = reward[order]
    return rewards
