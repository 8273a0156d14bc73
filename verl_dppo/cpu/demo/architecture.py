"""The demo policy: a Qwen2 of 0.66 million parameters."""

from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM


def build_model(tokenizer: PreTrainedTokenizerBase, **overrides: object) -> Qwen2ForCausalLM:
    """Return an untrained model; torch's global seed decides its weights."""
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        # Two, so that tensor parallelism over two ranks has a head each.
        "num_key_value_heads": 2,
        # Near 1/sqrt(hidden_size). Qwen's 0.02 suits wide models and starts this one much more slowly.
        "initializer_range": 0.06,
    }
    config = Qwen2Config(
        **(shape | overrides),
        # verl masks the logits at and above len(tokenizer) in vLLM: a larger vocabulary would bias its log-probs.
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)
