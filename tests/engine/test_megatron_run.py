"""`model_engine=megatron algorithm=dppo` through verl's entry point, with the settings that docs/cpu.md names."""

import pytest
from end_to_end.conftest import PRUNED, data, verl_run  # noqa: F401 (fixtures)

pytestmark = pytest.mark.end_to_end

ENGINE = "actor_rollout_ref.actor.megatron"
MEGATRON = (
    "model_engine=megatron",
    "actor_rollout_ref.actor.strategy=megatron",
    "~actor_rollout_ref.actor.fsdp_config",
    "~actor_rollout_ref.ref.fsdp_config",
    f"{ENGINE}.vanilla_mbridge=true",
    f"{ENGINE}.use_remove_padding=false",
    f"{ENGINE}.sequence_parallel=false",
    f"{ENGINE}.override_transformer_config.attention_backend=unfused",
    *(
        f"+{ENGINE}.override_transformer_config.{fusion}=false"
        for fusion in (
            "apply_rope_fusion",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
        )
    ),
)


@pytest.mark.parametrize("trainer", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_pruned_training_runs_on_megatron(trainer, verl_run):  # noqa: F811
    run = verl_run(*MEGATRON, *PRUNED, f"trainer.use_v1={trainer}", steps=2)
    assert len(run.metrics) == 2
    for metrics in run.metrics:
        assert 0 < metrics["dppo/kept_fraction"] < metrics["dppo/informative_fraction"]
        assert metrics["dppo/weight_max"] > 1
        assert metrics["actor/grad_norm"] > 0
