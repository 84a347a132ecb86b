"""The lifetimes that layouts are given: those of the simulator, to the byte."""

import random

import pytest

import holdall
from holdall.machine.presets import gpu
from holdall.planning.finish import with_traced
from holdall.registry import member_class
from holdall.simulator import check
from holdall.simulator.lifetimes import PlannedStep, joined
from holdall.testing.worlds import family, machine
from holdall.types import Problem
from holdall.types.lifetimes import Event, Lifetime, StepLifetimes, lifetimes_of

FAMILIES = ("convnet", "tied")


def planned(name, planner, device):
    model, batch = family(name)
    trace = holdall.trace(model, batch, device=device)
    hardware = gpu("rtx-4090") if device == "cuda" else machine()
    made = holdall.plan(trace, planner=planner, hardware=hardware)
    problem = Problem(trace=trace, hardware=hardware, budget={})
    return PlannedStep.of(problem, with_traced(problem, made.actions)), made


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("planner", ["nop", "chen"])
def test_the_largest_load_is_the_peak_of_the_plan_and_of_the_naive_checker(name, planner):
    step, made = planned(name, planner, "cuda")
    lifetimes, outcome = step.run()
    schedule = step.schedule
    naive = check(step.steps, {**schedule.trace.tensors, **schedule.added}, schedule.home, schedule.start)
    assert lifetimes.load == outcome.peak["gpu"] == made.predicted.peak["gpu"] == naive["gpu"]
    assert lifetimes.align == 512 and all(t.size % 512 == 0 for t in lifetimes.tensors)


def test_sizes_on_the_host_are_rounded_to_what_torch_aligns_by():
    step, _ = planned("convnet", "nop", "cpu")
    lifetimes, outcome = step.run()
    assert outcome.peak["cpu"] <= lifetimes.load < outcome.peak["cpu"] + 64 * len(lifetimes.tensors)
    assert lifetimes.align == 64


def test_backward_begins_in_the_middle_of_a_step():
    lifetimes, _ = planned("convnet", "nop", "cpu")[0].run()
    assert 0 < lifetimes.phases[0] < lifetimes.period
    assert lifetimes.phases == tuple(sorted(lifetimes.phases))


def test_parameters_are_always_there_and_activations_are_not():
    step, _ = planned("convnet", "nop", "cpu")
    lifetimes, _ = step.run()
    always = {t.key for n, t in enumerate(lifetimes.tensors) if lifetimes.is_permanent(n)}
    kinds = {step.schedule.info(key).kind.value for key in always}
    assert "param" in kinds and "activation" not in kinds


def test_allocations_and_frees_are_paired():
    found = lifetimes_of([(7, 10), (1, 4), (2, 3), (1, -1), (-1, 5), (-1, -1), (1, 4), (3, 0), (3, -1)], 1, align=4)
    assert found.period == 9
    assert found.tensors == (
        Lifetime(7, 0, 9, 12),
        Lifetime(1, 1, 3, 4),
        Lifetime(2, 2, 9, 4),
        Lifetime(-1, 4, 5, 8),
        Lifetime(1, 6, 9, 4),
    )
    assert found.load == 12 + 4 + 8


def test_a_lifetime_may_go_on_into_the_next_step():
    tensors = (Lifetime(0, 1, 3, 5), Lifetime(1, 4, 2, 7), Lifetime(2, 3, 3, 1))
    found = StepLifetimes(tensors, 6)
    assert found.load == 13
    assert found.is_permanent(2) and not found.is_permanent(1)
    assert [found.is_alive(1, moment) for moment in range(6)] == [True, True, False, False, True, True]
    first, *steps = found.events(2)
    assert first == [Event(1, False), Event(2, False)]
    body = [Event(0, False), Event(1, True), Event(0, True), Event(2, True), Event(2, False), Event(1, False)]
    assert steps == [body, body]


def test_between_two_steps_what_is_left_goes_and_what_is_missing_comes_back():
    tensors = (Lifetime(0, 0, 2, 5), Lifetime(1, 1, 4, 7))
    first, step = StepLifetimes(tensors, 4).events(1)
    assert first == [Event(0, False)]
    assert step == [Event(1, False), Event(0, True), Event(1, True), Event(0, False)]


@pytest.mark.parametrize("name", ["convnet", "tied", "twice"])
def test_searched_layouts_of_planned_steps_reserve_at_most_two_percent_more_than_is_live(name):
    lifetimes, outcome = planned(name, "chen", "cuda")[0].run()
    for layout in ("imanishi", "minimalloc", "roam"):
        assert member_class("layouts", layout)()(lifetimes).reserved <= 1.02 * outcome.peak["gpu"], layout


def test_steps_counted_from_another_moment_have_the_same_loads_and_overlaps():
    rng = random.Random(5)
    for _ in range(200):
        period = rng.randint(2, 12)
        tensors = []
        for key in range(rng.randint(1, 7)):
            begin, end = rng.randrange(period), rng.randint(1, period)
            tensors.append(Lifetime(key, begin, end, 8 * rng.randint(1, 4)))
        tensors.sort(key=lambda t: t.begin)
        whole = StepLifetimes(tuple(tensors), period, 8)
        moment = rng.randrange(period)
        turned, numbers = whole.turned(moment)
        assert sorted(numbers) == list(range(len(tensors)))
        assert turned.loads == [whole.loads[(m + moment) % period] for m in range(period)]
        for new, old in enumerate(numbers):
            assert turned.tensors[new].key == whole.tensors[old].key
            assert turned.length(new) == whole.length(old)
            assert [turned.is_alive(new, (m - moment) % period) for m in range(period)] == [
                whole.is_alive(old, m) for m in range(period)
            ]


def test_a_tensor_that_steps_leave_to_the_next_is_one_lifetime():
    at_start, left, other = Lifetime(1, 0, 3, 8), Lifetime(2, 5, 9, 8), Lifetime(3, 2, 4, 8)
    steps = StepLifetimes((at_start, other, left), 9)
    assert list(joined(steps, {1: 2})) == [other, Lifetime(2, 5, 3, 8)]
    assert list(joined(steps, {})) == [at_start, other, left]
    ended = StepLifetimes((at_start, other, Lifetime(2, 5, 8, 8)), 9)  # freed within its step: nothing is left to the next
    assert list(joined(ended, {1: 2})) == list(ended.tensors)
