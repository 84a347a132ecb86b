"""More candidates for `auto` where blocks are a layer or two, as in VGG: the plans of members that move single tensors.

The menus choose for each block, and what a block keeps or recomputes begins and ends with it. That does little where a block is
one layer: its result is its neighbour's input, and computing it again takes as long as it took. Both members judge every
decision by the whole step. They leave model states where they are, and run block by block, as `auto`'s own plans do: a program
of the whole model would replace the model's forward, which trainers replace too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdall.errors import HoldallError
from holdall.planners.superneurons import Superneurons
from holdall.planners.tsplit import Tsplit
from holdall.types import Phase, Plan, Planner, Problem
from holdall.types.plan import silent

SMALL = 16  # ops of a block's forward, on average, and
MOST = 1000  # ops of the step, up to which these are asked: planning takes a few seconds there
MEMBERS: tuple[Planner, ...] = (Tsplit(pieces=1), Superneurons())  # pieces change last bits: they are a last resort


def has_small_blocks(problem: Problem) -> bool:
    """Are the blocks so small that plans across blocks may be faster? Not for steps whose states or ops `auto` must change."""
    trace = problem.trace
    if len(trace.ops) > MOST or problem.layout or trace.about.shards is not None or trace.about.precision is not None:
        return False
    return sum(op.site.phase is Phase.FORWARD for op in trace.ops) <= SMALL * len(trace.blocks)


def plans_across_blocks(problem: Problem) -> Iterator[Plan]:
    """Plans within the budget."""
    if not has_small_blocks(problem):
        return
    for member in MEMBERS:
        try:
            yield member(replace(problem, progress=silent))
        except HoldallError:  # it has no plan for this model or this budget
            continue
