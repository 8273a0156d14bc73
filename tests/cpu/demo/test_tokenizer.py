import pytest
from transformers import AutoTokenizer
from verl.utils import hf_tokenizer
from verl.utils.tokenizer.chat_template import extract_system_prompt_and_generation, initialize_turn_separator
from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

from verl_dppo.cpu.demo.architecture import build_model
from verl_dppo.cpu.demo.tokenizer import SPECIAL_TOKENS, build_tokenizer

CHAT = [{"role": "user", "content": "1 + 2 ="}]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The tokenizer as AutoTokenizer loads it beside a qwen2 config."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, num_hidden_layers=1).config.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["12 + 19 = 31\nanswer: 31", "  a\n\n\tb ", "caf\u00e9 \u2211 \U0001f600", ""])
def test_text_survives_the_round_trip_one_token_a_byte(loaded, text):
    ids = loaded.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert loaded.decode(ids) == text


def test_loading_changes_neither_ids_nor_size(loaded):
    built = build_tokenizer()
    text = loaded.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert len(loaded) == len(built) == 256 + len(SPECIAL_TOKENS)
    assert len(loaded) % 2 == 0
    assert loaded.encode(text) == built.encode(text)


def test_the_chat_template_is_chatml(loaded):
    text = loaded.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    ids = loaded.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == loaded.encode(text)


def test_special_tokens_are_skipped_when_decoding(loaded):
    ids = loaded.encode("<|im_start|>answer: 3<|im_end|><|endoftext|><|reserved|>")
    assert loaded.decode(ids, skip_special_tokens=True) == "answer: 3"


def test_pad_and_end_of_turn_differ(loaded):
    assert loaded.pad_token == "<|endoftext|>"
    assert loaded.eos_token == "<|im_end|>"


def test_verl_can_use_it(loaded, tmp_path):
    QwenContinuousTokenBuilder(loaded)
    newline = loaded.encode("\n")
    assert initialize_turn_separator(loaded) == newline
    system, generation = extract_system_prompt_and_generation(loaded)
    assert system == []
    assert loaded.decode(generation) == "<|im_start|>assistant\n"
    loaded.save_pretrained(tmp_path)
    assert len(hf_tokenizer(str(tmp_path))) == len(loaded)
