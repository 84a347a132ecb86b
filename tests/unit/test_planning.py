"""`auto` against brute force: every combination of what may be done with each block, simulated whole."""

import gc
import itertools
import math
import random
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import holdall
from holdall.actions.offload import held
from holdall.actions.recompute import WHOLE
from holdall.errors import Infeasible
from holdall.planners.auto import Auto, PlacementSearch
from holdall.planners.auto.across_blocks import plans_across_blocks
from holdall.planners.auto.hidden_offload import hidden_offloads
from holdall.planners.auto.placements import PlacementShape
from holdall.planners.auto.search import CLOSE
from holdall.planning.chain_dp import best_choices
from holdall.planning.menus import make_menus, offered, try_offered
from holdall.simulator import simulate
from holdall.testing.contracts import UNLIMITED, traced
from holdall.testing.stand_ins import updates_via_device_take
from holdall.testing.worlds import chain, family, machine
from holdall.types import KEEP, Problem


def problem(trace, *, budget=UNLIMITED, overlap=False, rate=40.0):
    """Copies at 40 bytes a second: for these chains neither free nor hopeless."""
    return Problem(trace=trace, hardware=machine(overlap=overlap, read=rate, write=rate), budget={"cpu": budget})


def blocks_of(trace):
    return [b for b in trace.blocks if b.backward is not None and b.saves]


def every_outcome(asked, labels=None):
    """(peak, seconds, labels) of each combination of what may be done with each block, before the menus leave out what they
    think useless. `labels`: of the choices, these."""
    blocks = blocks_of(asked.trace)
    found = []
    menus = [[c for c in (KEEP, *offered(asked, block)) if labels is None or c.label in labels] for block in blocks]
    for combination in itertools.product(*menus):
        actions = [a for block, choice in zip(blocks, combination, strict=True) for a in choice.on(asked.trace, block)]
        got = simulate(asked, actions)
        found.append((got.peak["cpu"], got.seconds, [choice.label for choice in combination]))
    return found


def planned(asked):
    try:
        return Auto()(asked)
    except Infeasible:
        return None


def random_chain(rng):
    n = rng.randint(2, 4)
    return chain([rng.randint(5, 120) for _ in range(n)], [rng.choice([0.3, 1.0, 2.5]) * rng.uniform(0.5, 2) for _ in range(n)])


