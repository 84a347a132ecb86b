"""What the process itself takes of the host is in the plan, where the host is the farther tier."""

from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.place import Place
from holdall.fitting.plan_book import PlanBook
from holdall.machine.presets import gpu
from holdall.simulator import simulate
from holdall.tracing.process_memory import own_bytes
from holdall.types import Problem
from holdall.units import MiB

SIZE = 100 * MiB


@pytest.fixture(scope="module")
def trace():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return holdall.trace(model, torch.randn(4, 64), optimizer=optimizer, loss=lambda model, x: model(x).sum())


def on(trace, hardware, size=SIZE):
    about = replace(trace.about, process=size)
    home, host = (tier.name for tier in hardware.tiers[:2])
    return Problem(trace=replace(trace, about=about), hardware=hardware, budget={home: 2**40, host: 2**40})


def test_it_adds_to_what_the_plan_puts_there(trace):
    hardware = gpu("h200")
    place = [Place.all(trace, update="host")]
    without, got = (simulate(on(trace, hardware, size), place, checked=True).peak for size in (0, SIZE))
    host = hardware.far.name
    assert got[host] == without[host] + SIZE
    assert got[hardware.home.name] == without[hardware.home.name]


def test_a_host_that_is_too_small_for_both_is_refused(trace):
    hardware = gpu("h200")
    budget = {hardware.home.name: 2**30, hardware.far.name: SIZE}
    holdall.plan(on(trace, hardware, 0).trace, planner="zero_offload", budget=budget, hardware=hardware)
    with pytest.raises(holdall.Infeasible):
        holdall.plan(on(trace, hardware).trace, planner="zero_offload", budget=budget, hardware=hardware)


def test_tensors_that_are_not_the_trainings_are_in_the_budget_of_the_gpu(trace):
    hardware = gpu("h200")
    peaks = []
    for size in (0, SIZE):
        held = replace(trace, about=replace(trace.about, besides=size))
        peaks.append(holdall.plan(held, planner="nop", hardware=hardware).predicted.peak[hardware.home.name])
    assert peaks[1] - peaks[0] == SIZE
    with pytest.raises(holdall.Infeasible):
        holdall.plan(held, budget=SIZE, hardware=hardware)


def test_plans_made_in_a_run_do_not_count_what_the_harness_holds(monkeypatch):
    """A longer batch is traced while the plan's own memory is taken, on the host and on the GPU."""
    found = iter([7, 7000])
    real = holdall.api.trace_calls

    def trace(*args, **kwargs):
        made, given = real(*args, **kwargs)
        size = next(found)
        return replace(made, about=replace(made.about, process=size, besides=2 * size)), given

    monkeypatch.setattr(holdall.api, "trace_calls", trace)
    model = torch.nn.Linear(8, 8)
    sizes = PlanBook(model, torch.randn(2, 8), tracing={"loss": lambda m, x: m(x).sum()}, planning={})
    for rows in (2, 4):
        about = sizes._trace(torch.randn(rows, 8)).trace.about
        assert (about.process, about.besides) == (7, 14)


def test_where_a_cpu_computes_its_memory_is_the_budget_already(trace):
    hardware = replace(gpu("h200"), device="cpu")
    assert hardware.far.name not in simulate(on(trace, hardware), []).peak


def test_traces_for_a_gpu_that_is_not_here_know_nothing_of_it(trace):
    assert trace.about.process == trace.about.besides == 0


def test_what_is_the_models_is_not_counted_twice():
    before = own_bytes(torch.nn.Identity(), None)
    model = torch.nn.Linear(8192, 8192, bias=False)  # 256 MiB, and touched; some may be memory that was free already
    after = own_bytes(model, torch.optim.SGD(model.parameters()))
    assert abs(after - before) < 128 * MiB
    assert own_bytes(torch.nn.Identity(), None) - after > 128 * MiB
