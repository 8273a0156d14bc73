"""Agent loops for runs of real verl, registered through `rollout.agent.agent_loop_config_path`."""

from uuid import uuid4

from verl_dppo.cpu.agent_loop import SeededSingleTurnAgentLoop, sample_key

SECOND_TURN = 120
FAILING_INDEX = 3


class TwoTurnAgentLoop(SeededSingleTurnAgentLoop):
    """The policy's first line, what is left of the sum from the environment, and what the policy makes of it."""

    async def run(self, sampling_params, **kwargs):
        first, second = await self.turns(sampling_params, **kwargs)
        between = second.prompt_ids[len(first.prompt_ids) + len(first.response_ids) :]
        return first.model_copy(
            update={
                "response_ids": first.response_ids + between + second.response_ids,
                "response_mask": first.response_mask + [0] * len(between) + second.response_mask,
                "response_logprobs": first.response_logprobs + [0.0] * len(between) + second.response_logprobs,
                "num_turns": 4,
            }
        )

    async def turns(self, sampling_params, **kwargs):
        """Return what either turn was asked and answered, as outputs of their own."""
        first = await super().run({**sampling_params, "max_tokens": 40}, **kwargs)
        line = self.tokenizer.decode(first.response_ids).partition("\n")[0] + "\n"
        tokens = min(len(line.encode()), len(first.response_ids))  # one byte is one token
        first = first.model_copy(
            update={
                "response_ids": first.response_ids[:tokens],
                "response_mask": first.response_mask[:tokens],
                "response_logprobs": first.response_logprobs[:tokens],
            }
        )
        left = kwargs["raw_prompt"][-1]["content"].removesuffix(" =").split()[3:]
        said = " ".join([line.split()[-1] if line.split() else "0", *left]) + "\n"
        context = first.prompt_ids + first.response_ids + self.tokenizer.encode(said, add_special_tokens=False)
        limits = {"max_tokens": SECOND_TURN, "sample_key": sample_key(kwargs)}
        answer = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=context, sampling_params={**sampling_params, **limits}
        )
        second = first.model_copy(
            update={
                "prompt_ids": context,
                "response_ids": answer.token_ids,
                "response_mask": [1] * len(answer.token_ids),
                "response_logprobs": answer.log_probs,
                "extra_fields": dict(first.extra_fields),
            }
        )
        return first, second


class SeveralOutputsAgentLoop(TwoTurnAgentLoop):
    """Every other session leaves both turns as outputs of their own, the others the second one only."""

    async def run(self, sampling_params, **kwargs):
        first, second = await self.turns(sampling_params, **kwargs)
        return [first, second] if kwargs["session_id"] % 2 else [second]


class FailingAgentLoop(SeededSingleTurnAgentLoop):
    """Fails for one prompt of the training data, whenever it is asked."""

    async def run(self, sampling_params, **kwargs):
        if kwargs["extra_info"]["split"] == "train" and kwargs["extra_info"]["index"] == FAILING_INDEX:
            raise RuntimeError("this prompt has no environment")
        return await super().run(sampling_params, **kwargs)
