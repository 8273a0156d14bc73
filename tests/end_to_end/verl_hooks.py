"""Loaded into every verl process of a test run (VERL_USE_EXTERNAL_MODULES): makes stock verl repeat, and watches.

Stock verl names prompts by random uids and takes rows in the order in which rollouts finish, so that two stock runs
never agree to the last bit. Here uids count upwards and rows are taken in their order. Besides:

TEST_UPDATES=FILE   one JSON line for each optimiser step of rank 0: gradient norm and a hash of all parameters after it
TEST_ROWS=FILE      one JSON line for each row that reaches the weighted loss: response, weight, advantage, denominators
TEST_RECORD=FILE    append each rollout, keyed by (step, prompt, sample)
TEST_REPLAY=FILE    answer rollouts from that file; one that is not in it is an error
TEST_REPEAT=1       answer the rollouts of all later steps with those of the first
TEST_PLANS=FILE     one JSON line for each plan of the trainer: what it was made from, pi, weights, tokens of rows
TEST_PROMPTS=FILE   one JSON line for each step of the prompt level: what it drew, and what history knew afterwards
TEST_PHASES=FILE    one JSON line when the trainer enters a phase of a step
TEST_SLOW_SAVE=SEC  each part of a save of a run with TEST_PHASES starts so much later
TEST_BATCHES=FILE   one JSON line for each mini-batch of a rank, or pass for log-probs: micro-batches, and seconds
TEST_ORDERS=FILE    one JSON line for each order of a step: rows before and after it, and the plan of each pass
TEST_GRADIENTS=DIR  statistics of the gradient of each optimiser step, see `GradientLog`
"""

import contextvars
import functools
import hashlib
import itertools
import json
import os
import time
from pathlib import Path

from verl_dppo.post_import import when_imported


def count_uids(trainer):
    counter = itertools.count()

    class CountingUUID:
        @staticmethod
        def uuid4():
            return f"{next(counter):08d}"

    trainer.uuid = CountingUUID


def take_rows_in_order(replay_buffer):
    materialize = replay_buffer.ReplayBuffer._materialize_batch

    def in_order(self, partition_id, selected, snapshot):
        def place(key):
            uid, session, output = key.rsplit("_", 2)
            return uid, int(session), int(output)

        ordered = {key: snapshot[key] for key in sorted(snapshot, key=place)}
        return materialize(self, partition_id, selected, ordered)

    replay_buffer.ReplayBuffer._materialize_batch = in_order


def log_updates(transformer_impl):
    import torch

    engine = transformer_impl.FSDPEngine
    optimizer_step = engine.optimizer_step

    def whole(tensor):
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def step(self):
        norm = optimizer_step(self)
        parameters = torch.cat([whole(p.data).flatten() for p in self.module.parameters()])
        if torch.distributed.get_rank() == 0:
            line = {
                "grad_norm": float(norm),
                "hash": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
                "norm": parameters.double().norm().item(),
            }
            with open(os.environ["TEST_UPDATES"], "a") as file:
                file.write(json.dumps(line) + "\n")
        return norm

    engine.optimizer_step = step


def log_rows(loss):
    import torch

    dppo_loss = loss.dppo_loss

    @functools.wraps(dppo_loss)
    def logged(config, model_output, data, dp_group=None):
        lines = []
        for row, response in enumerate(data["responses"].unbind()):
            line = {
                "sequence": data["input_ids"].unbind()[row].tolist(),
                "response": response.tolist(),
                "weight": data[loss.WEIGHT][row].item(),
                "advantage": data["advantages"].unbind()[row][0].item(),
                "tokens": data[loss.BATCH_NUM_TOKENS][row].item(),
                "size": data[loss.GLOBAL_BATCH_SIZE][row].item(),
                "rank": torch.distributed.get_rank() if torch.distributed.is_initialized() else 0,
            }
            lines.append(json.dumps(line) + "\n")
        # In one call, so that the lines of two ranks do not mix.
        with open(os.environ["TEST_ROWS"], "ab", buffering=0) as file:
            file.write("".join(lines).encode())
        return dppo_loss(config, model_output, data, dp_group)

    loss.dppo_loss = logged


step_and_place = contextvars.ContextVar("step of a rollout, and its place in its group")


