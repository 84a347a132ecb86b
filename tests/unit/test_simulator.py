"""The simulator against counts made by hand, and against the naive checker."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.actions.offload import Offload
from holdall.actions.recompute import Recompute
from holdall.errors import InvalidInput
from holdall.simulator import Illegal, check, close, lower, replay, simulate
from holdall.simulator.curve import memory_curve
from holdall.testing.contracts import problem_for, traced
from holdall.testing.worlds import chain, machine
from holdall.types import Copy, Drop, Kind, Problem, Run, Schedule, TensorInfo, Trace, Wait

W, X, Y, Z = 0, 1, 2, 3  # weights (there before the step), then three tensors that it makes
SIZES = {W: 100, X: 40, Y: 30, Z: 7}
SLOW = {"read": 50.0, "write": 100.0}  # bytes per second: a copy of 40 takes 0.4 s out and 0.8 s back


def world(steps=(), holds=None):
    """A step that is written by hand: no traced op, everything inserted before the first."""
    tensors = {
        x: TensorInfo(
            id=x,
            name="WXYZ"[x],
            kind=Kind.PARAM if x == W else Kind.ACTIVATION,
            shape=(size,),
            dtype="uint8",
            nbytes=size,
            born=-1 if x == W else 0,
            freed=None if x == W else -1,
        )
        for x, size in SIZES.items()
    }
    trace = Trace(ops=(), tensors=tensors, blocks=(), saves=())
    return Schedule(trace=trace, home="cpu", after={-1: list(steps)}, holds=holds or {})


def run(*writes, reads=(), seconds=0.0, **more):
    return Run(op=-1, reads=reads, writes=writes, seconds=seconds, name="work", **more)


def out(*tensors):
    return Copy(tensors=tensors, src="cpu", dst="far")


def back(*tensors):
    return Copy(tensors=tensors, src="far", dst="cpu")


def wait(*tensors):
    return Wait(tensors=tensors)


def drop(tensor, tier="cpu"):
    return Drop(tensor=tensor, tier=tier)


def outcome(steps, *, overlap=False, full=False, **rates):
    return replay(steps, world(), machine(overlap=overlap, **rates), full=full)


BY_HAND = {
    "nothing": ([], {"cpu": 100}),
    "one after the other": ([run(X), drop(X), run(Y), drop(Y)], {"cpu": 140}),
    "both at once": ([run(X), run(Y, reads=(X,)), drop(X), drop(Y)], {"cpu": 170}),
    "a workspace counts inside its op only": ([run(X, workspace=50), run(Y)], {"cpu": 190}),
    "a workspace below a later peak": ([run(X, workspace=20), run(Y)], {"cpu": 170}),
    "the weights may go": ([drop(W), run(X), run(Y)], {"cpu": 100}),
    "away while another is there": (
        [run(X), out(X), wait(X), drop(X), run(Y), drop(Y), back(X), wait(X), drop(X, "far"), run(Z, reads=(X,))],
        {"cpu": 147, "far": 40},
    ),
    "a copy takes its space when it is issued": ([run(X), out(X), wait(X), drop(X), back(X), run(Y)], {"cpu": 170, "far": 40}),
    "two in the far tier": ([run(X, Y), out(X), out(Y), wait(X, Y), drop(X), drop(X, "far")], {"cpu": 170, "far": 70}),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_peaks_are_those_counted_by_hand(case):
    steps, expected = BY_HAND[case]
    assert check(steps, world().trace.tensors, "cpu") == expected
    assert outcome(steps).peak == expected
    assert outcome(steps, overlap=True).peak == expected


ILLEGAL = {
    "reads an absent tensor": ([run(Y, reads=(X,))], "not there"),
    "reads what was dropped": ([run(X), drop(X), run(Y, reads=(X,))], "not there"),
    "changes an absent tensor": ([run(mutates=(X,))], "not there"),
    "reads before the copy has arrived": (
        [run(X), out(X), wait(X), drop(X), back(X), run(Y, reads=(X,))],
        "before its copy has arrived",
    ),
    "makes a tensor twice": ([run(X), run(X)], "there already"),
    "drops while copying out": ([run(X), out(X), drop(X)], "while it is being copied"),
    "drops the source while copying back": (
        [run(X), out(X), wait(X), drop(X), back(X), drop(X, "far")],
        "while it is being copied",
    ),
    "copies from where it is not": ([out(X)], "where it is not"),
    "copies back what never left": ([run(X), back(X)], "where it is not"),
    "copies to where it is": ([run(X), out(X), wait(X), out(X)], "where it is already"),
    "drops from where it is not": ([drop(X)], "where it is not"),
    "drops twice": ([run(X), drop(X), drop(X)], "where it is not"),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_a_schedule_that_no_machine_could_run_is_refused(case):
    steps, why = ILLEGAL[case]
    with pytest.raises(Illegal, match=why):
        check(steps, world().trace.tensors, "cpu")


def test_a_copy_may_be_read_at_its_source_while_it_leaves():
    steps = [run(X), out(X), run(Y, reads=(X,)), wait(X), drop(X), drop(Y)]
    assert check(steps, world().trace.tensors, "cpu") == {"cpu": 170, "far": 40}


def test_close_drops_at_the_last_use_and_never_what_outlives_the_step():
    steps = [run(X), run(Y, reads=(X,)), run(Z, reads=(Y,)), run(reads=(X, W))]
    closed = close(world(steps))
    assert closed == [steps[0], steps[1], steps[2], drop(Y), drop(Z), steps[3], drop(X)]


def test_close_ends_each_stay_of_a_tensor_that_leaves_and_returns():
    steps = [run(X), out(X), run(Y), wait(X), back(X), wait(X), run(Z, reads=(X,))]
    closed = close(world(steps))
    assert Counter(s for s in closed if isinstance(s, Drop)) == {
        drop(X): 2,
        drop(X, "far"): 1,
        drop(Y): 1,
        drop(Z): 1,
    }
    assert closed.index(drop(X)) == closed.index(wait(X)) + 1
    assert check(closed, world().trace.tensors, "cpu") == {"cpu": 170, "far": 40}


@pytest.mark.parametrize("held", [False, True])
def test_what_something_refers_to_stays_until_that_moment(held):
    trace = chain([50, 50])
    schedule = Schedule(trace=trace, home="cpu")
    inner = trace.saves[-2].tensor  # of the first block; its backward comes last
    if not held:
        schedule.unhold(inner, trace.saves_of(inner))
    closed = close(schedule)
    ran = [s.op for s in closed[: closed.index(drop(inner))] if isinstance(s, Run)]
    assert ran[-1] == trace.ops[-1].id  # the save held it, or else the read in backward did
    if not held:
        schedule.runs[ran[-1]] = Run(op=ran[-1], reads=(), writes=trace.ops[ran[-1]].writes)
        closed = close(schedule)
        assert [s.op for s in closed[: closed.index(drop(inner))] if isinstance(s, Run)][-1] == 1


def test_without_overlap_copies_add_their_seconds():
    steps = [run(X, seconds=1), out(X), run(Y, seconds=1), wait(X), drop(X), back(X), wait(X), run(Z, reads=(X,), seconds=1)]
    got = outcome(steps, **SLOW)
    assert got.seconds == pytest.approx(3 + 0.4 + 0.8)
    assert got.stall_seconds == pytest.approx(1.2)
    assert got.traffic == {"cpu->far": 40, "far->cpu": 40}


@pytest.mark.parametrize("work", [0.0, 0.1, 0.4, 5.0])
def test_with_overlap_a_copy_costs_what_computation_does_not_hide(work):
    got = outcome([run(X), out(X), run(Y, seconds=work), wait(X), drop(X)], overlap=True, **SLOW)
    assert got.seconds == pytest.approx(max(work, 0.4))
    assert got.stall_seconds == pytest.approx(max(0.0, 0.4 - work))
    got = outcome([run(X), out(X), wait(X), drop(X), back(X), run(Y, seconds=work), wait(X)], overlap=True, **SLOW)
    assert got.seconds == pytest.approx(0.4 + max(work, 0.8))


def test_with_overlap_a_direction_serves_its_copies_in_order():
    steps = [run(X, Y, Z), out(X), out(Y), run(seconds=0.5), wait(Y), wait(X)]
    assert outcome(steps, overlap=True, **SLOW).seconds == pytest.approx(0.7)


def test_with_overlap_the_two_directions_do_not_wait_for_each_other():
    steps = [run(X, Y), out(X), wait(X), drop(X), out(Y), back(X), wait(X, Y)]
    assert outcome(steps, overlap=True, **SLOW).seconds == pytest.approx(0.4 + 0.8)


def test_recomputation_is_counted_apart():
    got = outcome([run(X, seconds=1), drop(X), Run(op=-1, reads=(), writes=(X,), seconds=2, again=1)])
    assert (got.seconds, got.recompute_seconds) == (3, 2)


def test_who_sits_at_the_peak_adds_up_to_it():
    steps = [run(X), run(Y), drop(X), run(Z)]
    got = outcome(steps, full=True)
    assert [(h.name, h.nbytes) for h in got.at_peak] == [("W", 100), ("X", 40), ("Y", 30)]
    assert got.peak_kinds == {Kind.PARAM: 100, Kind.ACTIVATION: 70}
    assert max(m.total for m in got.timeline) == got.peak["cpu"] == 170


def mixed(trace, rng):
    """Keep, recompute (alone or in segments), offload, or both, block by block."""
    actions, i = [], 0
    while i < len(trace.blocks):
        block = trace.blocks[i]
        choice = rng.choice(["keep", "recompute", "offload", "both", "segment"])
        if choice == "segment":
            row = trace.blocks[i : i + rng.randint(2, 3)]
            actions.append(Recompute.of(trace, row))
            i += len(row) - 1
        if choice in ("recompute", "both"):
            actions.append(Recompute.of(trace, [block]))
        if choice in ("offload", "both"):
            actions.append(Offload.of(trace, block, overlap=rng.random() < 0.5))
        i += 1
    rng.shuffle(actions)
    return actions


worlds = st.lists(st.integers(1, 200), min_size=1, max_size=7)


@settings(max_examples=120, deadline=None)
@given(sizes=worlds, seed=st.integers(0, 10**6), overlap=st.booleans())
def test_the_simulator_counts_what_the_checker_counts(sizes, seed, overlap):
    trace = chain(sizes)
    problem = problem_for(trace, overlap=overlap)
    actions = mixed(trace, random.Random(seed))
    schedule = lower(problem, actions)
    steps = close(schedule)
    got = replay(steps, schedule, problem.hardware)
    assert check(steps, {**trace.tensors, **schedule.added}, "cpu") == got.peak
    assert max(memory_curve(problem, actions).high) == got.peak["cpu"]
    assert replay(steps, schedule, problem.hardware, full=True).peak == got.peak


@settings(max_examples=60, deadline=None)
@given(sizes=worlds, seed=st.integers(0, 10**6))
def test_close_writes_one_drop_per_stay(sizes, seed):
    trace = chain(sizes)
    problem = problem_for(trace)
    schedule = lower(problem, mixed(trace, random.Random(seed)))
    info = {**trace.tensors, **schedule.added}
    begun, ended = Counter(), Counter()
    begun.update((x, "cpu") for x, t in trace.tensors.items() if t.born < 0)
    for step in close(schedule):
        if isinstance(step, Run):
            begun.update((x, "cpu") for x in step.writes)
        elif isinstance(step, Copy):
            begun.update((x, step.dst) for x in step.tensors)
        elif isinstance(step, Drop):
            ended[step.tensor, step.tier] += 1
            assert ended[step.tensor, step.tier] <= begun[step.tensor, step.tier]
    stays = {key: n - ended[key] for key, n in begun.items() if n != ended[key]}
    assert stays == {(x, "cpu"): 1 for x, t in info.items() if t.freed is None and t.born < 0}


@settings(max_examples=40, deadline=None)
@given(sizes=worlds, seed=st.integers(0, 10**6))
def test_overlap_never_costs_time_and_no_overlap_adds_every_copy(sizes, seed):
    trace = chain(sizes)
    actions = mixed(trace, random.Random(seed))
    apart, beside = (
        simulate(Problem(trace=trace, hardware=machine(overlap=o, read=40, write=80), budget={}), actions)
        for o in (False, True)
    )
    base = sum(op.seconds for op in trace.ops) + apart.recompute_seconds
    copied = apart.traffic.get("cpu->far", 0) / 80 + apart.traffic.get("far->cpu", 0) / 40
    assert apart.seconds == pytest.approx(base + copied)
    assert base - 1e-9 <= beside.seconds <= apart.seconds + 1e-9
    assert beside.seconds == pytest.approx(base + beside.stall_seconds)


def test_a_real_trace_counts_the_same_in_both_and_is_at_its_peak_where_it_says():
    trace = traced("convnet")[3]
    problem = problem_for(trace)
    actions = [Recompute.of(trace, [trace.blocks[1]]), Offload.of(trace, trace.blocks[2], overlap=True)]
    got = simulate(problem, actions, full=True, checked=True)
    assert max(memory_curve(problem, actions).high) == got.peak["cpu"]
    assert sum(got.peak_kinds.values()) <= got.peak["cpu"]


def test_the_curve_counts_the_workspace_of_an_op_while_it_runs():
    trace = chain([50] * 3)
    ops = tuple(replace(op, workspace=1000 if op.id == 2 else 0) for op in trace.ops)
    plain = memory_curve(problem_for(trace), [])
    roomy = memory_curve(problem_for(replace(trace, ops=ops)), [])
    assert roomy.high[2] == plain.high[2] + 1000
    assert [h for k, h in enumerate(roomy.high) if k != 2] == [h for k, h in enumerate(plain.high) if k != 2]


def test_a_long_timeline_has_1200_points_at_most_and_the_peak_among_them():
    got = simulate(problem_for(chain([5] * 800)), [], full=True)  # 2,402 moments
    assert 600 < len(got.timeline) <= 1200
    assert max(m.total for m in got.timeline) == got.peak["cpu"]


@pytest.mark.parametrize("allocator", ["ideal", "caching", "expandable"])
def test_an_allocator_has_the_workspace_of_an_op_back_after_it(allocator):
    """Two ops with workspaces need one at a time."""
    trace = chain([50] * 3)
    for ids in ({2}, {2, 4}):
        ops = tuple(replace(op, workspace=1000 if op.id in ids else 0) for op in trace.ops)
        got = simulate(problem_for(replace(trace, ops=ops)), [], allocator=allocator)
        assert got.peak["cpu"] == simulate(problem_for(replace(trace, ops=ops)), [], checked=True).peak["cpu"]
        assert got.reserved >= got.peak["cpu"]


def test_a_block_is_treated_once_by_a_technique():
    trace = chain([50] * 3)
    twice = [Recompute.of(trace, trace.blocks[:2]), Recompute.of(trace, trace.blocks[1:2])]
    with pytest.raises(InvalidInput, match="`b1` has the action recompute twice"):
        simulate(problem_for(trace), twice)