def some_budgets(everything):
    """From what nothing meets to what everything meets, through what single combinations need."""
    peaks = sorted({peak for peak, _, _ in everything})
    step = max(1, len(peaks) // 5)
    return [peaks[0] - 1, *peaks[::step], peaks[-1]]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("overlap", [False, True])
def test_auto_finds_the_fastest_mix_that_fits(seed, overlap):
    trace = random_chain(random.Random(seed))
    rate = [10.0, 40.0, 100.0, 400.0][seed % 4]
    asked = problem(trace, overlap=overlap, rate=rate)
    everything = every_outcome(asked)
    for budget in some_budgets(everything):
        fitting = [(seconds, labels) for peak, seconds, labels in everything if peak <= budget]
        plan = planned(problem(trace, budget=budget, overlap=overlap, rate=rate))
        if not fitting:
            assert plan is None or plan.predicted.peak["cpu"] <= budget  # segments may still fit
            continue
        least, labels = min(fitting)
        assert plan is not None, (budget, labels)
        assert plan.predicted.peak["cpu"] <= budget
        said = plan.predicted.seconds
        if any(getattr(a, "until", "") for a in plan.actions):  # copies that take longer than one block are not among the mixes
            assert said <= least, (budget, labels, plan.actions)
        else:
            across = plans_across_blocks(problem(trace, budget=budget, overlap=overlap, rate=rate))
            least = min([least, *(p.predicted.seconds for p in across if CLOSE * p.predicted.seconds < least)])
            assert said == pytest.approx(least, rel=1e-9), (budget, labels, plan.actions)


def test_blocks_leave_meanwhile_where_the_link_is_slow():
    """A copy takes as long as several blocks: offloading the first is free, where the next block alone cannot hide it."""
    found = []
    for seed in range(12):
        trace = random_chain(random.Random(seed))
        asked = problem(trace, overlap=True, rate=[10.0, 40.0, 100.0, 400.0][seed % 4])
        menus = try_offered(asked)
        items = menus.items(asked)
        for one in itertools.chain.from_iterable(hidden_offloads(asked, menus, items)):
            outcome = simulate(asked, one.actions)
            assert outcome.stall_seconds == pytest.approx(0.0, abs=1e-9), (seed, one)
            assert outcome.peak["cpu"] <= simulate(asked, []).peak["cpu"]
            block = trace.block(one.block)
            found.append(one.actions[-1].until != trace.blocks[block.id + 1].name)
    assert any(found)


def test_more_blocks_leave_where_programs_keep_less_of_them():
    """The cheapest results are made again, and the link has room for another block."""
    trace = traced("tiny-llama")[3]
    asked = problem(trace, overlap=True)
    forward = sum(op.seconds for op in trace.ops[: trace.blocks[-1].last])
    size = next(c.out for c in try_offered(asked).found[trace.blocks[2].id] if c.choice == held(late=True))
    asked = problem(trace, overlap=True, rate=2.2 * size / forward)
    menus = try_offered(asked)
    whole, by_program = hidden_offloads(asked, menus, menus.items(asked))
    assert len(by_program) >= len(whole) > 0
    assert all([a.name for a in one.actions] == ["offload"] for one in whole)
    assert any([a.name for a in one.actions] == ["reschedule", "offload"] for one in by_program)
    moved = [sum(simulate(asked, one.actions).peak.get("far", 0) for one in some[:1]) for some in (whole, by_program)]
    assert 0 < moved[1] < moved[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlap", [False, True])
def test_the_dynamic_program_knows_the_smallest_peak_and_its_price(seed, overlap):
    asked = problem(random_chain(random.Random(100 + seed)), overlap=overlap)
    items = make_menus(asked)
    everything = every_outcome(asked)
    smallest = min(peak for peak, _, _ in everything)
    least = min(seconds for peak, seconds, _ in everything if peak == smallest)
    assert best_choices(items, smallest - 1, asked.hardware) is None
    found = best_choices(items, smallest, asked.hardware)
    assert found is not None
    assert sum(op.seconds for op in asked.trace.ops) + found[0] == pytest.approx(least, rel=1e-9)
    assert best_choices(items, UNLIMITED, asked.hardware)[0] == 0


def test_auto_finds_the_fastest_mix_for_a_real_model():
    trace = traced("tied")[3]
    asked = problem(trace, rate=1e9)
    everything = every_outcome(asked, ("keep", "recompute", "offload"))
    kept = simulate(asked, []).peak["cpu"]
    lowest = min(peak for peak, _, _ in everything)
    budget = (kept + lowest) // 2
    plan = planned(problem(trace, budget=budget, rate=1e9))
    least = min(seconds for peak, seconds, _ in everything if peak <= budget)
    assert plan is not None
    assert plan.predicted.peak["cpu"] <= budget
    assert plan.predicted.seconds <= least * (1 + 1e-9)  # it may also keep single ops' results, which may be faster still


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hundred_blocks_are_planned_in_seconds(overlap):
    rng = random.Random(5)
    trace = chain([rng.randint(5, 500) for _ in range(100)], [rng.uniform(0.1, 3) for _ in range(100)])
    kept = simulate(problem(trace), []).peak["cpu"]
    began = time.process_time()  # of this process: others may share the machine
    plan = planned(problem(trace, budget=kept * 2 // 3, overlap=overlap))
    assert time.process_time() - began < 15
    assert plan is not None
    assert plan.predicted.peak["cpu"] <= kept * 2 // 3


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("choice", [lambda _: WHOLE, lambda overlap: held(late=overlap)], ids=["recompute", "offload"])
def test_auto_is_never_slower_than_one_rule_for_all(choice, overlap):
    for seed in range(15):
        trace = random_chain(random.Random(seed))
        asked = problem(trace, overlap=overlap, rate=[10.0, 40.0, 1000.0][seed % 3])
        actions = [a for block in blocks_of(trace) for a in choice(overlap).on(trace, block)]
        rule = simulate(asked, actions)
        for budget in (rule.peak["cpu"], rule.peak["cpu"] + 15):
            plan = planned(Problem(trace=trace, hardware=asked.hardware, budget={"cpu": budget}))
            assert plan is not None
            assert plan.predicted.seconds <= rule.seconds * (1 + 1e-9)


def test_a_refusal_at_the_optimizers_temporaries_says_how_to_avoid_them():
    model, batch = family("tied")
    trace = holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters(), foreach=True))
    with pytest.raises(holdall.Infeasible) as refused:
        holdall.plan(trace, budget=1, hardware=machine(), allow=("recompute", "offload"))
    assert "fused=True" in refused.value.hint


def test_where_nothing_else_fits_copies_are_waited_for():
    """The least of all is refused with the bytes that it needs, and with those it is planned."""
    trace = _with_states()
    asked = Problem(trace=trace, hardware=machine(overlap=True), budget={"cpu": 1, "far": 2**40})
    with pytest.raises(Infeasible) as refused:
        Auto()(asked)
    budget = {"cpu": refused.value.smallest, "far": 2**40}
    plan = Auto()(Problem(trace=trace, hardware=machine(overlap=True), budget=budget))
    (place,) = [a for a in plan.actions if a.name == "place"]
    assert not place.overlap
    assert any("copies do not overlap" in line for line in plan.why)
    assert plan.predicted.peak["cpu"] <= refused.value.smallest
    roomy = Auto()(
        Problem(trace=trace, hardware=machine(overlap=True), budget={"cpu": 2 * refused.value.smallest, "far": 2**40})
    )
    assert all(a.overlap for a in roomy.actions if a.name == "place")


def _with_states():
    """Layers whose weights are most of what there is."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return holdall.trace(model, torch.randn(4, 64), optimizer=optimizer, loss=lambda model, x: model(x).sum())


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("was_on", [True, False])
def test_pythons_collector_is_as_it_was_after_planning(fits, was_on):
    trace = chain([10, 20], [1.0, 1.0])
    (gc.enable if was_on else gc.disable)()
    try:
        with nullcontext() if fits else pytest.raises(Infeasible):
            holdall.plan(trace, planner="nop", budget=UNLIMITED if fits else 1, hardware=machine())
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({}, "overlap_forward"),
        ({"reads_gradients": False}, "backward"),
        ({"reads_gradients": False, "accumulate": 2}, "overlap_forward"),
    ],
)
def test_the_host_updates_as_early_as_the_loop_permits(options, when):
    trace = traced("tied")[3]
    budget = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    plan = holdall.plan(trace, budget=budget, hardware=machine(overlap=True), allow=["place"], **options)
    assert [a.when for a in plan.actions if a.name == "place"] == [when]


@pytest.mark.parametrize(("via_device", "below"), [(None, 0.88 * 3.0), (False, None), (True, math.inf)])
def test_updates_via_the_device_must_save_an_eighth_unless_asked_for(via_device, below):
    """The shorter of two placements takes 3 s without them."""
    hardware = replace(machine(), updates=6.0, updates_beside=3.0)
    search = PlacementSearch(Problem(trace=chain([10, 10]), hardware=hardware, budget={}), via_device=via_device, ahead=False)
    asked = []

    def least(_, problem, spread, **__):
        return {2: 4.0, 1: 3.0}[spread.device]

    def passing(*_, below=math.inf):
        asked.append(below)
        return 0.0, None

    shapes = [PlacementShape(n, 0, via_device=False) for n in (2, 1)]
    with updates_via_device_take(least, passing):
        how = search._how_to_pass(search.problem, shapes)
    assert asked == ([] if below is None else [below])
    assert how == (replace(shapes[0], via_device=True) if via_device else None)