def note_step_and_place(agent_loop):
    """Agent loops of `RayPPOTrainer` are told neither; their workers know them."""
    run = agent_loop.AgentLoopWorker._run_agent_loop

    async def noted(self, sampling_params, trajectory, **kwargs):
        from verl_hooks import step_and_place  # Ray pickles this class by value, and a context variable not at all

        group_size = self.rollout_config.n
        step_and_place.set((trajectory["step"], kwargs.get("priority", 0) % group_size))
        return await run(self, sampling_params, trajectory, **kwargs)

    agent_loop.AgentLoopWorker._run_agent_loop = noted


def record_or_replay(llm_server):
    from verl.workers.rollout.replica import TokenOutput

    client = llm_server.LLMServerClient
    generate = client.generate
    recorded = {}
    if "TEST_REPLAY" in os.environ:
        with open(os.environ["TEST_REPLAY"]) as file:
            recorded = {tuple(line.pop("key")): line for line in map(json.loads, file)}

    async def with_record(self, request_id, **kwargs):
        sample = kwargs["sampling_params"]["sample_key"]
        step, place = (sample.step, sample.sample) if sample.step is not None else step_and_place.get()
        key = (step, sample.prompt, place)
        if "TEST_REPLAY" in os.environ:
            line = recorded[key]
            return TokenOutput(stop_reason="completed", num_preempted=0, **line)
        output = await generate(self, request_id, **kwargs)
        line = {"token_ids": output.token_ids, "log_probs": output.log_probs, "extra_fields": output.extra_fields}
        with open(os.environ["TEST_RECORD"], "a") as file:
            file.write(json.dumps({"key": key, **line}) + "\n")
        return output

    client.generate = with_record


def repeat_first_step(llm_server):
    client = llm_server.LLMServerClient
    generate = client.generate
    first = {}

    async def repeated(self, request_id, **kwargs):
        sample = kwargs["sampling_params"]["sample_key"]
        key = (sample.prompt, sample.sample)
        if key not in first:
            first[key] = await generate(self, request_id, **kwargs)
        return first[key].model_copy(deep=True)

    client.generate = repeated


def log_plans(trainer):
    import numpy as np
    import transfer_queue as tq

    from verl_dppo.training import completion_level

    read_full_batch, plan_completions = trainer.read_full_batch, completion_level.plan_completions
    sequences = []

    def plain(value):
        return value.tolist() if isinstance(value, np.ndarray) else value

    def read(batch, config):
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        sequences[:] = [row.tolist() for row in data["input_ids"].unbind()]
        return read_full_batch(batch, config)

    def plan(slope, target_pi, mini_batch, *, rng, **fixed):
        made = plan_completions(slope, target_pi, mini_batch, rng=rng, **fixed)
        arguments = {"slope": slope, "target_pi": target_pi, "mini_batch": mini_batch, **fixed}
        line = {
            "arguments": {name: plain(value) for name, value in arguments.items()},
            "sequences": sequences,
            "pi": plain(made.pi),
            "weight": plain(made.weight),
        }
        with open(os.environ["TEST_PLANS"], "a") as file:
            file.write(json.dumps(line) + "\n")
        return made

    trainer.read_full_batch, completion_level.plan_completions = read, plan


def log_prompts(prompt_level):
    level, stream = prompt_level.PromptLevel, prompt_level.PromptStream
    next_batch, observe, take = level.next_batch, level.observe, stream.take

    def taken(self, n):
        self.taken = take(self, n)
        return self.taken

    def drawn(self, full, deal, sample):
        self.drawn_from, self.drawn_full = self.stream.position, full
        return next_batch(self, full, deal, sample)

    def digest(history):
        total = hashlib.sha256()
        for name, value in sorted(history.state_dict().items()):
            total.update(name.encode() + (value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()))
        return total.hexdigest()

    def observed(self, step, *arguments):
        answer = observe(self, step, *arguments)
        plan, rows = self.submission.plan, self.stream.taken
        ids = [self.ids[row] for row in rows]
        line = {
            "step": step,
            "from": self.drawn_from,
            "to": self.stream.position,
            "full": self.drawn_full,
            "rows": rows.tolist(),
            "ids": ids,
            "pi": plan.pi.tolist(),
            "kept": plan.kept.tolist(),
            "weight": plan.weight.tolist(),
            "mini_batch": plan.mini_batch.tolist(),
            "history": digest(self.history),
            "visits": self.history.visits(ids).tolist(),
            "last_step": self.history.last_step(ids).tolist(),
            "mean": self.history.mean(ids).tolist(),
            "spread": self.history.spread(ids).tolist(),
        }
        with open(os.environ["TEST_PROMPTS"], "a") as file:
            file.write(json.dumps(line) + "\n")
        return answer

    stream.take, level.next_batch, level.observe = taken, drawn, observed


