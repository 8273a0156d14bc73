"""verl's data set, which writes down what `RayPPOTrainer` shows it after each step."""

import json
import os

from verl.utils.dataset.rl_dataset import RLHFDataset


class WatchingDataset(RLHFDataset):
    """`data.custom_cls` of a run with TEST_ON_BATCH_END."""

    def on_batch_end(self, batch):
        line = {
            "rows": len(batch),
            "prompts": len(set(batch.non_tensor_batch["uid"])),
            "score": batch.batch["token_level_scores"].sum(-1).tolist(),
            "advantage": batch.batch["advantages"][:, 0].tolist(),
        }
        with open(os.environ["TEST_ON_BATCH_END"], "a") as file:
            file.write(json.dumps(line) + "\n")
