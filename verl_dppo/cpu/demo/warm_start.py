"""Supervised warm start of the demo policy, from scratch and repeatable.

    python -m verl_dppo.cpu.demo.warm_start --seed 0 --out DIR

Short problems come first: copying and carrying are learned there at a fraction of the cost. The last phase adds slips
to the data, so that the policy makes mistakes at a known rate on problems that it can solve: that is what
reinforcement learning can take away within tens of steps, on prompts of every difficulty. The weights depend on the
seed, and in their last digits on the processor and the version of torch.
"""

import argparse
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from verl_dppo.cpu.demo.architecture import build_model
from verl_dppo.cpu.demo.solutions import sample_solution
from verl_dppo.cpu.demo.task import messages, problems
from verl_dppo.cpu.demo.tokenizer import build_tokenizer

IGNORED = -100
POOL = 16  # batches
# Keeps the problems apart from those of a run's training file, which small seeds draw.
SEED_OFFSET = 1_000_000
BRIEF_SHARE = 0.3
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Stage:
    """A number of steps on problems that may be easier than the task's."""

    steps: int
    easier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """Stages under one rise and fall of the learning rate, with optimizers of their own."""

    stages: tuple[Stage, ...]
    batch_size: int
    learning_rate: float
    fall: float = 0.0
    """Share of the learning rate that is gone at the end. Without a fall, stopping earlier needs no other change."""
    warm_up: int = 30
    slip_rate: float = 0.0
    """Probability that a partial sum of the data is wrong."""


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start; the defaults made the shipped weights."""

    seed: int = 0
    phases: tuple[Phase, ...] = (
        Phase(
            (Stage(800, {"max_terms": 2}), Stage(400, {"max_terms": 3}), Stage(300)),
            batch_size=64,
            learning_rate=4e-3,
            fall=0.9,
        ),
        Phase((Stage(1000),), batch_size=32, learning_rate=1.5e-3),
        Phase((Stage(300),), batch_size=32, learning_rate=1e-3, slip_rate=0.15),
    )
    threads: int = 1
    """One by default: a sum's rounding depends on the number of threads."""


def examples(seed: int, tokenizer: PreTrainedTokenizerBase, slip_rate: float = 0.0, **easier: int) -> Iterator[Batch]:
    """Yield token ids and labels of one chat each; only the response and its end-of-turn token carry labels."""
    rng = random.Random(seed)
    for entry in problems("train", SEED_OFFSET + seed, **easier):
        prompt = tokenizer.apply_chat_template(
            messages(entry), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        text = sample_solution(entry["metadata"]["expression"], BRIEF_SHARE, slip_rate, rng)
        response = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        yield torch.tensor(prompt + response), torch.tensor([IGNORED] * len(prompt) + response)


def batches(stream: Iterator[Batch], batch_size: int, pad_token_id: int, seed: int) -> Iterator[Batch]:
    """Yield right-padded ids and labels without end, each (batch, longest chat of the batch).

    Batches hold chats of similar length, sorted within a pool: half of a mixed batch would be padding.
    """
    order = random.Random(seed)
    while True:
        pool = sorted(islice(stream, POOL * batch_size), key=lambda example: len(example[0]))
        starts = list(range(0, len(pool), batch_size))
        order.shuffle(starts)
        for start in starts:
            ids, labels = zip(*pool[start : start + batch_size], strict=True)
            yield (
                pad_sequence(list(ids), batch_first=True, padding_value=pad_token_id),
                pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
            )


def phase_batches(phase: Phase, seed: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[Batch]:
    """Yield the batches of a phase's stages, one a step."""
    for stage in phase.stages:
        stream = examples(seed, tokenizer, phase.slip_rate, **stage.easier)
        yield from islice(batches(stream, phase.batch_size, tokenizer.pad_token_id, seed), stage.steps)


def build_optimizers(model: Qwen2ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, where it needs half of AdamW's steps, and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def learning_rate_factor(step: int, phase: Phase) -> float:
    """Return the share of the learning rate at `step`: a linear rise, then a linear fall."""
    total = sum(stage.steps for stage in phase.stages)
    return min((step + 1) / phase.warm_up, 1 - phase.fall * step / total)


def run_phase(model: Qwen2ForCausalLM, phase: Phase, steps: Iterator[Batch]) -> None:
    """Train `model` in place on the batches of one phase."""
    optimizers = build_optimizers(model, phase.learning_rate)
    schedules = [LambdaLR(optimizer, partial(learning_rate_factor, phase=phase)) for optimizer in optimizers]
    started = perf_counter()
    for step, (ids, labels) in enumerate(steps, start=1):
        # No attention mask: padding is on the right, where causal attention never looks at it.
        loss = model(input_ids=ids, labels=labels).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  {perf_counter() - started:.0f} s", flush=True)


def train(config: WarmStart, tokenizer: PreTrainedTokenizerBase, **shape: object) -> Qwen2ForCausalLM:
    """Return a model trained from scratch through all phases; `shape` overrides the architecture's."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    model = build_model(tokenizer, **shape).train()
    for seed, phase in enumerate(config.phases, start=config.seed):
        run_phase(model, phase, phase_batches(phase, seed, tokenizer))
    return model.eval()


def main() -> None:
    """Train with the default settings and save model and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    model = train(WarmStart(seed=arguments.seed), tokenizer)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
