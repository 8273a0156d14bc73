"""verl's Megatron worker around the tiny model, in the precision that a test asks for."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from verl.trainer.config import CheckpointConfig
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, McoreActorConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

of_verl = PrecisionType.to_dtype


def _build_in(dtype: torch.dtype) -> None:
    """Let verl build the model and its gradients in a precision that its configuration refuses, float64 all the way."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    def to_dtype(precision: Any) -> torch.dtype:
        return dtype if precision in ("bfloat16", dtype) else of_verl(precision)

    def logits_and_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.clone() if logits.dtype == torch.float64 else logits.float()
        return logits, logits.amax(-1)

    PrecisionType.to_dtype = staticmethod(to_dtype)
    # megatron-core takes the log-probs in float32.
    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(logits_and_max)
    # Its optimizer knows no float64; these tests never step it.
    if dtype == torch.float64:
        name = torch.Tensor.type
        torch.Tensor.type = lambda self, *to: name(self, *to) if to else name(self).replace("Double", "Float")


def worker(model: Path, dtype: str) -> TrainingWorker:
    """Build it, with tensor- and pipeline-parallel sizes from the environment."""
    half = dtype == "bfloat16"
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(model), use_remove_padding=False, enable_gradient_checkpointing=False),
            engine_config=McoreEngineConfig(
                vanilla_mbridge=True,
                use_remove_padding=False,
                sequence_parallel=False,
                tensor_model_parallel_size=int(os.environ.get("TENSOR_PARALLEL", "1")),
                pipeline_model_parallel_size=int(os.environ.get("PIPELINE_PARALLEL", "1")),
                override_ddp_config={"grad_reduce_in_fp32": half},
                override_transformer_config={
                    "attention_backend": "unfused",
                    "apply_rope_fusion": False,
                    "bias_activation_fusion": False,
                    "bias_dropout_fusion": False,
                    "gradient_accumulation_fusion": False,
                    "masked_softmax_fusion": False,
                    "sequence_parallel": False,
                },
            ),
            optimizer_config=McoreOptimizerConfig(lr=0.0, total_training_steps=1, lr_decay_steps=1),
            checkpoint_config=CheckpointConfig(),
        )
    )
    _build_in(getattr(torch, dtype))
    # megatron-core's norms are made in the default precision.
    torch.set_default_dtype(torch.float64 if dtype == "float64" else torch.float32)
    made.reset()
    torch.set_default_dtype(torch.float32)
    return made


def gradient(engine: Any) -> torch.Tensor:
    """Return the gradient of this rank's parameters, whole: the distributed optimizer leaves each rank its part."""
    parts = []
    for chunk in engine.module:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                ranks, mine = dist.get_world_size(group), dist.get_rank(group)
                shards = bucket.grad_data.chunk(ranks)
                gathered = [torch.empty_like(shard) for shard in shards]
                dist.all_gather(gathered, shards[mine].contiguous(), group=group)
                parts += gathered
    return torch.cat(parts).double()


def actor_config(**settings: Any) -> McoreActorConfig:
    """Return the actor's settings, which the loss reads."""
    return McoreActorConfig(**settings)
