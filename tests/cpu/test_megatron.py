"""What CPU mode changes for verl's Megatron engine; what touches torch runs in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from verl_dppo.cpu.megatron import causal_mask


def run(script):
    env = {**os.environ, "VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_cpu_mode_alone_changes_nothing_of_cuda():
    """Only a Megatron engine that is built does; until then even megatron-core is imported by verl alone."""
    script = """
import sys, verl, torch
assert "megatron" not in sys.modules and "verl_dppo.cpu.megatron_cuda" not in sys.modules
before = torch.Tensor.to, torch.zeros, torch.cuda.current_device
import verl.workers.engine
assert before == (torch.Tensor.to, torch.zeros, torch.cuda.current_device)
assert verl.workers.engine.MegatronEngine.__init__._verl_dppo
"""
    run(script)


def test_cuda_answers_with_the_cpu_and_installing_twice_changes_nothing_more():
    script = """
import verl, verl.workers.engine, torch
from verl_dppo.cpu import megatron
megatron.install()
zeros, attend = torch.zeros, __import__("mbridge").core.llm_bridge.get_gpt_decoder_block_spec
megatron.install()
assert zeros is torch.zeros and attend is __import__("mbridge").core.llm_bridge.get_gpt_decoder_block_spec
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.ones(2).to("cuda:0").to(torch.float64).cuda().type() == "torch.cuda.DoubleTensor"
assert torch.ones(2).type(torch.float64).dtype == torch.float64
assert torch.tensor([1.0], device=torch.cuda.current_device()).device.type == "cpu"
torch.cuda.manual_seed(5); one = torch.rand(3)
state = torch.cuda.get_rng_state(); two = torch.rand(3)
torch.cuda.set_rng_state(state); assert torch.equal(two, torch.rand(3))
torch.manual_seed(5); assert torch.equal(one, torch.rand(3))
"""
    run(script)


@pytest.mark.parametrize("lengths", [[4, 4], [2, 4]])
def test_the_mask_hides_the_future_and_the_padding_and_empties_no_row(lengths):
    valid = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
    hidden = causal_mask(valid, 4).expand(2, 1, 4, 4)[:, 0]
    for row, length in enumerate(lengths):
        for token in range(4):
            seen = {other for other in range(4) if not hidden[row, token, other]}
            assert seen == ({*range(token + 1)} & {*range(length)}) | {token}


def test_without_a_mask_every_earlier_token_is_seen():
    assert torch.equal(causal_mask(None, 3)[0, 0], torch.ones(3, 3, dtype=torch.bool).triu(1))


def test_what_is_patched_is_still_there():
    """Fails when megatron-core or mbridge moves what CPU mode replaces."""
    from mbridge.core import llm_bridge
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core import jit
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    assert callable(jit.disable_jit_fuser)
    assert callable(random._get_cuda_rng_state)
    assert callable(random._set_cuda_rng_state)
    assert callable(llm_bridge.get_gpt_decoder_block_spec)
    assert "mlp.linear_fc1.weight" in Qwen2Bridge._MLP_MAPPING
    assert "attention_mask" in DotProductAttention.forward.__code__.co_varnames
