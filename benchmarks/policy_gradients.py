"""Makes data for benchmarks/retention.py: the exact policy gradients of one batch of the demo task.

    python benchmarks/policy_gradients.py --seed 0 --out runs/policy-gradients/seed-0.npz

64 prompts x 16 completions at temperature 1. The seed decides the prompts, the completions and the policy: the demo's
shipped policy after a few updates on other prompts, so that every seed measures another one, and the shipped policy
is the older policy of `reward_previous_epoch`. About two minutes and 5 GB.

The file holds, for P prompts with G completions each and n = P * G rows, row = G * prompt + completion:

    reward, response_length             (P, G)
    sum_sq_one_minus_p                  (P, G) sum over the response tokens of (1 - p_t)^2
    prompt_length                       (P,)
    reward_previous_epoch               (P, G) rewards of completions of the older policy
    score_gram                          (n, n) inner products of the score functions, sum_t grad log p_t
    token, token_probability            (T,) response tokens of all rows and their probabilities p_t
    row                                 (n + 1,) row i owns the tokens row[i]:row[i + 1]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.demo.pass_rate import MAX_RESPONSE_LENGTH
from verl_dppo.cpu.demo.task import DATA_SOURCE, compute_score, messages, unique_problems
from verl_dppo.cpu.generation import Completion, Generator
from verl_dppo.cpu.sampling import SamplingRule, uniforms

PROMPTS_PER_UPDATE, COMPLETIONS_PER_UPDATE, LEARNING_RATE = 16, 8, 3e-4
COLUMNS = 16384  # parameters per block of the Gram matrix


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, entries: Sequence[dict], count: int, seed: int, key: str
) -> list[Completion]:
    """Sample `count` completions of each entry at temperature 1, in the order of the entries."""
    completions = []
    for entry in entries:
        text = tokenizer.apply_chat_template(messages(entry), add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text)["input_ids"]
        for index in range(count):
            stream = uniforms(seed, f"{key}/{index}", prompt, MAX_RESPONSE_LENGTH)
            completions.append(Completion(prompt, SamplingRule(), stream))
    generator = Generator(model, [tokenizer.eos_token_id], len(completions))
    generator.add(completions)
    while generator.active:
        generator.step()
    return completions


def rewards(
    tokenizer: PreTrainedTokenizerBase, entries: Sequence[dict], completions: Sequence[Completion]
) -> np.ndarray:
    """Return the task's rewards, (entries, completions of each)."""
    texts = tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
    count = len(completions) // len(entries)
    scores = [compute_score(DATA_SOURCE, text, entries[index // count]["answer"]) for index, text in enumerate(texts)]
    return np.asarray(scores, dtype=np.float32).reshape(len(entries), count)


def token_log_probs(model: PreTrainedModel, completion: Completion) -> torch.Tensor:
    """Return the log-probabilities of the completion's tokens, (T,), with their graph."""
    ids = torch.tensor([completion.prompt + completion.tokens])
    logits = model(input_ids=ids[:, :-1], logits_to_keep=len(completion.tokens)).logits[0]
    return logits.log_softmax(-1).gather(1, ids[0, -len(completion.tokens) :, None])[:, 0]


def update(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, entries: Sequence[dict], seed: int) -> None:
    """Train for one pass over the entries: GRPO with the token-mean loss and Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for start in range(0, len(entries), PROMPTS_PER_UPDATE):
        chunk = entries[start : start + PROMPTS_PER_UPDATE]
        completions = sample(model, tokenizer, chunk, COMPLETIONS_PER_UPDATE, seed, f"update/{start}")
        reward = rewards(tokenizer, chunk, completions).astype(np.float64)
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + 1e-6)
        tokens = sum(len(c.tokens) for c in completions)
        optimizer.zero_grad()
        for factor, completion in zip(advantage.ravel().tolist(), completions, strict=True):
            if factor:
                (token_log_probs(model, completion).sum() * (-factor / tokens)).backward()
        optimizer.step()


def scores(model: PreTrainedModel, completions: Sequence[Completion]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the score functions (n, parameters), rounded to float32, and the probabilities of the tokens."""
    parameters = list(model.parameters())
    gradients = np.empty((len(completions), sum(p.numel() for p in parameters)), dtype=np.float32)
    probabilities: list[np.ndarray] = []
    seen: dict[tuple[int, ...], int] = {}
    for index, completion in enumerate(completions):
        first = seen.setdefault((*completion.prompt, -1, *completion.tokens), index)
        if first < index:
            gradients[index] = gradients[first]
            probabilities.append(probabilities[first])
            continue
        log_probs = token_log_probs(model, completion)
        parts = torch.autograd.grad(log_probs.sum(), parameters)
        gradients[index] = torch.cat([part.reshape(-1) for part in parts]).numpy()
        probabilities.append(log_probs.detach().exp().numpy())
    return gradients, probabilities


def gram(rows: np.ndarray) -> np.ndarray:
    """Return rows @ rows.T, accumulated in float64 over blocks of columns."""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], COLUMNS):
        block = rows[:, start : start + COLUMNS].astype(np.float64)
        total += block @ block.T
    return total


def measure(seed: int, prompts: int, completions: int, updates: int) -> dict[str, np.ndarray]:
    """Return the arrays of the file, by name."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float64).eval()
    entries = unique_problems("train", seed, prompts + updates * PROMPTS_PER_UPDATE)
    measured, others = entries[:prompts], entries[prompts:]
    previous = sample(model, tokenizer, measured, completions, seed, "previous")
    update(model, tokenizer, others, seed)
    current = sample(model, tokenizer, measured, completions, seed, "current")
    gradients, probabilities = scores(model, current)
    shape = (prompts, completions)
    length = np.array([len(c.tokens) for c in current], dtype=np.int32)
    return {
        "reward": rewards(tokenizer, measured, current),
        "response_length": length.reshape(shape),
        "sum_sq_one_minus_p": np.array([((1 - p) ** 2).sum() for p in probabilities], dtype=np.float32).reshape(shape),
        "prompt_length": np.array([len(c.prompt) for c in current[::completions]], dtype=np.int32),
        "reward_previous_epoch": rewards(tokenizer, measured, previous),
        "score_gram": gram(gradients).astype(np.float32),
        "token": np.concatenate([c.tokens for c in current]).astype(np.int32),
        "token_probability": np.concatenate(probabilities).astype(np.float32),
        "row": np.concatenate([[0], np.cumsum(length)]).astype(np.int64),
    }


def main() -> None:
    """Make one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--updates", type=int, default=8, help="steps from the shipped to the measured policy")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arrays = measure(arguments.seed, arguments.prompts, arguments.completions, arguments.updates)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **arrays)
    reward, length = arrays["reward"], arrays["response_length"]
    informative = np.ptp(reward, axis=1) > 0
    rates = f"pass rate {reward.mean():.3f} (older policy {arrays['reward_previous_epoch'].mean():.3f})"
    print(f"{arguments.out}: {rates}, mean length {length.mean():.0f}, informative groups {informative.mean():.0%}")


if __name__ == "__main__":
    main()
