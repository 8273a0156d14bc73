"""Packing of ragged rows into micro-batches and their balance over data-parallel ranks. numpy only.

`pack` and `balance` are the two problems by themselves, `schedule` puts them together for one step, and `SequenceCost`
tells what a sequence costs a model.
"""

from verl_dppo.packing.balance import balance, makespan_lower_bound
from verl_dppo.packing.bins import bins_lower_bound, pack
from verl_dppo.packing.cost import SequenceCost
from verl_dppo.packing.schedule import PADDING, Schedule, imbalance, plan_in_order, schedule

__all__ = [
    "PADDING",
    "Schedule",
    "SequenceCost",
    "balance",
    "bins_lower_bound",
    "imbalance",
    "makespan_lower_bound",
    "pack",
    "plan_in_order",
    "schedule",
]
