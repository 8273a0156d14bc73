"""A byte-level tokenizer and a Qwen2 of a few thousand parameters, made on the fly."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
EOS = 2
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    # Byte-level without merges: verl wants "\n" to be one token, and transformers re-tokenizes Qwen2's at byte level.
    vocabulary = {token: i for i, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    wrapped.chat_template = CHAT
    return wrapped


def config(**changes) -> Qwen2Config:
    settings = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    return Qwen2Config(**{**settings, **changes})


def save_model(folder: Path, **changes) -> None:
    torch.manual_seed(0)
    Qwen2ForCausalLM(config(**changes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def save_sums(path: Path, count: int) -> None:
    """Write prompts of different lengths as JSON lines, which verl reads like parquet."""
    rows = []
    for i in range(count):
        terms = [str((i * 7 + j) % 10) for j in range(2 + i % 3)]
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": "+".join(terms) + "="}],
                "reward_model": {"style": "rule", "ground_truth": str(sum(map(int, terms)))},
                "extra_info": {"index": i},
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
