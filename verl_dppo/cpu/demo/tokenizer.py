"""A tokenizer whose tokens are the 256 bytes, and the ChatML template of Qwen."""

from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The fourth makes the vocabulary even, which tensor parallelism over two ranks needs.
SPECIAL_TOKENS = [PAD, START, END, "<|reserved|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Return the byte-level tokenizer.

    transformers gives every checkpoint of a `qwen2` config this class with its own pre-tokenizer, whatever the files
    say. Building on it from the start makes what `AutoTokenizer` loads equal to what the warm start used.
    """
    tokens = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, SPECIAL_TOKENS[3]],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
