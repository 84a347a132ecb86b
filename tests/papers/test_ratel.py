"""Ratel (ICDE 2025): its model of a step against the published figures, the convex search, updates as gradients arrive."""

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest

import holdall
from holdall.errors import InvalidInput
from holdall.planners.ratel import Iteration, Swappable, best_prefix, by_benefit, iteration_of
from holdall.problem import make_problem
from holdall.simulator import simulate
from holdall.testing.chaos import chaos
from holdall.testing.placed import FAMILIES, check_fit, check_under, place_of, rows_of, trace_of, with_disk
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import machine

pytestmark = pytest.mark.usefixtures("disk")
needs_disk = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="about systems with `posix_fallocate`")
GB = 1e9


def planned(name, *, hardware=None, **options):
    return holdall.plan(trace_of(name), planner="ratel", hardware=hardware or with_disk(overlap=True), **options)


# the model


def published(batch, disks, *, half_duplex=True):
    """TFLOPS of a 13B model on one RTX 4090: 40 layers, 5,120 wide, 1,024 tokens, all activations swapped to host memory."""
    layers, hidden, length, rate = 40, 5120, 1024, 160e12
    parameters, tokens = 12 * layers * hidden**2 + 50257 * hidden, batch * length
    forward = 2 * parameters * tokens + 4 * layers * batch * length**2 * hidden
    found = Iteration(
        forward=forward / rate,
        weights=2 * parameters,
        gradients=2 * parameters,
        inter=0.0,
        states_read=12 * parameters,
        states_written=14 * parameters,
        update=0.0,
        h2d=25 * GB,
        d2h=25 * GB,
        disk_read=min(6.5 * disks, 32) * GB,
        disk_write=min(3.4 * disks, 32) * GB,
        half_duplex=half_duplex,
    )
    return 3 * forward / found.seconds() / 1e12


DISKS = (1, 2, 3, 6, 12)
PUBLISHED = {
    32: (37.5, 64.3, 81.1, 121.7, 142.0),
    48: (53.1, 89.7, 121.7, 146.3, 153.9),
    64: (70.3, 111.7, 136.3, 151.5, 148.2),
}
MODELLED = {32: (30.3, 57.1, 80.8, 131.3, 156.4), 64: (57.1, 102.0, 138.3, 160.0, 160.0)}


def test_the_model_gives_the_figures_of_the_formulas():
    """Check (1): to the digit that is known of them."""
    for batch, expected in MODELLED.items():
        assert [published(batch, n) for n in DISKS] == pytest.approx(expected, abs=0.06)


def test_all_published_points_are_near_and_disks_are_half_duplex():
    """Check (1): -19 % to +10 % of 15 published points; full-duplex disks are farther off, up to +39 %."""
    half, full = [], []
    for batch, points in PUBLISHED.items():
        for disks, point in zip(DISKS, points, strict=True):
            half.append(published(batch, disks) / point - 1)
            full.append(published(batch, disks, half_duplex=False) / point - 1)
    assert len(half) == 15 and min(half) > -0.195 and max(half) < 0.105
    assert max(full) == pytest.approx(0.39, abs=0.02)
    assert sum(map(abs, half)) < sum(map(abs, full))


def test_the_slowest_of_each_half_of_a_step_decides():
    """By hand: 3 of the 10 bytes that leave spill to a disk that reads 1 and writes 2 a second."""
    ideal = {"weights": 0.0, "gradients": 0.0, "update": 0.0, "h2d": 1e9, "d2h": 1e9}
    spills = Iteration(
        forward=1.0,
        inter=10.0,
        states_read=4.0,
        states_written=2.0,
        disk_read=1.0,
        disk_write=2.0,
        host_room=7.0,
        again=3.0,
        **ideal,
    )
    assert spills.seconds() == pytest.approx(3 / 2 + (4 + 3) / 1 + 2 / 2)
    runs_again = Iteration(forward=1.0, inter=0.0, states_read=0.0, states_written=0.0, again=3.0, **ideal)
    assert runs_again.seconds() == pytest.approx(1 + 2 + 3)
    assert runs_again.seconds([Swappable(nbytes=1.0, seconds=2.0)]) == pytest.approx(1 + 2 + 1)
    assert replace(runs_again, update=30.0).seconds() == pytest.approx(1 + 30)