def log_phases(trainer):
    from verl_dppo.training import hooks

    now = {"step": 0}

    def write(phase):
        with open(os.environ["TEST_PHASES"], "a") as file:
            file.write(json.dumps({**now, "phase": phase}) + "\n")

    def entering(owner, name, phase, left=None):
        called = getattr(owner, name)

        @functools.wraps(called)
        def logged(*args, **kwargs):
            now["step"] = getattr(args[0], "global_steps", now["step"])
            write(phase)
            if phase.startswith("save"):
                time.sleep(float(os.environ.get("TEST_SLOW_SAVE", "0")))
            answer = called(*args, **kwargs)
            if left:
                write(left)
            return answer

        setattr(owner, name, logged)

    cls = trainer.DPPOTrainer
    entering(cls, "_fetch_one_gen_batch", "draw", left="rollout")
    entering(cls, "_balance_batch", "reward is known", left="log-probs")
    entering(cls, "_update_actor", "update", left="between update and save")
    entering(hooks.PromptLevel, "save", "save: history")
    entering(hooks, "save_state", "save: state")
    entering(trainer.PPOTrainerSync, "_save_checkpoint", "save: weights", left="save: done")
    entering(cls, "_compute_metrics", "report")


def fingerprints(input_ids):
    """Return a hash and the length of each row."""
    rows = [row.tolist() for row in input_ids.unbind()]
    return [(hashlib.blake2b(json.dumps(row).encode(), digest_size=8).hexdigest(), len(row)) for row in rows]


