"""DPPO in a policy-gradient loop of plain PyTorch. Run it with `python docs/own_loop/plain_pytorch.py`.

The policy is a small recurrent network. It is given a digit and is right if that digit is in what it writes. The parts
of a real loop are all there: groups, rollout log-probs, mini-batches, clipping, a KL term and an entropy bonus.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from verl_dppo.pruning import (
    CompletionPlan,
    deal_mini_batches,
    neyman_inclusion,
    plan_completions,
    score_magnitude,
    snake_order,
)

DIGITS, LONGEST = 8, 12
END = DIGITS
# With a KL or entropy term a completion has a gradient whatever its advantage: none is taken for smaller than this
# share of the mean magnitude, so that each can be kept.
SMALLEST_RELATIVE_MAGNITUDE = 0.05


@dataclass(frozen=True)
class Settings:
    """What a step does. `keep` is the share of response tokens with a gradient that is trained on."""

    keep: float = 0.5
    mini_batches: int = 2
    clip: float = 0.2
    kl: float = 0.0
    entropy: float = 0.0
    loss_agg_mode: str = "token-mean"
    """Or seq-mean-token-mean: each completion is averaged over its own tokens, then all over their number."""


@dataclass(frozen=True)
class Rollouts:
    """All n completions of a step, before anything is dropped: tensors for the network, arrays for the plan."""

    prompt: torch.Tensor
    response: torch.Tensor
    mask: torch.Tensor
    log_prob: torch.Tensor
    group: NDArray[np.int64]
    reward: NDArray[np.float64]
    advantage: NDArray[np.float64]

    @property
    def length(self) -> NDArray[np.float64]:
        """(n,) response tokens."""
        return self.mask.double().sum(1).numpy()

    @property
    def sum_sq_one_minus_p(self) -> NDArray[np.float64]:
        """(n,) sum of (1 - p)^2 over the response tokens, which the rollout knows for free."""
        return ((1 - self.log_prob.double().exp()) ** 2 * self.mask).sum(1).numpy()


class Policy(nn.Module):
    """Distribution of the next digit, or of END, after the prompt and what was written so far."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS + 1, size)
        self.recur = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, DIGITS + 1)

    def forward(self, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        """Return (rows, tokens, DIGITS + 1) log-probs at every token of the response."""
        read = torch.cat([prompt[:, None], response[:, :-1]], dim=1)
        return self.head(self.recur(self.embed(read))[0]).log_softmax(-1)


@torch.no_grad()
def sample(policy: Policy, prompts: int, group_size: int, rng: torch.Generator) -> Rollouts:
    """Write `group_size` completions for each of so many random digits."""
    prompt = torch.randint(DIGITS, (prompts,), generator=rng).repeat_interleave(group_size)
    response = torch.full((prompt.numel(), LONGEST), END)
    for at in range(LONGEST):
        chance = policy(prompt, response)[:, at].exp()
        response[:, at] = torch.multinomial(chance, 1, generator=rng)[:, 0]
    ended = (response == END).long().cumsum(1)
    mask = (ended - (response == END).long() == 0).float()  # END itself is a token of the response
    log_prob = policy(prompt, response).gather(2, response[:, :, None])[:, :, 0]
    reward = ((response == prompt[:, None]) & (mask > 0)).any(1).double().numpy()
    group = np.arange(prompt.numel()) // group_size
    return Rollouts(prompt, response, mask, log_prob, group, reward, full_group_advantage(reward, group))


def full_group_advantage(reward: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (n,) GRPO's advantages. They are computed BEFORE anything is dropped; equal rewards give exactly 0."""
    advantage = np.zeros_like(reward)
    for label in np.unique(group):
        own = reward[group == label]
        if own.max() > own.min():
            advantage[group == label] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    return advantage


def magnitudes(batch: Rollouts, settings: Settings) -> NDArray[np.float64]:
    """Return (n,) estimated gradient norms, 0 where there is no gradient, and only there."""
    norms = score_magnitude(batch.advantage, batch.length, batch.sum_sq_one_minus_p, settings.loss_agg_mode)
    if settings.kl or settings.entropy:
        norms = np.maximum(norms, SMALLEST_RELATIVE_MAGNITUDE * norms.mean() if norms.any() else 1.0)
    return norms


def plan_step(
    batch: Rollouts, mini_batch: NDArray[np.int64], settings: Settings, rng: np.random.Generator
) -> CompletionPlan:
    """Draw the completions of each mini-batch: dealt before, so that every optimiser step is exact by itself."""
    magnitude, target = magnitudes(batch, settings), np.zeros_like(batch.advantage)
    for k in range(settings.mini_batches):
        mine = mini_batch == k
        target[mine] = neyman_inclusion(magnitude[mine], batch.length[mine], settings.keep)
    return plan_completions(
        slope=magnitude / np.sqrt(batch.length),
        target_pi=target,
        mini_batch=mini_batch,
        order=snake_order(batch.sum_sq_one_minus_p, batch.advantage, batch.group),
        length=batch.length,
        advantage=batch.advantage,
        mini_batches=settings.mini_batches,
        multiple=1,
        floor=settings.keep / 4,
        design="pivotal",
        rng=rng,
    )


def token_terms(
    policy: Policy, reference: Policy, batch: Rollouts, rows: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """Return (rows, tokens) everything that a token adds to the loss: clipped surrogate, KL term, entropy bonus."""
    response = batch.response[rows]
    dist = policy(batch.prompt[rows], response)
    log_prob = dist.gather(2, response[:, :, None])[:, :, 0]
    ratio = (log_prob - batch.log_prob[rows]).exp()
    a = torch.as_tensor(batch.advantage)[rows, None].to(ratio)
    term = -torch.min(ratio * a, ratio.clamp(1 - settings.clip, 1 + settings.clip) * a)
    if settings.kl:
        with torch.no_grad():
            fixed = reference(batch.prompt[rows], response).gather(2, response[:, :, None])[:, :, 0]
        term = term + settings.kl * ((fixed - log_prob).exp() - (fixed - log_prob) - 1)
    if settings.entropy:
        term = term + settings.entropy * (dist.exp() * dist).sum(-1)
    return term


def mini_batch_loss(
    policy: Policy, reference: Policy, batch: Rollouts, plan: CompletionPlan, k: int, settings: Settings
) -> torch.Tensor:
    """Return the loss of one optimiser step: kept rows go through the network, weights and denominators make up."""
    rows, whole = torch.as_tensor(plan.rows[k]), plan.mini_batch == k
    term = token_terms(policy, reference, batch, rows, settings)
    mask = batch.mask[rows]
    of_completion = (term * mask).sum(1)
    if settings.loss_agg_mode == "token-mean":
        denominator = batch.length[whole].sum()  # tokens of the mini-batch as it was dealt, not of what is left of it
    else:
        of_completion = of_completion / mask.sum(1)
        denominator = whole.sum()  # completions of the mini-batch as it was dealt
    return (torch.as_tensor(plan.weight)[rows].to(term) * of_completion).sum() / float(denominator)


def train(steps: int = 60, settings: Settings | None = None, seed: int = 0) -> None:
    """Train a new policy, and print how often it is right and how much it was trained on."""
    torch.manual_seed(seed)
    settings = settings or Settings()
    policy, reference = Policy(), Policy()
    reference.load_state_dict(policy.state_dict())
    optimizer, rng = torch.optim.Adam(policy.parameters(), lr=3e-3), torch.Generator().manual_seed(seed)
    for step in range(steps):
        batch = sample(policy, prompts=16, group_size=8, rng=rng)
        draw = np.random.default_rng([seed, step])
        mini_batch = deal_mini_batches(magnitudes(batch, settings) > 0, batch.group, settings.mini_batches, draw)
        plan = plan_step(batch, mini_batch, settings, draw)
        for k in range(settings.mini_batches):
            optimizer.zero_grad()
            mini_batch_loss(policy, reference, batch, plan, k, settings).backward()
            optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            trained = batch.length[plan.kept].sum() / batch.length.sum()
            print(f"step {step}: right {batch.reward.mean():.2f}, trained on {trained:.0%} of the tokens")


if __name__ == "__main__":
    train()
