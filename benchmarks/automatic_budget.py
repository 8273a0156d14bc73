"""What the automatic budget is worth: the real controller in a world whose noise is known, against a fixed keep of .6.

    python benchmarks/automatic_budget.py [FILE.npz ...] [--completions 8]

Without files it takes the small copies in tests/data/policy-gradients. A step draws from the batch at the controller's
keep, by the pivotal method, and the controller is told what the trainer tells it: seconds of rollout and of log-probs
and update, the tokens that these processed, and the curve of rho by its own magnitudes. Seconds and tokens scatter by
5 % from step to step. Log-probs and update have a fixed part besides that of the tokens, prompts among them. The keep
where it then stands is judged by the true rho: S of `World.speed_up`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from measured_batch import MODES, Array, Batch, load, rollout_noise

from verl_dppo.pruning import KeepController, draw, inflation_curve, neyman_inclusion, score_magnitude

COPIES = Path(__file__).resolve().parents[1] / "tests" / "data" / "policy-gradients"
REST = 0.05
ROLLOUT_SHARES = (0.3, 0.5, 0.65, 0.8)
FIXED_PARTS = (0.0, 0.1, 0.2, 0.3, 0.5)
STEPS = (60, 200)
SEEDS = (0, 1)
SCATTER = 0.05
DEFAULT_KEEP = 0.6
GRID = np.linspace(0.15, 1.0, 86)


@dataclass(frozen=True)
class World:
    """Steps that are all on one batch. Seconds are shares of a full step, of which REST is neither rollout nor update.

    Attributes:
        batch: the batch.
        mode: how the loss is aggregated.
        prompts: whether log-probs and update take time for the tokens of prompts, too.
    """

    batch: Batch
    mode: str
    prompts: bool = True

    @cached_property
    def magnitude(self) -> Array:
        """What the driver takes for the gradient norms, (n,)."""
        return score_magnitude(self.batch.advantage, self.batch.tokens, self.batch.surprise.ravel(), self.mode)

    @cached_property
    def tokens(self) -> Array:
        """Tokens of each row, as a share of those of the batch, (n,)."""
        tokens = self.batch.tokens
        if self.prompts:
            tokens = tokens + self.batch.prompt_length[self.batch.group]
        return tokens / tokens.sum()

    @cached_property
    def energy(self) -> Array:
        """Squared gradient norm of each row over the variance of the rollouts, (n,)."""
        noise = rollout_noise(self.batch, self.mode, np.random.default_rng(0))
        return np.diag(self.batch.gradient_gram(self.mode)) / noise

    def inclusion(self, keep: float) -> Array:
        """Return pi, (n,)."""
        return neyman_inclusion(self.magnitude, self.batch.tokens, keep)

    def speed_up(self, keep: float, rollout: float, fixed: float) -> float:
        """Return S = 1 / ((s + t (fixed + (1 - fixed) * tokens kept))(1 + rho) + REST), with the true rho.

        Args:
            keep: the budget.
            rollout: s, the share of a full step that rollouts take.
            fixed: the part of log-probs and update of a full batch that no pruning shortens.
        """
        pi = self.inclusion(keep)
        live = pi > 0
        rho = ((1 / pi[live] - 1) * self.energy[live]).sum()
        update = (1 - REST - rollout) * (fixed + (1 - fixed) * (pi * self.tokens).sum())
        return float(1 / ((rollout + update) * (1 + rho) + REST))

    def settle(self, rollout: float, fixed: float, steps: int, seed: int) -> float:
        """Return the keep that the controller has after so many steps."""
        rng, controller = np.random.default_rng(seed), KeepController()
        curve = inflation_curve(self.magnitude, self.batch.tokens)
        order = np.lexsort((self.batch.tokens, np.sign(self.batch.advantage), self.batch.group))
        for _ in range(steps):
            keep = controller.keep
            kept = draw(self.inclusion(keep), rng, order=order)
            generation, tokens, update = rng.lognormal(0, SCATTER, 3)
            tokens *= self.tokens[kept].sum()
            update *= (1 - REST - rollout) * (fixed + (1 - fixed) * tokens)
            controller.observe(rollout * generation, update, tokens, keep, curve)
        return controller.keep


def settle(batch: Batch, mode: str, share: float, fixed: float, steps: int, seed: int, prompts: bool = True) -> float:
    """Return where the controller stands after so many steps; see `World`."""
    return World(batch, mode, prompts).settle(share, fixed, steps, seed)


def best_keep(world: World, share: float, fixed: float) -> float:
    """Return the fixed keep of GRID with the largest S."""
    return float(max(GRID, key=lambda keep: world.speed_up(keep, share, fixed)))


def rows_without_fixed_part(world: World) -> Iterator[list[str]]:
    """Yield S at .6, where the controller stands after the longer run, and at the best fixed keep."""
    for share in ROLLOUT_SHARES:
        cells = []
        for keep in (DEFAULT_KEEP, world.settle(share, 0.0, max(STEPS), 0), best_keep(world, share, 0.0)):
            cells.append(f"{world.speed_up(keep, share, 0.0):.3f} at {keep:.2f}")
        yield [f"{share:g}", *cells]


def ratios(world: World, fixed: float) -> Array:
    """Return S where the controller stands over S at .6, for every share, length of the run and seed."""
    found = []
    for share in ROLLOUT_SHARES:
        default = world.speed_up(DEFAULT_KEEP, share, fixed)
        for steps in STEPS:
            for seed in SEEDS:
                found.append(world.speed_up(world.settle(share, fixed, steps, seed), share, fixed) / default)
    return np.array(found)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=sorted(COPIES.glob("*.npz")))
    parser.add_argument("--completions", type=int, default=8)
    arguments = parser.parse_args()
    worlds = {
        (path.stem, mode): World(load(path, arguments.completions), mode) for path in arguments.files for mode in MODES
    }
    rows = [[name, mode, *row] for (name, mode), world in worlds.items() for row in rows_without_fixed_part(world)]
    print("S without a fixed part, prompts counted\n")
    print(table(["data", "mode", "rollout share s", "keep .6", "auto", "best keep"], rows))
    rows = []
    for fixed in FIXED_PARTS:
        found = {key: ratios(world, fixed) for key, world in worlds.items()}
        worst = min(found, key=lambda key: found[key].min())
        every = np.concatenate(list(found.values()))
        rows.append(
            [f"{fixed:g}", *(f"{x:.3f}" for x in (every.min(), every.mean(), every.max())), f"{worst[0]}, {worst[1]}"]
        )
    print("\nS(auto) / S(.6) by the fixed part of log-probs and update, over all files, modes, s, steps and seeds\n")
    print(table(["fixed part", "worst", "mean", "best", "the worst is"], rows))


if __name__ == "__main__":
    main()
