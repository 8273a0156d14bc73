"""The cost of a sequence against PyTorch's FLOPs counter on small models, published sizes, and masks."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    Gemma3Config,
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen3VLMoeConfig,
)
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
    "v_head_dim": 18,
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


def model_of(config):
    """The model, and whether it has a head."""
    config._experts_implementation = "eager"
    has_head = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if has_head else AutoModel
    return auto.from_config(config, attn_implementation="eager").eval(), has_head


def counted(config, lengths):
    """What PyTorch counts in forward passes, each of one sequence.

    It sees no attention kernel on CPU and no grouped matrix product, so that everything runs as single products.
    """
    model, has_head = model_of(config)
    flops = []
    for length in lengths:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.arange(length)[None] % 90 + 3, use_cache=False)
        head = 0 if has_head else 2 * length * config.hidden_size * config.vocab_size
        flops.append(counter.get_total_flops() + head)
    return np.array(flops, dtype=float)


@pytest.mark.parametrize(("kind", "change"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_every_model_type_costs_what_pytorch_counts(kind, change):
    torch.manual_seed(0)
    config, lengths = tiny_config(kind, change), [7, 50]
    cost = SequenceCost.from_config(config, causal=False)
    deviation = cost(lengths) / counted(config, lengths) - 1
    print(f"{kind} {change}: {np.abs(deviation).max():.4%}")
    # What is left are the angles of the rotary embedding, which the models compute by a matrix product.
    assert np.abs(deviation).max() < 5e-4
    assert SequenceCost.from_config(config.to_dict(), causal=False) == cost


WINDOWED = [case for case in CASES if getattr(tiny_config(*case), "sliding_window", None)]


@pytest.mark.parametrize(("kind", "change"), WINDOWED, ids=lambda value: str(value).replace(" ", ""))
def test_the_pairs_are_those_that_the_layers_of_the_model_attend_to(kind, change):
    torch.manual_seed(0)
    config, length = tiny_config(kind, change), 30
    model, _ = model_of(config)
    with torch.no_grad():
        weights = model(input_ids=torch.arange(length)[None] + 3, use_cache=False, output_attentions=True).attentions
    attended = sum(int((layer[0, 0] > 0).sum()) for layer in weights)
    cost = SequenceCost.from_config(config)
    per_pair = sum(flops for flops, _ in cost.attention) / config.num_hidden_layers
    assert cost([length])[0] == pytest.approx(cost.per_token * length + per_pair * attended, rel=1e-12)


def test_some_models_mix_windows_and_some_share_one():
    windows = {kind: {w for _, w in SequenceCost.from_config(tiny_config(kind, {})).attention} for kind in COUNTED}
    assert windows["mistral"] == windows["mixtral"] == {8}
    assert windows["gemma2"] == windows["gpt_oss"] == {8, None}
    assert windows["qwen2"] == windows["qwen3_moe"] == windows["llama"] == {None}


# ---- configs as they are found --------------------------------------------------------------------------------------


QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_4B = QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
QWEN3_32B = QWEN3 | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
QWEN3_235B_A22B = QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Parameters that a token meets, in billions, as published; and how often the size of the embedding must be added to
# have the head and not the embedding: Qwen3's dense models are given without both, its large one with both.
PUBLISHED = [(QWEN3_4B, 3.6, 1), (QWEN3_32B, 31.2, 1), (QWEN3_235B_A22B, 22.2, -1), (DEEPSEEK_V3, 36.6, 0)]


@pytest.mark.parametrize(("fields", "billions", "embeddings"), PUBLISHED, ids=["4B", "32B", "235B-A22B", "DeepSeek-V3"])
def test_a_token_costs_two_flops_for_each_published_active_parameter(fields, billions, embeddings):
    active = billions * 1e9 + embeddings * fields["vocab_size"] * fields["hidden_size"]
    assert SequenceCost.from_config(fields).per_token == pytest.approx(2 * active, rel=0.015)


def test_experts_in_every_other_layer_only_leave_the_rest_dense():
    dense, experts = (
        SequenceCost.from_config(DEEPSEEK_V3 | {"num_hidden_layers": 1, "first_k_dense_replace": first}).per_token
        for first in (1, 0)
    )
    alternating = DEEPSEEK_V3 | {"moe_layer_freq": 2, "num_hidden_layers": 5, "first_k_dense_replace": 1}
    head = 2 * 129280 * 7168
    expected = head + 3 * (dense - head) + 2 * (experts - head)
    assert SequenceCost.from_config(alternating).per_token == pytest.approx(expected, rel=1e-12)


def test_attention_of_long_sequences_weighs_what_head_sizes_say():
    assert SequenceCost.from_config(QWEN3_4B).attention == ((4.0 * 32 * 128 * 36, None),)
    assert SequenceCost.from_config(DEEPSEEK_V3).attention == ((2.0 * 128 * (128 + 64 + 128) * 61, None),)


@pytest.mark.parametrize("fields", [QWEN3_4B, QWEN3_32B, QWEN3_235B_A22B, DEEPSEEK_V3])
def test_a_mapping_and_an_object_and_an_unnamed_model_read_alike(fields):
    unnamed = {name: value for name, value in fields.items() if name != "model_type"}
    assert SequenceCost.from_config(fields) == SequenceCost.from_config(SimpleNamespace(**fields))
    assert SequenceCost.from_config(fields) == SequenceCost.from_config(unnamed)


@pytest.mark.parametrize(
    ("config_class", "kind"),
    [
        (Qwen2_5_VLConfig, "qwen2_5_vl_text"),
        (Qwen3VLMoeConfig, "qwen3_vl_moe_text"),
        (Gemma3Config, "gemma3_text"),
        (LlavaConfig, "llama"),
    ],
)
def test_a_multi_modal_config_costs_what_its_language_model_does(config_class, kind):
    text = tiny_config(kind, {})
    whole = config_class(text_config=text.to_dict())
    assert (
        SequenceCost.from_config(whole) == SequenceCost.from_config(text) == SequenceCost.from_config(whole.to_dict())
    )


def test_a_multi_modal_config_of_the_flat_form_is_read_as_well():
    flat = tiny_config("qwen2_5_vl_text", {}).to_dict() | {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}
    assert SequenceCost.from_config(flat) == SequenceCost.from_config(tiny_config("qwen2_5_vl_text", {}))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "cohere2", "mistral", "qwen3", "qwen3_moe"])
def test_a_config_that_leaves_the_kind_of_its_layers_to_the_model_is_read_as_the_model_does(kind):
    config = tiny_config(kind, {"num_hidden_layers": 36})
    older = {name: value for name, value in config.to_dict().items() if name not in ("layer_types", "sliding_window")}
    older["sliding_window"] = 8
    assert SequenceCost.from_config(older) == SequenceCost.from_config(config)


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
@pytest.mark.parametrize("windows", [{}, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}])
def test_a_config_without_the_kinds_of_its_layers_costs_what_it_should_or_is_refused(kind, windows):
    config = tiny_config(kind, windows)
    older = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    try:
        found = SequenceCost.from_config(older)
    except ValueError as refusal:
        assert "without layer_types" in str(refusal)  # noqa: PT017 (either is right)
    else:
        assert found == SequenceCost.from_config(config)


@pytest.mark.parametrize("every", [2, 3])
def test_a_pattern_of_windows_is_read(every):
    config = tiny_config("gemma3_text", {"sliding_window_pattern": every, "num_hidden_layers": 7})
    older = config.to_dict() | {"layer_types": None, "sliding_window_pattern": every}
    assert SequenceCost.from_config(older) == SequenceCost.from_config(config)


# ---- the cost as a function of length -------------------------------------------------------------------------------


def brute_force(length, window):
    query, key = np.indices((length, length))
    return ((key <= query) & (key > query - (window or length))).sum()


@pytest.mark.parametrize("window", [None, 1, 2, 7, 30, 31])
def test_the_pairs_are_exactly_those_of_the_mask(window):
    lengths = np.arange(31)
    pairs = SequenceCost(per_token=0.0, attention=((1.0, window),))(lengths)
    assert pairs.tolist() == [brute_force(length, window) for length in lengths]


def test_all_pairs_are_counted_where_the_mask_saves_nothing():
    lengths = np.array([1, 9, 100])
    full = SequenceCost(per_token=5.0, attention=((3.0, None), (2.0, 4)), causal=False)
    assert full(lengths).tolist() == (5 * lengths + 5 * lengths**2).tolist()
    causal, whole = (SequenceCost.from_config(QWEN3_4B, causal=causal) for causal in (True, False))
    saved = causal.attention[0][0] * lengths * (lengths - 1) / 2
    assert whole(lengths) - causal(lengths) == pytest.approx(saved)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "deepseek_v3", "mistral"])
def test_a_longer_sequence_costs_more_and_every_token_at_least_as_much_as_the_one_before(kind):
    cost = SequenceCost.from_config(tiny_config(kind, {}))(np.arange(200))
    assert cost[0] == 0
    assert (np.diff(cost) > 0).all()
    assert (np.diff(cost, 2) >= 0).all()


def test_tokens_cost_their_number():
    cost = SequenceCost.tokens()(np.array([0, 3, 32768], dtype=np.int32))
    assert cost.dtype == np.float64
    assert cost.tolist() == [0, 3, 32768]
    assert SequenceCost.tokens()(np.array([], dtype=int)).shape == (0,)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [[-1], [2.5], [np.nan], [np.inf], 7, [[1, 2]], ["a"], [True], [None]], ids=lambda value: str(value)
)
def test_lengths_that_are_none_are_refused(length):
    with pytest.raises(ValueError, match="length must be"):
        SequenceCost.tokens()(length)


@pytest.mark.parametrize("flops", [-1.0, float("nan"), float("inf")])
def test_figures_that_no_model_has_are_refused(flops):
    with pytest.raises(ValueError, match="FLOPs must be finite"):
        SequenceCost(per_token=flops)
    with pytest.raises(ValueError, match="FLOPs must be finite"):
        SequenceCost(per_token=1.0, attention=((flops, None),))
    with pytest.raises(ValueError, match="window must be at least 1"):
        SequenceCost(per_token=1.0, attention=((1.0, 0),))


NEEDED = {
    "qwen3": ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
    "qwen3_moe": ["num_experts_per_tok", "moe_intermediate_size or intermediate_size"],
    "deepseek_v3": ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"],
    "gemma2": ["sliding_window"],
}


@pytest.mark.parametrize(("kind", "names"), [(kind, names) for kind in NEEDED for names in NEEDED[kind]])
def test_a_missing_field_is_named_with_the_model_type_and_the_way_out(kind, names):
    fields = tiny_config(kind, {}).to_dict() | dict.fromkeys(names.split(" or "))
    with pytest.raises(ValueError, match=f"'{kind}': the config has no {names}.*balance.cost=tokens"):
        SequenceCost.from_config(fields)


@pytest.mark.parametrize("value", [0, -2, 2.0, "64", True, [64, 64]])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match=r"'qwen3': hidden_size must be a positive integer.*balance.cost=tokens"):
        SequenceCost.from_config(QWEN3_4B | {"hidden_size": value})


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "mamba", "llama4", "gpt2", "gemma3n", "glm_moe_dsa"])
def test_a_model_type_that_computes_otherwise_is_refused(kind):
    with pytest.raises(ValueError, match=r"model_type='\w+': model_type is not one of .*qwen3,.*balance.cost=tokens"):
        SequenceCost.from_config(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize(
    "kinds", [["linear_attention"] * 36, ["full_attention"] * 35, ["mamba", "full_attention"] * 18]
)
def test_layers_of_another_kind_are_refused(kinds):
    with pytest.raises(ValueError, match=r"'qwen3': layer_types must be 36 of full_attention.*balance.cost=tokens"):
        SequenceCost.from_config(QWEN3_4B | {"layer_types": kinds})


@pytest.mark.parametrize("config", [None, {}, SimpleNamespace(), 3])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ValueError, match="the config has no num_hidden_layers"):
        SequenceCost.from_config(config)