def random_step(rng):
    layers = [Swappable(nbytes=rng.uniform(0.1, 5), seconds=rng.uniform(0.1, 5)) for _ in range(rng.randint(1, 12))]
    iteration = Iteration(
        forward=rng.uniform(1, 20),
        weights=rng.uniform(1, 20),
        gradients=rng.uniform(1, 20),
        inter=rng.uniform(0, 5),
        states_read=rng.uniform(0, 20),
        states_written=rng.uniform(0, 20),
        update=rng.uniform(0, 10),
        h2d=rng.uniform(0.5, 5),
        d2h=rng.uniform(0.5, 5),
        disk_read=rng.uniform(0.5, 5),
        disk_write=rng.uniform(0.5, 5),
        host_room=rng.uniform(0, 20),
        again=sum(s.seconds for s in layers),
    )
    return iteration, sorted(layers, key=lambda s: -s.benefit)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_convex_in_the_bytes_swapped_and_the_first_increase_is_the_end(seed):
    """Check (2): slopes never fall along the order of benefit; the greedy end is the best of all prefixes."""
    rng = random.Random(seed)
    ends = set()
    for _ in range(150):
        iteration, layers = random_step(rng)
        times = [iteration.seconds(layers[:n]) for n in range(len(layers) + 1)]
        slopes = [(b - a) / s.nbytes for a, b, s in zip(times, times[1:], layers, strict=False)]
        assert all(b >= a - 1e-9 for a, b in pairwise(slopes))
        chosen = best_prefix(iteration, layers)
        assert times[chosen] == pytest.approx(min(times), rel=1e-12)
        ends.add("none" if not chosen else "all" if chosen == len(layers) else "inside")
    assert ends == {"none", "all", "inside"}  # the three regimes


def test_the_order_is_that_of_benefit_and_no_other_is_better():
    for seed in range(30):
        rng = random.Random(seed)
        iteration, layers = random_step(rng)
        iteration = replace(iteration, host_room=float("inf"), disk_read=1e9, disk_write=1e9)
        best = min(iteration.seconds(layers[:n]) for n in range(len(layers) + 1))
        shuffled = rng.sample(layers, len(layers))
        assert best <= min(iteration.seconds(shuffled[:n]) for n in range(len(layers) + 1)) + max(s.seconds for s in layers)
    found = by_benefit(make_problem(trace_of("tiny-gpt2"), hardware=with_disk()))
    assert [s.benefit for s in found] == sorted((s.benefit for s in found), reverse=True) and len(found) >= 4


# its plans


def test_a_fast_link_swaps_everything_and_a_slow_one_nothing():
    """The regimes in plans: by the rate of the link, with the device as it is."""
    counts = []
    for rate in (1e4, 1e15):
        hardware = replace(with_disk(overlap=True, read=1e15, write=1e15), links=(), updates=1e15)
        tiers = tuple(replace(t, read=rate, write=rate) if n else t for n, t in enumerate(hardware.tiers))
        plan = planned("tiny-gpt2", hardware=replace(hardware, tiers=tiers), tier="host")
        counts.append(plan.count().get("recompute", 0))
    assert counts[0] >= 4 and counts[1] == 0


@needs_disk
@pytest.mark.parametrize("name", FAMILIES)
def test_updates_as_gradients_arrive_train_to_the_bits_of_plain_steps(name):
    """Check (3): no clipping; states of the weights in files; two blocks swapped, the others run again."""
    plan = planned(name, reads_gradients=False, swap=2)
    assert place_of(plan).when == "backward" and set(rows_of(plan).values()) >= {("streamed", "host")}
    measured = check_under(plan, name, clip=None)
    assert measured.traffic["cpu->nvme"] > 0


