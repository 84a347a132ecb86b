"""STAlloc (2025): layers of equal sizes planned from one step, and an arena that serves requests by their number."""

import random
from dataclasses import replace

import pytest

from holdall.layouts.stalloc import STAlloc
from holdall.packing import LaidOut
from holdall.packing.arena import PlannedArena
from holdall.packing.check import check_layout
from holdall.testing.oracles import training_lifetimes
from holdall.types.lifetimes import Lifetime, StepLifetimes

SEEDS = range(6)


def arena_of(found):
    layout = STAlloc()(found)
    return PlannedArena(found, layout, range(len(found.tensors))), layout


def serve(arena, found, layout=None, *, extra=()):
    """One step; `extra`: (moment number, size) of requests that are not in the plan. Returns how many fell back."""
    before = arena.fallen
    arena.begin_step()
    (_, events) = found.events(1)
    unplanned = dict(extra)
    for count, (number, is_free) in enumerate(events):
        if count in unplanned:
            arena.alloc(10_000 + count, unplanned[count])
        if is_free:
            arena.free(number)
        else:
            offset = arena.alloc(number, found.tensors[number].size)
            assert layout is None or offset == layout.offsets[number]
    for count in unplanned:
        arena.free(10_000 + count)
    return arena.fallen - before


@pytest.mark.parametrize("seed", SEEDS)
def test_no_two_requests_overlap_in_time_and_address(seed):
    found = training_lifetimes(random.Random(seed), 18, recompute=bool(seed % 2))
    check_layout(found, STAlloc()(found))


def test_a_transformer_with_recompute_is_planned_within_two_percent_of_the_bound():
    """All layers alike, every second one recomputed."""
    order, held = [], []
    key = iter(range(1, 100_000))

    def layer(keeps):
        made = [(next(key), size) for size in (8, 24, 8, 32, 32, 8)]
        for x, size in made:
            temporary = next(key)
            order.extend([(temporary, 512 * 2 * size), (x, 512 * size), (temporary, -1)])
        order.extend((x, -1) for x, _ in made[keeps:])
        return made[:keeps]

    for n in range(24):
        held.append((n, layer(6 if n % 2 else 1)))
    for n, kept in reversed(held):
        made = kept if n % 2 else [*layer(6), *kept]
        for x, size in reversed(made):
            gradient = next(key)
            order.extend([(gradient, 512 * size), (gradient, -1), (x, -1)])
    from holdall.types.lifetimes import lifetimes_of

    found = lifetimes_of([(x, size) for x, size in order if size > 0 or x in {y for y, s in order if s > 0}], align=512)
    layout = STAlloc()(found)
    check_layout(found, layout)
    assert layout.reserved <= 1.02 * found.load


def test_a_hundred_steps_of_the_plan_never_fall_back():
    found = training_lifetimes(random.Random(1), 5, recompute=True)
    arena, layout = arena_of(found)
    assert [serve(arena, found, layout) for _ in range(100)] == [0] * 100
    assert arena.reserved == layout.reserved


@pytest.mark.parametrize("as_planned", [False, True])
def test_an_unplanned_request_falls_back_and_the_next_step_is_the_plan_s_again(as_planned):
    found = training_lifetimes(random.Random(1), 5)
    arena, layout = arena_of(found)
    size = found.tensors[20].size if as_planned else 513
    assert serve(arena, found, extra=[(found.tensors[20].begin - 1, size)]) >= 1
    assert serve(arena, found, layout) == 0
    assert arena.reserved > layout.reserved


def test_what_is_given_out_after_a_wrong_count_never_overlaps():
    """A request of the planned size that was not planned shifts the count: each later offset is checked before it is given."""
    found = StepLifetimes((Lifetime(0, 1, 4, 4), Lifetime(1, 2, 5, 4), Lifetime(2, 6, 8, 4)), 9)
    arena = PlannedArena(found, LaidOut(reserved=8, offsets=(0, 4, 0)), range(3))
    arena.begin_step()
    assert [arena.alloc(key, 4) for key in (50, 51, 52)] == [0, 4, None]  # the third one's place is taken by the first


def test_dynamic_requests_use_what_the_plan_leaves_idle():
    found = training_lifetimes(random.Random(2), 8, recompute=True)
    temporaries = [n for n, t in enumerate(found.tensors) if t.end - t.begin == 2]
    few = frozenset(random.Random(0).sample(temporaries, 6))
    layout = STAlloc()(replace(found, dynamic=few))
    notes = layout.notes
    assert notes["planned"] + notes["dynamic"] + notes["fallback"] == 3 * len(found.tensors)
    assert notes["dynamic"] >= 3 * len(few) // 2
    assert layout.offsets is None


def test_a_dynamic_request_keeps_clear_of_what_the_plan_needs_before_it_ends():
    found = StepLifetimes((Lifetime(0, 1, 9, 4), Lifetime(1, 3, 5, 4), Lifetime(2, 6, 8, 2)), 10)
    arena = PlannedArena(found, LaidOut(reserved=8, offsets=(0, 4, 4)), range(3))
    arena.begin_step()
    assert arena.alloc(0, 4) == 0
    assert arena.alloc(50, 3, until=3) == 4  # until then nothing else comes
    arena.free(50)
    assert arena.alloc(51, 3, until=4) is None
    assert arena.alloc(1, 4) == 4
    arena.free(1)
    assert arena.alloc(52, 2, until=7) == 6  # beside the planned one, which comes first
    assert arena.alloc(2, 2) == 4


def test_groups_that_cross_phases_together_are_one_block():
    kept = [Lifetime(k, 1 + k, 20 - k, 40) for k in range(4)]
    passing = [Lifetime(10 + k, 6 + k, 7 + k, 10) for k in range(8)]
    found = StepLifetimes(tuple(sorted([*kept, *passing], key=lambda t: t.begin)), 24, phases=(10,))
    layout = STAlloc()(found)
    check_layout(found, layout)
    assert layout.notes["groups"] == 1
    assert layout.reserved == found.load
