"""Loaded into every verl process of a test run (VERL_USE_EXTERNAL_MODULES): makes stock verl repeat, and watches.

Stock verl names prompts by random uids and takes rows in the order in which rollouts finish, so that two stock runs
never agree to the last bit. Here uids count upwards and rows are taken in their order. Besides:

TEST_UPDATES=FILE   one JSON line for each optimiser step of rank 0: gradient norm and a hash of all parameters after it
TEST_ROWS=FILE      one JSON line for each row that reaches the weighted loss: response, weight, advantage, token count
TEST_RECORD=FILE    append each rollout, keyed by (step, prompt, sample)
TEST_REPLAY=FILE    answer rollouts from that file; one that is not in it is an error
"""

import functools
import hashlib
import itertools
import json
import os

from verl_dppo.post_import import when_imported


def count_uids(trainer_base):
    counter = itertools.count()

    class CountingUUID:
        @staticmethod
        def uuid4():
            return f"{next(counter):08d}"

    trainer_base.uuid = CountingUUID


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
    dppo_loss = loss.dppo_loss

    @functools.wraps(dppo_loss)
    def logged(config, model_output, data, dp_group=None):
        with open(os.environ["TEST_ROWS"], "a") as file:
            for row, response in enumerate(data["responses"].unbind()):
                line = {
                    "response": response.tolist(),
                    "weight": data[loss.WEIGHT][row].item(),
                    "advantage": data["advantages"].unbind()[row][0].item(),
                    "tokens": data[loss.BATCH_NUM_TOKENS][row].item(),
                }
                file.write(json.dumps(line) + "\n")
        return dppo_loss(config, model_output, data, dp_group)

    loss.dppo_loss = logged


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
        key = (sample.step, sample.prompt, sample.sample)
        if "TEST_REPLAY" in os.environ:
            line = recorded[key]
            return TokenOutput(stop_reason="completed", num_preempted=0, **line)
        output = await generate(self, request_id, **kwargs)
        line = {"token_ids": output.token_ids, "log_probs": output.log_probs, "extra_fields": output.extra_fields}
        with open(os.environ["TEST_RECORD"], "a") as file:
            file.write(json.dumps({"key": key, **line}) + "\n")
        return output

    client.generate = with_record


when_imported("verl.trainer.ppo.v1.trainer_base", count_uids)
when_imported("verl.trainer.ppo.v1.replay_buffer", take_rows_in_order)
if "TEST_UPDATES" in os.environ:
    when_imported("verl.workers.engine.fsdp.transformer_impl", log_updates)
if "TEST_ROWS" in os.environ:
    when_imported("verl_dppo.training.loss", log_rows)
if "TEST_RECORD" in os.environ or "TEST_REPLAY" in os.environ:
    when_imported("verl.workers.rollout.llm_server", record_or_replay)