@needs_disk
@pytest.mark.parametrize("name", ["tiny-llama", "convnet"])
def test_late_copies_change_nothing(name):
    check_under(planned(name, reads_gradients=False, swap=1), name, clip=None, around=chaos(seed=6))


def test_a_loop_that_clips_is_waited_for():
    """Check (5): the plan falls back to updates that begin when the norm is known, and the clipped step is exact."""
    plan = planned("tiny-gpt2", tier="host")
    assert place_of(plan).when != "backward"
    check_under(plan, "tiny-gpt2", clip=0.01)
    assert place_of(planned("tiny-gpt2", tier="host", reads_gradients=False, accumulate=2)).when != "backward"


def test_the_host_updates_one_layer_while_backward_is_at_another():
    """Check (4), in the simulator: updates begin before backward is over."""
    problem = make_problem(trace_of("tiny-llama"), hardware=replace(machine(overlap=True), updates=1e7), reads_gradients=False)
    plan = holdall.plan(trace_of("tiny-llama"), planner="ratel", hardware=problem.hardware, reads_gradients=False)
    outcome = simulate(problem, plan.actions, full=True)
    ends = max(s.end for s in outcome.lanes if s.lane == "compute")
    updates = sorted((s.start, s.end) for s in outcome.lanes if s.lane == "host")
    assert len(updates) >= 5
    assert sum(begin < ends for begin, _ in updates) >= len(updates) - 1


def test_host_memory_is_filled_first():
    everything = planned("tiny-gpt2", tier="host", swap=99)
    assert {a.tier for a in everything.actions if a.name == "offload"} == {""}
    limit = everything.predicted.peak["far"] - 1
    tight = planned("tiny-gpt2", swap=99, budget={"far": limit})
    used = [a.tier for a in tight.actions if a.name == "offload"]
    assert {"", "nvme"} >= set(used)
    least = planned("tiny-gpt2", swap=0).predicted.peak["far"]
    tight = planned("tiny-gpt2", swap=99, budget={"far": least})
    assert "nvme" in {a.tier for a in tight.actions if a.name == "offload"}
    candidates = by_benefit(make_problem(trace_of("tiny-gpt2"), hardware=with_disk(overlap=True)))
    first = planned("tiny-gpt2", swap=99, budget={"far": int(least + candidates[0].nbytes)})  # room for the first alone
    tiers = {a.block: a.tier for a in first.actions if a.name == "offload"}
    assert [tiers[c.block] for c in candidates] == ["", *["nvme"] * (len(candidates) - 1)]


def test_the_machine_and_the_trace_say_what_the_model_starts_from():
    trace, hardware = trace_of("tiny-gpt2"), with_disk(overlap=True, read=3e8, write=2e8)
    found = iteration_of(make_problem(trace, hardware=hardware), "nvme")
    assert found.update == pytest.approx(sum(u.numel for u in trace.units) / hardware.updates)
    assert (found.disk_read, found.disk_write) == (3e8, 2e8) and found.states_read == found.weights + found.gradients
    assert place_of(planned("tiny-gpt2")).prefetch == 2  # three weight blocks in all


@needs_disk
def test_fit_takes_it_by_both_names_and_wrong_options_are_refused():
    budget = {"cpu": "1GiB", "far": "1GiB", "nvme": "1GiB"}
    with planned_for(with_disk()):
        for name in ("ratel", "lohan"):
            plan = check_fit("tiny-gpt2", budget, name, clip=None, swap=1)
            assert plan.planner == name and plan.predicted.peak["nvme"] > 0
    with pytest.raises(InvalidInput, match="swap"):
        planned("convnet", swap=-1)
    with pytest.raises(InvalidInput, match="unknown tier"):
        planned("convnet", tier="attic")
