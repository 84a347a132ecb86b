"""A device whose ops are short waits for the thread that launches them, and predictions say so."""

from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.recompute import Recompute
from holdall.cost import launching
from holdall.experiments.workload import describe_workload
from holdall.simulator import simulate
from holdall.simulator.clock import Clock
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import family
from holdall.types import Phase


@pytest.fixture(scope="module")
def problem():
    model, batch = family("tiny-llama")
    trace = holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    return problem_for(trace)


def _on(problem, *, device, overhead, seconds):
    """The same step where every op takes so long on the device."""
    ops = tuple(replace(op, seconds=seconds) for op in problem.trace.ops)
    hardware = replace(problem.hardware, device=device, overhead=overhead, overlap=device == "cuda")
    return replace(problem, trace=replace(problem.trace, ops=ops), hardware=hardware)


def test_the_device_waits_for_launches_that_take_longer_than_ops(problem):
    clock = Clock(problem.hardware)
    for _ in range(10):
        clock.launch(3.0)
        clock.compute(1.0)
    assert clock.run() == 31.0  # the last op begins when it has been launched


def test_launches_hide_behind_ops_that_take_longer(problem):
    clock = Clock(problem.hardware)
    for _ in range(10):
        clock.launch(1.0)
        clock.compute(3.0)
    assert clock.run() == 31.0  # all but the first


def test_a_lead_over_the_device_is_spent_on_short_ops(problem):
    clock = Clock(problem.hardware)
    for launch, seconds in [(1.0, 10.0), *[(2.0, 1.0)] * 5]:
        clock.launch(launch)
        clock.compute(seconds)
    clock.wait([])  # another task begins; the thread goes on launching
    clock.launch(9.0)
    clock.compute(1.0)
    assert clock.run() == 21.0  # launched after 1 + 5 * 2 + 9


@pytest.mark.parametrize(("overhead", "is_slow"), [(1e-9, False), (1.0, True)])
def test_a_step_of_short_ops_takes_as_long_as_its_launches(problem, overhead, is_slow):
    given = _on(problem, device="cuda", overhead=overhead, seconds=1e-3)
    said = simulate(given, []).seconds
    work = 1e-3 * len(given.trace.ops)
    launches = overhead * sum(launching.starts(given.trace))
    assert said == pytest.approx(launches + 1e-3 if is_slow else work, rel=1e-3)


def test_recomputing_costs_launches(problem):
    given = _on(problem, device="cuda", overhead=1.0, seconds=1e-6)
    block = next(b for b in given.trace.blocks if b.saves and "layers" in b.name)
    plain, again = (simulate(given, a).seconds for a in ([], [Recompute.of(given.trace, [block])]))
    assert again - plain > 0.5 * (block.last - block.first)


def test_a_cpu_has_no_launches(problem):
    given = _on(problem, device="cpu", overhead=1.0, seconds=1e-3)
    assert simulate(given, []).seconds == pytest.approx(1e-3 * len(given.trace.ops))


def test_products_take_longer_to_launch_than_sums(problem):
    starts = launching.starts(problem.trace)
    of = {op.site.op: starts[op.id] for op in problem.trace.ops if op.site.phase is Phase.FORWARD}
    assert of["aten.mm.default"] > of["aten.add.Tensor"]


def test_auto_is_not_behind_pofo_where_launches_decide_the_time():
    """A block that is computed again is launched again, which takes longer than copies that go on while the device waits."""
    pytest.importorskip("transformers")
    workload = describe_workload("tiny-gpt2", batch=2, seq=64, dtype="float32", optimizer="adamw", precision=None)
    trace = workload.trace("cuda")
    found = {name: holdall.plan(trace, budget="6.9MiB", planner=name, hardware="rtx-4090") for name in ("auto", "pofo")}
    assert not found["pofo"].predicted.cramped
    assert found["auto"].predicted.seconds <= 1.02 * found["pofo"].predicted.seconds
