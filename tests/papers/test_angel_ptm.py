"""Angel-PTM (Nie et al., VLDB 2023): pages, the scheduler that hoists moves, and its plans in training."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

import holdall
from holdall.errors import InvalidInput
from holdall.planners.angel_ptm import (
    Lifetimes,
    Move,
    PageTable,
    cache_states,
    keep,
    occupied,
    paged,
    schedule,
    units_ahead,
)
from holdall.problem import make_problem
from holdall.simulator import simulate
from holdall.testing.oracles import step_of_units
from holdall.testing.placed import measured_as_predicted, plain_peak, plan_family, run_beside_plain, trace_of
from holdall.testing.worlds import machine

FAMILIES = {"tied": 0.5, "tiny-gpt2": 0.45, "tiny-llama": 0.45, "tiny-vit": 0.4}


def place_of(plan):
    return next(a for a in plan.actions if a.name == "place")


def lives_of(weights, others, *, states=None, fixed=()):
    order = (*range(len(weights)), *reversed(range(len(weights))))
    return Lifetimes(
        traced=step_of_units(list(weights)),
        page=1,
        weights=tuple(weights),
        states=tuple(states or [4 * w for w in weights]),
        fixed=frozenset(fixed),
        uses=order,
        others=tuple(others),
    )


def random_lives(rng):
    count = rng.randint(2, 7)
    return lives_of([rng.randint(1, 9) for _ in range(count)], [rng.randint(0, 30) for _ in range(2 * count)])


# pages


@pytest.mark.parametrize("seed", range(3))
def test_pages_hold_two_tensors_and_waste_less_than_one_a_tensor(seed):
    """Check (2) of the catalogue: under random allocations and releases; every byte of every tensor is there once."""
    rng = random.Random(seed)
    table, live = PageTable(64), {}
    for tensor in range(150):
        live[tensor] = rng.choice([rng.randint(1, 63), rng.randint(1, 300), 64, 128])
        pages = table.allocate(tensor, live[tensor])
        assert len(pages) == -(-live[tensor] // 64)
        if rng.random() < 0.4:
            gone = rng.choice(list(live))
            table.release(gone)
            del live[gone]
        assert all(1 <= len(held) <= 2 and sum(held.values()) <= 64 for held in table.pages.values())
        for one, nbytes in live.items():
            assert sum(held.get(one, 0) for held in table.pages.values()) == nbytes
        assert table.nbytes - sum(live.values()) < 64 * max(1, len(live))
    assert any(len(held) == 2 for held in table.pages.values())


def test_tails_share_a_page():
    assert paged([70, 50], 64) == 128  # 64 and 6 + 50
    assert paged([10] * 4, 64) == 128  # two and two
    assert paged([64, 64], 64) == 128
    assert paged([], 64) == 0


# the scheduler


@pytest.mark.parametrize("seed", range(3))
def test_hoisted_moves_fit_come_no_later_and_cannot_come_earlier(seed):
    """Check (1): bytes of every moment, by a count of their own; each move one moment earlier would break a rule."""
    rng = random.Random(seed)
    hoisted = 0
    for _ in range(60):
        lives = random_lives(rng)
        limit = rng.randint(20, 90)
        kept = keep(lives, limit)
        if max(occupied(lives, kept, ())) > limit:
            continue
        late, early = (schedule(lives, kept, limit, hoist=hoist) for hoist in (False, True))
        assert [(m.unit, m.use) for m in late] == [(m.unit, m.use) for m in early]
        assert all(m.begins == m.use for m in late)
        assert all(a.begins <= b.begins for a, b in zip(early, late, strict=True))
        assert all(a.begins <= b.begins for a, b in pairwise(early))  # the link serves them in order
        assert all(a.use < b.begins for n, a in enumerate(early) for b in early[n + 1 :] if a.unit == b.unit)

        def bytes_at(now, moves, lives=lives, kept=kept):
            there = sum(lives.weights[m.unit] for m in moves if m.begins <= now <= m.use)
            return lives.others[now] + sum(lives.weights[n] for n in kept) + there

        assert all(bytes_at(now, early) <= limit for now in range(len(lives.uses)))
        for n, move in enumerate(early):
            hoisted += move.begins < move.use
            if move.begins == 0 or (n and early[n - 1].begins == move.begins):
                continue
            if any(m.unit == move.unit and m.use == move.begins - 1 for m in early):
                continue  # it is there, and leaves only now
            before = [*early[:n], move._replace(begins=move.begins - 1), *(m._replace(begins=m.use) for m in early[n + 1 :])]
            assert bytes_at(move.begins - 1, before) > limit
    assert hoisted > 20


@pytest.mark.parametrize("slots", [1, 2])
def test_the_most_first_units_stay_that_fit(slots):
    rng = random.Random(slots)
    several = set()
    for _ in range(60):
        lives, limit = random_lives(rng), rng.randint(20, 90)
        count = len(lives.weights)

        def fits(n, lives=lives, limit=limit, count=count):
            rest = sorted(lives.weights[n:])
            spare = sum(rest[-slots:-1]) if slots > 1 else 0
            stays = sum(lives.weights[:n])
            use = max(o + (lives.weights[u] if u >= n else 0) for u, o in zip(lives.uses, lives.others, strict=True))
            return stays + use + spare <= limit

        most = next((n - 1 for n in range(1, count + 1) if not fits(n)), count)
        assert keep(lives, limit, slots=slots) == set(range(most))
        several.add(most)
    assert len(several) > 3


def test_states_are_cached_where_every_moment_has_room():
    lives = lives_of([2, 2, 2], [10, 0, 0, 0, 0, 20], states=[5, 5, 5])
    kept = {0, 1, 2}
    assert [len(cache_states(lives, kept, (), limit)) for limit in (26, 30, 31, 36, 41)] == [0, 0, 1, 2, 3]
    assert cache_states(lives, {0, 1}, [Move(2, 5, 0)], 31) == [0]
    first = lives_of([2, 2, 2], [20, 0, 0, 0, 0, 10], states=[5, 5, 5])
    assert [cache_states(first, {0, 1}, [Move(2, 2, begins)], 30) for begins in (2, 0)] == [[0], []]  # on its way at the peak


def test_the_shortest_hoist_counts_and_the_first_of_a_pass_do_not():
    lives = lives_of([1, 1, 1, 1], [0] * 8)
    moves = schedule(lives, set(), 100, hoist=True)
    assert units_ahead(lives, moves) == 4  # all begin with their pass
    one = [Move(n, n, max(0, n - 1)) for n in range(4)] + [Move(3 - n, 4 + n, max(4, 3 + n)) for n in range(4)]
    assert units_ahead(lives, one) == 1
    assert units_ahead(lives, [m._replace(begins=m.use) for m in moves]) == 0
    assert units_ahead(lives, []) == 0


# plans


def test_hoisting_is_never_slower_in_the_simulator():
    """Check (1): the same units stay; on a link that takes as long as the computation, moves ahead save time."""
    hardware = machine(overlap=True, read=2e7, write=2e7)
    problem = make_problem(trace_of("tied"), hardware=hardware)
    for share in (0.55, 0.6):
        plan = plan_family("tied", "angel_ptm", share, hardware=hardware, recompute=False)
        place = place_of(plan)
        assert place.overlap and plan.predicted.peak["cpu"] <= share * plain_peak("tied")
        on_demand = simulate(problem, [replace(place, overlap=False)])
        assert plan.predicted.seconds < 0.99 * on_demand.seconds


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_plain_trainings_bit_for_bit(name):
    plan = plan_family(name, "angel_ptm", FAMILIES[name])
    same, harness = run_beside_plain(name, plan)
    assert (
        place_of(plan)
        and same
        and measured_as_predicted(harness, within=0.01 * name.startswith("tiny"))
        and harness.notes == []
    )


def test_updates_in_backward_are_plain_trainings_too():
    plan = plan_family("tied", "angel_ptm", 0.5, reads_gradients=False)
    assert place_of(plan).when == "backward"
    same, harness = run_beside_plain("tied", plan, reads_gradients=False)
    assert same and measured_as_predicted(harness)


def test_late_copies_change_nothing():
    plan = plan_family("tied", "angel_ptm", 0.55)
    assert place_of(plan).overlap and any(w == "streamed" for _, w, _ in place_of(plan).units)
    same, _ = run_beside_plain("tied", plan, seed=11)
    assert same


def test_fit_takes_it_by_name():
    same, harness = run_beside_plain("tied", budget=int(0.5 * plain_peak("tied")), planner="angel_ptm")
    assert same and harness.plan.planner == "angel_ptm" and place_of(harness.plan)


def test_wrong_pages_and_too_small_budgets_are_refused():
    with pytest.raises(InvalidInput, match="page"):
        plan_family("tied", "angel_ptm", page=-1)
    with pytest.raises(holdall.Infeasible):
        plan_family("tied", "angel_ptm", 0.05)
