"""verl's rollout contract over `generation`: a server process, its replica, and the adapter in the trainer's workers.

The three follow verl's own split. verl's agent loops call `Server.generate`; the trainer pushes weights through
`ServerAdapter.update_weights`; `Replica` starts the server.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from verl_dppo.cpu.generation import Completion, Generator, build_model
from verl_dppo.cpu.platform import share_of_cores
from verl_dppo.cpu.sampling import SampleKey, SamplingRule, uniforms

logger = logging.getLogger(__name__)

QUIET_SECONDS = 0.02  # a pause this long means that a burst of requests has arrived
BURST_SECONDS = 0.25  # ... and this is the longest that the first of a burst waits for the others
STEPS_BETWEEN_JOINS = 8  # a prefill costs about as much as a step, however few it is for


class Server:
    """One model and the completions it is decoding. A Ray actor; all model operations run on its one worker thread."""

    def __init__(self, config: RolloutConfig, model_config: Any, threads: int) -> None:
        self.config = config
        model_config = omega_conf_to_dataclass(model_config)  # reads the model's configuration and tokenizer
        self.worker = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        self.model = build_model(model_config.hf_config)
        self.generator = Generator(self.model, _eos(config, model_config), config.max_num_seqs)
        self.version: int | None = None  # the trainer's step when it pushed the weights
        self.waiting: list[Completion] = []
        self.arrived, self.awake = asyncio.Event(), asyncio.Event()
        self.done: dict[Completion, asyncio.Future[None]] = {}
        self.loop_task: asyncio.Task[None] | None = None
        self.warned = False
        self.completions, self.tokens, self.seconds = 0, 0, 0.0  # since the last report

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Complete a prompt. Part of verl's server contract."""
        if image_data or video_data:
            raise ValueError("rollout.name=hf_cpu generates from text only, and this prompt has images or video")
        completion = self._completion(request_id, [int(token) for token in prompt_ids], sampling_params)
        if self.loop_task is None:
            self.loop_task = asyncio.create_task(self._run())
        self.done[completion] = asyncio.get_running_loop().create_future()
        self.waiting.append(completion)
        self.arrived.set()
        await self.done[completion]
        return TokenOutput(
            token_ids=completion.tokens,
            log_probs=completion.log_probs if sampling_params.get("logprobs", True) else None,
            stop_reason="aborted" if completion.stop_reason == "aborted" else "completed",
            num_preempted=0,
            extra_fields={"global_steps": self.version},
        )

    def _completion(self, request_id: str, prompt: list[int], params: dict[str, Any]) -> Completion:
        limit = params.get("max_tokens") or params.get("max_new_tokens") or self.config.response_length
        if self.config.max_model_len:
            limit = min(limit, self.config.max_model_len - len(prompt))
        key = self._key(request_id, params.get("sample_key"))
        stream = uniforms(self.config.seed, key, prompt, max(1, int(limit)))
        return Completion(prompt, SamplingRule.from_params(params), stream)

    def _key(self, request_id: str, key: SampleKey | None) -> str:
        if key is None:
            if not self.warned:
                logger.warning(
                    "a request without sample_key: its tokens will not repeat in another run. "
                    "Only the agent loop dppo_cpu_single_turn sends one (rollout.agent.default_agent_loop)."
                )
                self.warned = True
            return request_id
        step = key.step if key.step is not None else (self.version or 0) + 1
        return f"{step}/{key.prompt}/{key.sample}"

    async def _run(self) -> None:
        """Decode whatever is there, for ever."""
        while True:
            self.arrived.clear()
            if not self.waiting:
                await self.arrived.wait()
            await self._burst()
            began = time.perf_counter()
            async for completion in self._decode():
                self.completions, self.tokens = self.completions + 1, self.tokens + len(completion.tokens)
                self._deliver(completion)
            self.seconds += time.perf_counter() - began

    async def _burst(self) -> None:
        """Wait until a burst of requests is in, and until generation is allowed."""
        deadline = time.monotonic() + BURST_SECONDS
        seen = 0
        while len(self.waiting) > seen and time.monotonic() < deadline:
            seen = len(self.waiting)
            await asyncio.sleep(QUIET_SECONDS)
        await self.awake.wait()

    async def _decode(self) -> AsyncIterable[Completion]:
        """Yield each completion as it ends, until none is left; late requests join on the way."""
        step = 0
        while self.waiting or self.generator.active:
            await self.awake.wait()
            if step % STEPS_BETWEEN_JOINS == 0 or not self.generator.active:
                joining, self.waiting = self.waiting[: self.generator.room], self.waiting[self.generator.room :]
                for completion in await self._on_worker(self.generator.add, joining, owners=joining):
                    yield completion
            if self.generator.active:
                for completion in await self._on_worker(self.generator.step, owners=self.generator.active):
                    yield completion
            step += 1

    async def _on_worker(self, call: Any, *args: Any, owners: Sequence[Completion] = ()) -> Any:
        """Run a model operation; if it fails, so does every completion that it was for."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.worker, call, *args)
        except Exception as error:
            for completion in {*owners, *self.generator.abort()}:
                future = self.done.pop(completion, None)
                if future is not None and not future.done():
                    future.set_exception(error)
            return []

    def _report(self) -> None:
        """Print one line on what was generated since the last one."""
        if self.completions:
            done = f"{self.completions} completions, {self.tokens} tokens in {self.seconds:.1f} s"
            print(f"[hf_cpu] with the weights of step {self.version}: {done}", flush=True)
        self.completions, self.tokens, self.seconds = 0, 0, 0.0

    def _deliver(self, completion: Completion) -> None:
        future = self.done.pop(completion, None)
        if future is not None and not future.done():
            future.set_result(None)

    async def load_weights(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        """Take the trainer's weights."""
        self._report()
        await asyncio.get_running_loop().run_in_executor(self.worker, load_weights, self.model, weights)
        if version is not None:
            self.version = version
        self.awake.set()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allow generation. The first half of verl's wake-up (tags=["weights"]) comes before the new weights do."""
        if tags is None or "kv_cache" in tags:
            self.awake.set()

    async def sleep(self) -> None:
        """Hold requests until new weights arrive. There is no memory to give back: the cache lives while rows do."""
        self._report()
        self.awake.clear()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Return every unfinished completion as far as it has come; hold new ones (`reject_request` is ignored)."""
        self.awake.clear()
        aborted = await asyncio.get_running_loop().run_in_executor(self.worker, self.generator.abort)
        for completion in [*aborted, *self.waiting]:
            completion.stop_reason = "aborted"
            self._deliver(completion)
        self.waiting = []

    async def resume_generation(self) -> None:
        """Allow generation again."""
        self.awake.set()

    async def clear_kv_cache(self) -> None:
        """Nothing is cached between completions."""

    async def release_kv_cache(self) -> None:
        """Nothing is cached between completions."""

    async def resume_kv_cache(self) -> None:
        """Nothing is cached between completions."""

    async def start_profile(self, **_: Any) -> None:
        """No profiler."""

    async def stop_profile(self) -> None:
        """No profiler."""


def _eos(config: RolloutConfig, model_config: HFModelConfig) -> set[int]:
    """Return the ids that end a completion: the tokenizer's and the model's, as vLLM does."""
    if config.ignore_eos:
        return set()
    found: set[int] = set()
    for source in (model_config.tokenizer, model_config.generation_config, model_config.hf_config):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return found


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy `weights` into `model`; a tied weight may come under either name, or both."""
    own = model.state_dict()
    unknown = sorted(weights.keys() - own.keys())
    given = {own[name].data_ptr() for name in weights.keys() & own.keys()}
    missing = [name for name, tensor in model.named_parameters() if tensor.data_ptr() not in given]
    if unknown or missing:
        raise ValueError(f"the trainer's weights do not fit the rollout's model: unknown {unknown}, missing {missing}")
    for name, tensor in weights.items():
        own[name].copy_(tensor)


