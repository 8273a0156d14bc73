"""verl's single-turn agent loop, which also tells the rollout which completion it asks for."""

import hashlib
import json
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_dppo.cpu.sampling import SampleKey


def prompt_id(raw_prompt: Any, data_source: Any = None, index: Any = None) -> str:
    """Return a stable id of a prompt: a hash of its messages, its data source and its index in the data set."""
    content = json.dumps([list(raw_prompt), data_source, index], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def sample_key(fields: dict[str, Any]) -> SampleKey:
    """Name the completion from what verl hands an agent loop.

    The v1 trainer gives the step and the sample's index within its group. `RayPPOTrainer` gives neither: its `priority`
    is the row's place in the batch, which is as stable, and the rollout then counts steps by the weights it received.
    """
    step = fields.get("global_steps")
    sample = fields["session_id"] if "session_id" in fields else fields.get("priority", 0)
    extra_info = fields.get("extra_info") or {}
    prompt = prompt_id(fields["raw_prompt"], fields.get("data_source"), extra_info.get("index"))
    return SampleKey(None if step is None else int(step), prompt, int(sample))


class SeededSingleTurnAgentLoop(SingleTurnAgentLoop):
    """Adds `sampling_params["sample_key"]`, which the `hf_cpu` rollout seeds a completion with."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Generate one completion of `raw_prompt`."""
        return await super().run({**sampling_params, "sample_key": sample_key(kwargs)}, **kwargs)
