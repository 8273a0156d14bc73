"""The cost of a sequence against PyTorch's FLOPs counter on small models, published sizes, and masks."""

import inspect

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_dppo.packing.cost import SequenceCost
from verl_dppo.packing.model_sizes import MODEL_TYPES

# Sizes all apart, so that no two of them can be taken for each other.
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 28,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "sliding_window": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
ROTATED_BY_SECTION = ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text")
# qwen2_vl and qwen2_5_vl are what the same models' configs are called where the text's fields stand on the top level.
COUNTED = sorted(MODEL_TYPES - {"qwen2_vl", "qwen2_5_vl"})
VARIANTS = {
    "deepseek_v3": [{"q_lora_rank": None}, {"first_k_dense_replace": 3}],
    "qwen3_moe": [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 2]}, {"use_sliding_window": True}],
    "qwen2_moe": [{"decoder_sparse_step": 2, "mlp_only_layers": [1]}],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 1}, {"num_key_value_heads": 4}],
    "hy_v3": [{"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}],
    "mixtral": [{"num_experts_per_tok": 3, "sliding_window": 5}],
    "gemma3_text": [{"sliding_window_pattern": 2}],
}
CASES = [(kind, change) for kind in COUNTED for change in [{}, *VARIANTS.get(kind, [])]]


def tiny_config(kind, change):
    config_class = CONFIG_MAPPING[kind]
    fields = set(inspect.signature(config_class).parameters) | set(config_class.attribute_map)
    sizes = {name: value for name, value in TINY.items() if name in fields}
    if kind in LATENT:
        sizes |= {"head_dim": TINY["qk_rope_head_dim"], "num_key_value_heads": TINY["num_attention_heads"]}
    if kind in ROTATED_BY_SECTION:
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return config_class(**sizes | change)


def counted(config, lengths):
    """What PyTorch counts in forward passes, each of one sequence.

    It sees no attention kernel on CPU and no grouped matrix product, so that everything runs as single products.
    """
    config._experts_implementation = "eager"
    has_head = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = (AutoModelForCausalLM if has_head else AutoModel).from_config(config, attn_implementation="eager").eval()
    flops = []
    for length in lengths:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.arange(length)[None] % 90 + 3, use_cache=False)
        head = 0 if has_head else 2 * length * config.hidden_size * config.vocab_size
        flops.append(counter.get_total_flops() + head)
    return np.array(flops, dtype=float)


@pytest.mark.parametrize(("kind", "change"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_every_model_type_costs_what_pytorch_counts(kind, change, record_property):
    torch.manual_seed(0)
    config, lengths = tiny_config(kind, change), [7, 50]
    deviation = SequenceCost.from_config(config, causal=False)(lengths) / counted(config, lengths) - 1
    record_property("deviation", np.abs(deviation).max())
    print(f"{kind} {change}: {deviation}")
    assert np.abs(deviation).max() < 1e-3
