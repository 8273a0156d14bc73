"""A recipe on verl's RayPPOTrainer that prunes: `python recipe.py algorithm=dppo trainer.use_v1=false ...`."""

import hydra
import ray
from omegaconf import OmegaConf
from verl.trainer.main_ppo import run_ppo
from verl.trainer.main_ppo_v0 import BaseTaskRunner
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_dppo import DPPORayPPOTrainer


class RecipeTrainer(DPPORayPPOTrainer):
    """Reports which share of the response tokens it trains on."""

    def _update_actor(self, batch):
        trained = batch.batch["response_mask"].sum()  # of the rows that were kept
        output = super()._update_actor(batch)
        sampled = batch.batch["response_mask"].sum()  # the batch is the full one again
        output.meta_info["metrics"]["recipe/token_share"] = float(trained / sampled)
        return output


@ray.remote
class TaskRunner(BaseTaskRunner):
    """verl's own names its trainer in the code, so a recipe brings one."""

    def run(self, config):
        """Build the trainer and let it train."""
        OmegaConf.resolve(config)
        validate_config(config, need_reference_policy(config), need_critic(config))
        self.add_actor_rollout_worker(config)
        self.add_reward_model_resource_pool(config)
        pools = self.init_resource_pool_mgr(config)
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        trainer = RecipeTrainer(config, model.tokenizer, self.role_worker_mapping, pools, processor=model.processor)
        trainer.init_workers()
        trainer.fit()


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config):
    """Start Ray and the recipe, on verl's own configuration."""
    run_ppo(config, TaskRunner)


if __name__ == "__main__":
    main()
