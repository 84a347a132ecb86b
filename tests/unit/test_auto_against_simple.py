"""`auto` is never said to be slower than what anyone would do by hand in the same memory."""

from functools import cache

import pytest
import torch

import holdall
from holdall import api
from holdall.errors import HoldallError
from holdall.planning.finish import over_budget
from holdall.problem import make_problem
from holdall.simulator import simulate
from holdall.testing.worlds import family, machine

MACHINE = machine(overlap=True)
SIMPLE = {
    "chen": [{"variant": v} for v in ("sqrt", "greedy", "all", "articulation", "recursive")],
    "korthikanti": [{}],
    "zero_offload": [{}, {"overlap": True}],
    "protrain": [{}],
}
WORLDS = [("tiny-llama", "bf16"), ("tiny-llama", None), ("tiny-gpt2", None), ("tied", None)]


@cache
def traced(name, precision):
    model, batch = family(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return holdall.trace(model, batch, optimizer=optimizer, precision=precision)


def plan(trace, budget, planner, **options):
    try:
        return api.plan(trace, budget=budget, hardware=MACHINE, planner=planner, **options)
    except HoldallError:
        return None


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
@pytest.mark.parametrize(("name", "precision"), WORLDS)
def test_auto_is_no_slower_than_any_simple_planner_in_the_same_memory(name, precision, share):
    if "tiny" in name:
        pytest.importorskip("transformers")
    trace = traced(name, precision)
    problem = make_problem(trace, hardware=MACHINE)
    budget = int(share * simulate(problem, []).peak[problem.home])
    mine = plan(trace, budget, "auto")
    for planner, every in SIMPLE.items():
        for options in every:
            other = plan(trace, budget, planner, **options)
            if other is None or over_budget(problem, other.predicted):
                continue
            assert mine is not None, f"{planner} fits and auto does not"
            assert (
                mine.predicted.seconds <= other.predicted.seconds * 1.02
            )  # what `auto` gives up for plans that are fast whether clipped or not, f"{planner} {options}"