class Replica(RolloutReplica):
    """Starts one server with `rollout.engine_kwargs.hf_cpu.num_threads` threads (default: its share of the cores)."""

    async def launch_servers(self) -> None:
        """Start the server process."""
        if self.world_size != 1:
            raise ValueError(
                "rollout.name=hf_cpu runs a model in one process: set rollout.tensor_model_parallel_size=1, "
                "rollout.data_parallel_size=1 and rollout.pipeline_model_parallel_size=1"
            )
        settings = (self.config.engine_kwargs or {}).get("hf_cpu") or {}
        threads = settings.get("num_threads") or share_of_cores(self.gpus_per_node)
        name = server_name(self.replica_rank)
        actor = ray.remote(num_cpus=1)(Server).options(name=name, max_concurrency=self.max_concurrency)
        self._server_handle = actor.remote(self.config, self.model_config, threads)
        await self._server_handle.clear_kv_cache.remote()  # a failed start is reported here
        self._server_address = name
        self.servers = [self._server_handle]

    def rollout_worker_use_gpu(self) -> bool:
        """The server needs no logical GPU of its own."""
        return False


def server_name(replica_rank: int) -> str:
    """Return the Ray name by which the trainer's workers find a replica's server."""
    return f"hf_cpu_server_{replica_rank}"


class ServerAdapter(BaseRollout):
    """The trainer's side: rank i of the workers feeds replica i."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1, **_: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank if replica_rank != -1 else int(os.environ["RANK"])
        self._server: Any = None

    @property
    def server(self) -> Any:
        """The server's actor handle, looked up when first needed: it starts after the trainer."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Wake the server."""
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Put the server to sleep."""
        await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send the full weights. Every rank consumes them all: gathering each is a collective operation."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise ValueError(
                "rollout.name=hf_cpu takes full weights only: use rollout.checkpoint_engine.backend=naive, "
                "and for LoRA actor_rollout_ref.model.lora.merge=True"
            )
        full = {name: _to_cpu(tensor) for name, tensor in await _collect(weights)}
        await self.server.load_weights.remote(full, global_steps)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


async def _collect(weights: Iterable[Any] | AsyncIterable[Any]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterable):
        return [item async for item in weights]
    return list(weights)
