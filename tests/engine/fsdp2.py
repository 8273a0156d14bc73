"""verl's FSDP2 worker around the tiny model, in the precision that a test asks for."""

from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen2 import modeling_qwen2
from verl.trainer.config import CheckpointConfig
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker

of_verl = PrecisionType.to_dtype


def _with_float64(precision: Any) -> torch.dtype:
    return torch.float64 if precision in ("fp64", torch.float64) else of_verl(precision)


def _norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Qwen2's norm without its detour through float32."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def worker(model: Path, dtype: str) -> TrainingWorker:
    """Build it. verl and the model know no float64: the test adds it to the one and takes float32 from the other."""
    if dtype == "float64":
        PrecisionType.to_dtype = staticmethod(_with_float64)
        modeling_qwen2.Qwen2RMSNorm.forward = _norm
    short = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}[dtype]
    master = "fp64" if dtype == "float64" else "fp32"
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model),
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                model_dtype=master,
                mixed_precision={"param_dtype": short, "reduce_dtype": master, "buffer_dtype": master},
            ),
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=1),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    return made


def gradient(engine: Any) -> torch.Tensor:
    """Return the gradient of all parameters, whole, as the optimizer would find it."""
    return torch.cat([parameter.grad.full_tensor().double().flatten() for parameter in engine.module.parameters()])


def actor_config(**settings: Any) -> FSDPActorConfig:
    """Return the actor's settings, which the loss reads."""
    return FSDPActorConfig(strategy="fsdp2", **settings)
