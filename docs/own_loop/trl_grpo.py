"""DPPO in TRL's GRPOTrainer, by one of its hooks. Run it with `python docs/own_loop/trl_grpo.py`; it needs no GPU.

TRL scores a whole generation batch, shuffles it and cuts it into the micro-batches of its optimiser steps. The subclass
lets it do all of that, then drops completions inside each optimiser step and puts the weights on the advantages.
"""

import random
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.pruning import CompletionPlan, neyman_inclusion, plan_completions, score_magnitude, snake_order

MicroBatch = dict[str, Any]

EXACT_LOSSES = {
    "grpo": ("seq-mean-token-mean", True),
    "sapo": ("seq-mean-token-mean", True),
    "dr_grpo": ("seq-mean-token-sum-norm", True),
    "luspo": ("seq-mean-token-sum", True),
    "dapo": ("token-mean", False),
    "cispo": ("token-mean", False),
    "vespo": ("token-mean", False),
}
"""For each loss_type: how it scales the tokens of a completion, by verl's name for it, and whether it divides by the
rows of the micro-batch. Those that do not divide by `num_items_in_batch`, which TRL counts before anything is dropped.
All are linear in a positive factor on the advantage, with its sign held."""


def refuse_what_is_not_exact(trainer: GRPOTrainer, keep: float) -> None:
    """Raise ValueError for settings whose expected gradient would not be that of the full batch."""
    args = trainer.args
    slots, per_step = args.steps_per_generation, args.gradient_accumulation_steps
    refused = {
        f"keep={keep}: it must be in (0, 1]": not 0 < keep <= 1,
        f"loss_type={args.loss_type!r}: its denominator is not known to be one from before pruning; "
        f"use one of {', '.join(EXACT_LOSSES)}": args.loss_type not in EXACT_LOSSES,
        f"beta={args.beta}: the weight is on the advantage, which the KL term does not have; set beta=0": args.beta
        != 0,
        f"entropy_coef={args.entropy_coef}, use_adaptive_entropy={args.use_adaptive_entropy}: the bonus is a mean over "
        "the tokens that are left; turn both off": args.entropy_coef != 0 or args.use_adaptive_entropy,
        f"top_entropy_quantile={args.top_entropy_quantile}: the quantile would be that of the completions that are "
        "left; set it to 1": args.top_entropy_quantile < 1,
        f"use_liger_kernel={args.use_liger_kernel}: its loss was not checked; turn it off": args.use_liger_kernel,
        "the router loss of a mixture of experts is not weighted; set router_aux_loss_coef=0": trainer.aux_loss_enabled,
        f"num_iterations={args.num_iterations}: from the second pass on, the parameters depend on what was drawn; "
        "set it to 1": args.num_iterations > 1,
        f"steps_per_generation={slots} and gradient_accumulation_steps={per_step}: a multiple of the other is needed, "
        "or one draw would reach into two optimiser steps": bool(slots % per_step and per_step % slots),
    }
    for message, applies in refused.items():
        if applies:
            raise ValueError(message)


def joined(micro_batches: list[MicroBatch]) -> MicroBatch:
    """Return the micro-batches as one; what has no rows (`num_items_in_batch`) is the same in all of them."""
    if "num_images" in micro_batches[0]:
        raise ValueError("num_images: images are not stored one per row, and are not pruned here; use text alone")
    first = micro_batches[0]
    return {
        name: torch.cat([part[name] for part in micro_batches]) if value.dim() else value
        for name, value in first.items()
    }


def plan_of(
    batch: MicroBatch, mini_batch: NDArray[np.int64], multiple: int, mode: str, keep: float, rng: np.random.Generator
) -> CompletionPlan:
    """Plan the completions of a generation batch.

    Args:
        batch: its n rows, with advantages of full groups.
        mini_batch: (n,) the optimiser step of each row.
        multiple: the micro-batches of an optimiser step, which get equally many rows.
        mode: how the loss scales the tokens of a completion.
        keep: the share of the completion tokens with a gradient that is kept, in expectation.
        rng: decides the draw.
    """
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    length, advantage = mask.sum(1).double().cpu().numpy(), batch["advantages"].double().cpu().numpy()
    log_prob = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
    surprise = None
    if log_prob is not None:  # vLLM reports them; so does TRL where a generation serves several optimiser steps
        surprise = (torch.nan_to_num(1 - log_prob.double().exp()) ** 2 * mask).sum(1).cpu().numpy()
    magnitude = score_magnitude(advantage, length, surprise, mode)
    target = np.zeros_like(magnitude)
    for k in np.unique(mini_batch):
        mine = mini_batch == k
        target[mine] = neyman_inclusion(magnitude[mine], length[mine], keep)
    _, prompt = np.unique(batch["prompt_ids"].cpu().numpy(), axis=0, return_inverse=True)
    return plan_completions(
        slope=magnitude / np.sqrt(np.maximum(length, 1.0)),
        target_pi=target,
        mini_batch=mini_batch,
        order=snake_order(magnitude, advantage, prompt.ravel()),
        length=length,
        advantage=advantage,
        mini_batches=int(mini_batch.max()) + 1,
        multiple=multiple,
        floor=keep / 4,
        design="pivotal",
        rng=rng,
    )


