"""Pass rates of a policy at temperature 1, per prompt: is there something to learn, and for which prompts?

    python -m verl_dppo.cpu.demo.pass_rate --prompts 256 --samples 16 --seed 0 --out docs/demo-task.md

Without `--out` it prints the page only; `--model` measures another checkpoint.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.demo.task import DATA_SOURCE, compute_score, messages, unique_problems

MAX_RESPONSE_LENGTH = 192
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
TEMPLATE = """# The demo task

Chain sums of the `reasoning-gym` library, 2 to 6 terms of 1 or 2 digits, and a byte-level Qwen2 of 0.66 million
parameters. A supervised warm start has taught it the format and most of the arithmetic, and then, on data where 15 %
of the partial sums are wrong, to slip: reinforcement learning has mistakes to take away. One byte is one token. The
reward is 1 if reasoning-gym accepts the number on the last line of the response, `answer: N`, else 0.

    prompt      12 + 19 - 5 =
    response    12 + 19 = 31
                31 - 5                 (what is left, copied; about 30 % of the responses leave these lines out)
                31 - 5 = 26
                answer: 26

Training and validation problems are disjoint for all seeds: a hash of the expression decides the split, and the warm
start uses the training split only.

The shipped weights, `verl_dppo/cpu/demo/model/`, come from

    python -m verl_dppo.cpu.demo.warm_start --seed 0 --out verl_dppo/cpu/demo/model

and the rest of this page from

    {command}

## Before reinforcement learning

{prompts} validation problems, {per_prompt} responses each, temperature 1, at most 192 tokens. Mean pass rate
**{mean:.3f}**; {mixed:.0%} of the prompts have both right and wrong responses.

{histogram}

Response length in tokens: mean {length:.0f}, {quantiles}. The longest of {per_prompt} responses to a prompt is
{ratio:.1f} times as long as the shortest (median over prompts). {finished:.1%} of the responses end before the limit.

{terms}

{digits}
"""


@dataclass(frozen=True)
class Samples:
    """Completions of P prompts with S samples each; every array is (P, S)."""

    reward: np.ndarray
    length: np.ndarray
    """Response tokens, the end-of-turn token included."""
    finished: np.ndarray
    """Whether the response ended before the limit."""


@torch.no_grad()
def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[dict[str, str]]], samples: int
) -> torch.Tensor:
    """Sample `samples` responses per chat at temperature 1; returns token ids (len(prompts) * samples, length)."""
    # Two steps: `apply_chat_template` ignores the side of the padding.
    texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    chats = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    generated = model.generate(
        **chats,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        max_new_tokens=MAX_RESPONSE_LENGTH,
    )
    return generated[:, chats["input_ids"].shape[1] :]


def sample_rewards(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    entries: list[dict],
    samples: int,
    prompts_per_batch: int = 32,
) -> Samples:
    """Sample responses to held-out entries and score them."""
    rewards, lengths, finished = [], [], []
    for start in range(0, len(entries), prompts_per_batch):
        chunk = entries[start : start + prompts_per_batch]
        responses = complete(model, tokenizer, [messages(entry) for entry in chunk], samples)
        ended = (responses == tokenizer.eos_token_id).any(dim=1)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        truths = [entry["answer"] for entry in chunk for _ in range(samples)]
        rewards += [compute_score(DATA_SOURCE, text, truth) for text, truth in zip(texts, truths, strict=True)]
        lengths += (responses != tokenizer.pad_token_id).sum(dim=1).tolist()
        finished += ended.tolist()
    shape = (len(entries), samples)
    return Samples(*(np.asarray(values).reshape(shape) for values in (rewards, lengths, finished)))


def histogram(pass_rate: np.ndarray, bins: int = 10) -> str:
    """Return a Markdown table of prompts per pass-rate bin; 0 and 1 have rows of their own."""
    edges = np.linspace(0, 1, bins + 1)
    inner = pass_rate[(pass_rate > 0) & (pass_rate < 1)]
    rows = [("0", int((pass_rate == 0).sum()))]
    for low, high, count in zip(edges[:-1], edges[1:], np.histogram(inner, edges)[0], strict=True):
        rows.append((f"{low:.1f} - {high:.1f}", int(count)))
    rows.append(("1", int((pass_rate == 1).sum())))
    lines = [f"| {name} | {count} | {'#' * round(100 * count / len(pass_rate))} |" for name, count in rows]
    return "\n".join(["| pass rate | prompts | share, one # per percent |", "|---|---|---|", *lines])


def group_table(samples: Samples, entries: list[dict], key: str) -> str:
    """Return a Markdown table of the mean pass rate and length by a property of the problems."""
    values = np.asarray([entry["metadata"][key] for entry in entries])
    lines = [f"| {key.removeprefix('num_')} | prompts | pass rate | mean length |", "|---|---|---|---|"]
    for value in np.unique(values):
        chosen = values == value
        rate, length = samples.reward[chosen].mean(), samples.length[chosen].mean()
        lines.append(f"| {value} | {chosen.sum()} | {rate:.2f} | {length:.0f} |")
    return "\n".join(lines)


def report(samples: Samples, entries: list[dict], command: str) -> str:
    """Return the page that describes the task by these samples."""
    prompts, per_prompt = samples.reward.shape
    pass_rate = samples.reward.mean(axis=1)
    quantiles = ", ".join(f"{name} {np.quantile(samples.length, q):.0f}" for name, q in QUANTILES.items())
    ratio = np.median(samples.length.max(axis=1) / samples.length.min(axis=1))
    mixed = ((pass_rate > 0) & (pass_rate < 1)).mean()
    return TEMPLATE.format(
        command=command,
        prompts=prompts,
        per_prompt=per_prompt,
        mean=pass_rate.mean(),
        mixed=mixed,
        histogram=histogram(pass_rate),
        length=samples.length.mean(),
        quantiles=quantiles,
        ratio=ratio,
        finished=samples.finished.mean(),
        terms=group_table(samples, entries, "num_terms"),
        digits=group_table(samples, entries, "num_digits"),
    )


def main() -> None:
    """Sample from a policy on held-out problems, print the report and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="checkpoint folder (default: the shipped one)")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    entries = unique_problems("validation", arguments.seed, arguments.prompts)
    samples = sample_rewards(model, tokenizer, entries, arguments.samples)
    options = f"--prompts {arguments.prompts} --samples {arguments.samples} --seed {arguments.seed}"
    text = report(samples, entries, f"python -m verl_dppo.cpu.demo.pass_rate {options} --out docs/demo-task.md")
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
