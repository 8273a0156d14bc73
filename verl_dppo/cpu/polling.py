"""Poll for finished rollouts more often.

verl's replay buffer looks for finished groups every 2 s. Where a whole step takes a few seconds, that wait is most
of it.
"""

import inspect
from types import ModuleType

from verl_dppo.post_import import when_imported

POLL_SECONDS = 0.1


def register() -> None:
    """Shorten the interval once verl imports its replay buffer."""
    when_imported("verl.trainer.ppo.v1.replay_buffer", shorten_poll_interval)


def shorten_poll_interval(replay_buffer: ModuleType) -> None:
    """Change the default of `ReplayBuffer(poll_interval=...)`; verl has no setting for it.

    Subclasses and custom samplers take the same default through `super().__init__`; a caller who names the interval
    still gets what it names.
    """
    init = replay_buffer.ReplayBuffer.__init__
    defaulted = [p for p in inspect.signature(init).parameters.values() if p.default is not p.empty]
    init.__defaults__ = tuple(POLL_SECONDS if p.name == "poll_interval" else p.default for p in defaulted)
