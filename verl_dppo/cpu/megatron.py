"""verl's Megatron engine on a CPU: megatron-core without transformer-engine, fed through the vanilla mbridge.

`register()` costs nothing: all waits until verl builds a Megatron engine, that is `actor.strategy=megatron`. Then
megatron-core is told that CUDA is the CPU (megatron_cuda.py), and the three things below change.
"""

import functools
import os
from types import ModuleType
from typing import Any

import torch

from verl_dppo.post_import import when_imported

_LAYER = "model.layers.{layer_number}."


def register() -> None:
    """Prepare a process for the first Megatron engine that it builds."""
    # Compiling megatron-core's small functions takes a C++ compiler, and longer than they run.
    when_imported("megatron.core.jit", lambda jit: jit.disable_jit_fuser())
    when_imported("verl.workers.engine.megatron.transformer_impl", _prepare_engine)


def _prepare_engine(transformer_impl: ModuleType) -> None:
    engine = transformer_impl.MegatronEngine
    build = engine.__init__
    if getattr(build, "_verl_dppo", False):
        return

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        install()
        build(self, *args, **kwargs)

    init._verl_dppo = True  # type: ignore[attr-defined]
    engine.__init__ = init


def install() -> None:
    """Make megatron-core and mbridge run here. Safe to call again."""
    from verl_dppo.cpu import megatron_cuda

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # verl compiles its entropy
    megatron_cuda.install()
    patch_random_states()
    patch_layer_spec()
    patch_attention_mask()


def patch_random_states() -> None:
    """megatron-core reaches past `torch.cuda` into the driver for the generator's state."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def patch_layer_spec() -> None:
    """Build layers of megatron-core's own modules, and tell mbridge of their norms, which transformer-engine fuses."""
    from mbridge.core import llm_bridge
    from mbridge.models.qwen2 import Qwen2Bridge

    of_mbridge = llm_bridge.get_gpt_decoder_block_spec
    if getattr(of_mbridge, "_verl_dppo", False):
        return

    @functools.wraps(of_mbridge)  # mbridge reads the signature
    def local_spec(config: Any, use_transformer_engine: bool = False, **kwargs: Any) -> Any:
        return of_mbridge(config, use_transformer_engine=False, **kwargs)

    local_spec._verl_dppo = True  # type: ignore[attr-defined]
    llm_bridge.get_gpt_decoder_block_spec = local_spec
    Qwen2Bridge._OTHER_MAPPING = {"input_layernorm.weight": [_LAYER + "input_layernorm.weight"]}
    norm = {"pre_mlp_layernorm.weight": [_LAYER + "post_attention_layernorm.weight"]}
    Qwen2Bridge._MLP_MAPPING = {**Qwen2Bridge._MLP_MAPPING, **norm}


def causal_mask(valid: torch.Tensor | None, length: int) -> torch.Tensor:
    """Return megatron-core's mask, True where a token must not look.

    Args:
        valid: (rows, length) bool, True for tokens, as verl gives it; None where all are.
        length: tokens of a padded row.

    Returns:
        (rows or 1, 1, length, length) bool. A token of padding still sees itself, so that no softmax is empty.
    """
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    if valid is None:
        return hidden
    hidden = hidden | ~valid.bool()[:, None, None, :]
    return hidden & ~torch.eye(length, dtype=torch.bool)


def patch_attention_mask() -> None:
    """verl hands over transformer-engine's mask, (rows, tokens); megatron-core's own attention wants all pairs."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    attend = DotProductAttention.forward
    if getattr(attend, "_verl_dppo", False):
        return

    @functools.wraps(attend)
    def forward(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if attention_mask is None or attention_mask.dim() == 2:
            attention_mask = causal_mask(attention_mask, query.shape[0])
        return attend(self, query, key, value, attention_mask, *args, **kwargs)

    forward._verl_dppo = True  # type: ignore[attr-defined]
    DotProductAttention.forward = forward
