"""How many weights a token meets in a model, and what a query-key pair is multiplied with, from its config alone."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

# Types of language models whose computation these sizes describe. The tests compare them with counts.
GATED = (
    "llama mistral ministral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_vl_text qwen2_5_vl "
    "qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text gemma gemma2 gemma3_text vaultgemma deepseek_v2 deepseek_v3 youtu "
    "dots1 glm glm4 glm4v_text glm4_moe solar_open phi3 phimoe olmo olmo2 olmo3 olmoe flex_olmo gpt_oss granite "
    "granitemoe minimax_m2 cohere cohere2 exaone4 ernie4_5 hunyuan_v1_dense seed_oss smollm3 stablelm hy_v3 "
    "glm4_moe_lite mellum"
)
UNGATED = "apertus arcee nemotron phi starcoder2"
MODEL_TYPES = frozenset(f"{GATED} {UNGATED}".split())
ROUTED_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Every how many layers one attends to everything, where a config of older form leaves that to the model; None: none.
FULL_ATTENTION_EVERY = {
    "gemma2": 2,
    "gemma3_text": 6,
    "cohere2": 4,
    "ministral3": None,
    "mistral": None,
    "mixtral": None,
    "phi3": None,
    "phimoe": None,
    "qwen3_moe": None,
    "starcoder2": None,
}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes that a forward pass depends on.

    Attributes:
        weights: number of weights that a token is multiplied with, LM head included.
        pair: multiplications of one query-key pair in one layer: scores, and the mean of the values.
        windows: each layer's sliding window in tokens, None for full attention.
    """

    weights: int
    pair: int
    windows: tuple[int | None, ...]


def read_sizes(hf_config: Any) -> ModelSizes:
    """Read a config: see `SequenceCost.from_config`."""
    config = _TextConfig(hf_config)
    layers, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    latent = config.get("kv_lora_rank") is not None
    projections, pair = _latent_attention(config, hidden) if latent else _attention(config, hidden)
    mlp = sum(_mlp(config, hidden, layer) for layer in range(layers))
    return ModelSizes(hidden * config.size("vocab_size") + layers * projections + mlp, pair, _windows(config, layers))


class _TextConfig:
    """The fields of a language model's config, and one way to say that they cannot be used."""

    def __init__(self, hf_config: Any) -> None:
        self.fields = hf_config
        while (inner := self.get("text_config")) is not None:
            self.fields = inner
        self.model_type = self.get("model_type")
        if self.model_type is not None and self.model_type not in MODEL_TYPES:
            self.fail(f"model_type is not one of {', '.join(sorted(MODEL_TYPES))}")

    def get(self, name: str) -> Any:
        """Return a field, None where there is none."""
        return self.fields.get(name) if isinstance(self.fields, Mapping) else getattr(self.fields, name, None)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first field that is given, else the default; a positive integer, or 0 where that is the default.

        Raises:
            ValueError: there is neither, or no such number.
        """
        value = next((value for value in map(self.get, names) if value is not None), default)
        if value is None:
            self.fail(f"the config has no {' or '.join(names)}")
        try:
            size = operator.index(value)
        except TypeError:
            size = -1
        if size < 0 or (size == 0 and default != 0) or isinstance(value, bool):
            self.fail(f"{' or '.join(names)} must be a positive integer, got {value!r}")
        return size

    def fail(self, reason: str) -> NoReturn:
        """Raise what is wrong, and the way out."""
        raise ValueError(
            f"the FLOPs of a sequence cannot be read from the config of model_type={self.model_type!r}: {reason}. "
            "algorithm.dppo.balance.cost=tokens balances by tokens instead"
        )


def _attention(config: _TextConfig, hidden: int) -> tuple[int, int]:
    """Return the weights of a layer's projections, and the multiplications of one query-key pair in it."""
    heads = config.size("num_attention_heads")
    key_heads = config.size("num_key_value_heads", default=heads)
    head = config.size("head_dim", default=hidden // heads)
    return hidden * head * (2 * heads + 2 * key_heads), heads * 2 * head


def _latent_attention(config: _TextConfig, hidden: int) -> tuple[int, int]:
    """Return the same for multi-head latent attention as it is trained: keys and values are expanded to all heads."""
    heads, rank = config.size("num_attention_heads"), config.size("kv_lora_rank")
    rope, nope, value = (config.size(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    queries = heads * (nope + rope)
    direct = config.get("q_lora_rank") is None
    query_weights = hidden * queries if direct else config.size("q_lora_rank") * (hidden + queries)
    key_value_weights = hidden * (rank + rope) + rank * heads * (nope + value)
    return query_weights + key_value_weights + heads * value * hidden, queries + heads * value


def _mlp(config: _TextConfig, hidden: int, layer: int) -> int:
    """Return the weights that a token meets in a layer's MLP: gate, up and down of every expert that it goes to."""
    if not _is_sparse(config, layer):
        matrices = 2 if config.model_type in UNGATED.split() else 3
        return matrices * hidden * config.size("intermediate_size")
    width = config.size("moe_intermediate_size", "intermediate_size")
    experts = config.size("num_experts_per_tok") + config.size("n_shared_experts", "num_shared_experts", default=0)
    gated = config.size("shared_expert_intermediate_size", default=0)
    return hidden * (3 * (experts * width + gated) + config.size(*ROUTED_EXPERTS) + (gated > 0))


def _is_sparse(config: _TextConfig, layer: int) -> bool:
    if config.size(*ROUTED_EXPERTS, default=0) == 0 or layer in (config.get("mlp_only_layers") or ()):
        return False
    if (kinds := config.get("mlp_layer_types")) is not None:
        return bool(kinds[layer] == "sparse")
    if layer < config.size("first_k_dense_replace", default=0):
        return False
    step, frequency = config.size("decoder_sparse_step", default=1), config.size("moe_layer_freq", default=1)
    return (layer + 1) % step == 0 and layer % frequency == 0


def _windows(config: _TextConfig, layers: int) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = _implied_kinds(config, layers)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        config.fail(f"layer_types must be {layers} of full_attention and sliding_attention, got {list(kinds)}")
    return tuple(config.size("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


def _implied_kinds(config: _TextConfig, layers: int) -> list[str]:
    """Return what the layers attend to where the config does not say it one by one."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    if config.get("sliding_window_pattern") is None and config.model_type not in FULL_ATTENTION_EVERY:
        config.fail("sliding_window is given, and without layer_types it is not known which layers have it")
    implied = FULL_ATTENTION_EVERY.get(config.model_type) or layers + 1
    every = config.size("sliding_window_pattern", default=implied)
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