def prune(
    micro_batches: list[MicroBatch], per_step: int, loss_type: str, keep: float, rng: np.random.Generator
) -> list[MicroBatch]:
    """Return as many micro-batches, each with its share of the completions that are kept of its optimiser step.

    Args:
        micro_batches: of a generation, in the order in which they are trained on, each with equally many rows.
        per_step: how many of them an optimiser step takes.
        loss_type: one of EXACT_LOSSES.
        keep: see `plan_of`.
        rng: decides the draw.
    """
    mode, divides_by_rows = EXACT_LOSSES[loss_type]
    batch = joined(micro_batches)
    before = len(batch["advantages"]) // len(micro_batches)
    mini_batch = np.arange(len(batch["advantages"])) // (before * per_step)
    plan = plan_of(batch, mini_batch, per_step, mode, keep, rng)
    after = plan.rows_per_mini_batch // per_step
    # A mean over `after` rows becomes the sum over them divided by the rows there were before.
    factor = plan.weight * (after / before if divides_by_rows else 1.0)
    batch["advantages"] = batch["advantages"] * torch.as_tensor(factor).to(batch["advantages"])
    parts = [torch.as_tensor(part) for rows in plan.rows for part in np.split(rows, per_step)]
    return [{name: value[part] if value.dim() else value for name, value in batch.items()} for part in parts]


class PrunedGRPOTrainer(GRPOTrainer):
    """GRPOTrainer that trains on some of its completions, with the expected gradient of all of them."""

    def __init__(self, *args: Any, keep: float = 0.6, **kwargs: Any) -> None:
        """Take GRPOTrainer's arguments, and the share of completion tokens to keep.

        Raises:
            ValueError: settings with which the gradient would be biased.
        """
        super().__init__(*args, **kwargs)
        refuse_what_is_not_exact(self, keep)
        self.keep = keep

    def _prepare_inputs(self, generation_batch: Any) -> MicroBatch:
        """Let TRL generate, score, shuffle and cut, then prune what it is about to train on."""
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is buffered:  # the next micro-batch of a generation, or an evaluation
            return inputs
        slots = self.args.steps_per_generation
        per_step = min(self.args.gradient_accumulation_steps, slots)
        rows = sum(len(part["advantages"]) for part in self._buffered_inputs)
        self._buffered_inputs = prune(self._buffered_inputs, per_step, self.loss_type, self.keep, self._generator())
        kept = sum(len(part["advantages"]) for part in self._buffered_inputs)
        self._metrics["train"]["dppo/kept_rows"].append(kept / rows)
        return self._buffered_inputs[self._step % slots]

    def _generator(self) -> np.random.Generator:
        """Return the generator of this generation's draw, its own on every process."""
        place = (self.accelerator.process_index, self.state.global_step, self._step)
        return np.random.default_rng([self.args.seed, *place])


def sums(count: int, seed: int = 0) -> Dataset:
    """Return sums of two numbers, of which the demo's policy gets about half right."""
    rng = random.Random(seed)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{a} + {b} ="}], "total": a + b} for a, b in pairs]
    )


def is_right(completions: list[list[dict[str, str]]], total: list[int], **_: Any) -> list[float]:
    """Reward a completion that ends with the right answer."""
    return [float(c[0]["content"].endswith(f"answer: {t}")) for c, t in zip(completions, total, strict=True)]


def main() -> None:
    """Train the demo's policy for three optimiser steps of 32 completions."""
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=64,
            loss_type="dapo",
            learning_rate=1e-4,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = PrunedGRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL_FOLDER),
            processing_class=AutoTokenizer.from_pretrained(MODEL_FOLDER),
            reward_funcs=is_right,
            args=args,
            train_dataset=sums(64),
            keep=0.5,
        )
        trainer.train()
    for log in trainer.state.log_history:
        if "reward" in log:
            print(f"step {log['step']}: reward {log['reward']:.3f}, trained on {log['dppo/kept_rows']:.0%} of 32 rows")


if __name__ == "__main__":
    main()