def append_line(name, line):
    # In one call, so that the lines of two ranks do not mix.
    with open(os.environ[name], "ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())


def log_batches(engine_workers):
    import torch
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as Engine

    worker, forward_step, micro_batches = engine_workers.TrainingWorker, Engine.forward_step, []

    def forward(self, micro_batch, *args, **kwargs):
        micro_batches.append(fingerprints(micro_batch["input_ids"]))
        return forward_step(self, micro_batch, *args, **kwargs)

    def logged(name):
        of_verl = getattr(worker, name)

        @functools.wraps(of_verl)
        def run(self, *args, **kwargs):
            micro_batches.clear()
            busy, wall = time.process_time(), time.perf_counter()
            output = of_verl(self, *args, **kwargs)
            line = {
                "rank": torch.distributed.get_rank(),
                "pass": "update" if name == "train_batch" else "log_prob",
                "micro_batches": micro_batches,
                "busy": time.process_time() - busy,
                "wall": time.perf_counter() - wall,
            }
            append_line("TEST_BATCHES", line)
            return output

        setattr(worker, name, run)

    Engine.forward_step = forward
    logged("train_batch")
    logged("infer_batch")


def log_orders(step_order):
    import transfer_queue as tq

    arrange = step_order.StepOrder.arrange

    def read(batch, columns):
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids", *columns])

    def logged(self, batch, mini_batch, ranks, *args):
        before = fingerprints(read(batch, [])["input_ids"])
        batch, figures = arrange(self, batch, mini_batch, ranks, *args)
        columns = {name: step_order.COLUMNS[name] for name in self.passes}
        data = read(batch, columns.values())
        plans = {name: data[column].tolist() for name, column in columns.items()}
        after = fingerprints(data["input_ids"])
        append_line("TEST_ORDERS", {"ranks": ranks, "before": before, "after": after, "plans": plans})
        return batch, figures

    step_order.StepOrder.arrange = logged


class GradientLog:
    """What is kept of the gradients of an engine, in a folder, before they are clipped.

    gradients.jsonl  of each gradient of a pruned batch, the squared norm and the inner products with 32 fixed random
                     directions of length 1
    sum.npy          the sum of these gradients so far
    full.npz         of a batch that is not pruned, all of whose rows are run one by one: its gradient `full`, inner
                     products of rows with each other `gram` and with the directions `projections`
    full.json        the tokens of these rows
    """

    DIRECTIONS = 32

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sum = self.directions = None
        self.sequences, self.seen = [], []

    def project(self, gradient):
        import numpy as np

        if self.directions is None:
            random = np.random.default_rng(0).standard_normal((self.DIRECTIONS, gradient.shape[-1]))
            self.directions = random / np.linalg.norm(random, axis=1, keepdims=True)
        return gradient @ self.directions.T

    def next_row(self, gradient, sequence):
        """Take the gradient of all rows before this one."""
        self.seen.append(gradient)
        self.sequences.append(sequence)

    def finish(self, gradient, writes):
        import numpy as np

        projections = self.project(gradient)
        if not writes:
            return
        if self.sequences:
            rows = np.diff(np.array([*self.seen, gradient]), axis=0)
            arrays = {"full": gradient, "gram": rows @ rows.T, "projections": self.project(rows)}
            np.savez(self.folder / "full.npz", **arrays)
            (self.folder / "full.json").write_text(json.dumps(self.sequences))
            self.sequences, self.seen = [], []
            return
        line = {"square": float(gradient @ gradient), "projections": projections.tolist()}
        with open(self.folder / "gradients.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        self.sum = gradient if self.sum is None else self.sum + gradient
        np.save(self.folder / "sum.npy", self.sum)


def log_gradients(transformer_impl):
    import torch
    from verl.utils import tensordict_utils as tu

    engine = transformer_impl.FSDPEngineWithLMHead
    forward_backward_batch, forward_step = engine.forward_backward_batch, engine.forward_step
    optimizer_step = engine.optimizer_step
    log = GradientLog(os.environ["TEST_GRADIENTS"])

    def gradient(self):
        parts = []
        for parameter in self.module.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten().double())
        return torch.cat(parts).numpy()

    def rows_one_by_one(self, data, loss_function, forward_only=False):
        if not forward_only and "dppo_weight" not in data:
            tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        return forward_backward_batch(self, data, loss_function, forward_only)

    def row(self, micro_batch, loss_function, forward_only):
        if not forward_only and "dppo_weight" not in micro_batch:
            log.next_row(gradient(self), micro_batch["input_ids"].values().tolist())
        return forward_step(self, micro_batch, loss_function, forward_only)

    def step(self):
        log.finish(gradient(self), writes=torch.distributed.get_rank() == 0)
        return optimizer_step(self)

    engine.forward_backward_batch, engine.forward_step, engine.optimizer_step = rows_one_by_one, row, step


when_imported("verl.trainer.ppo.v1.trainer_base", count_uids)
when_imported("verl.trainer.ppo.ray_trainer", count_uids)
when_imported("verl.trainer.ppo.v1.replay_buffer", take_rows_in_order)
if "TEST_UPDATES" in os.environ:
    when_imported("verl.workers.engine.fsdp.transformer_impl", log_updates)
if "TEST_ROWS" in os.environ:
    when_imported("verl_dppo.training.loss", log_rows)
if "TEST_RECORD" in os.environ or "TEST_REPLAY" in os.environ:
    when_imported("verl.workers.rollout.llm_server", record_or_replay)
    when_imported("verl.experimental.agent_loop.agent_loop", note_step_and_place)
if "TEST_REPEAT" in os.environ:
    when_imported("verl.workers.rollout.llm_server", repeat_first_step)
if "TEST_PLANS" in os.environ:
    when_imported("verl_dppo.training.trainer", log_plans)
if "TEST_PROMPTS" in os.environ:
    when_imported("verl_dppo.training.prompt_level", log_prompts)
if "TEST_PHASES" in os.environ:
    when_imported("verl_dppo.training.trainer", log_phases)
if "TEST_BATCHES" in os.environ:
    when_imported("verl.workers.engine_workers", log_batches)
if "TEST_ORDERS" in os.environ:
    when_imported("verl_dppo.training.step_order", log_orders)
if "TEST_GRADIENTS" in os.environ:
    when_imported("verl.workers.engine.fsdp.transformer_impl", log_gradients)
