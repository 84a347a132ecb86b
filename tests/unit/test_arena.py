"""Steps in an arena: the C++ code that GPUs use too, over host memory, by itself and in front of torch's own allocator."""

import copy
import gc
import random
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import holdall
from holdall.errors import InvalidInput, Unsupported
from holdall.experiments.request import plain_outcome
from holdall.registry import build_member
from holdall.runtime.arena import library
from holdall.runtime.arena.step_arena import ArenaCounts, StepArena, lifetimes_of_events
from holdall.testing.worlds import HUGGING_FACE, family, machine
from holdall.types import Plan, PlannedLayout
from holdall.types.arena import lay_out
from holdall.updates.host_library import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

CPU = torch.device("cpu")
STEPS = 5
IN_ARENA = 1  # the number of the first step that lies in it
OUTSIDE = -1


def layout_of(sizes, offsets, reserved=None, brief=(), smallest=0):
    reserved = max((o + s for s, o in zip(sizes, offsets, strict=True)), default=0) if reserved is None else reserved
    given = {"sizes": tuple(sizes), "offsets": tuple(offsets), "brief": tuple(brief)}
    return PlannedLayout(name="best_fit", reserved=reserved, align=64, smallest=smallest, **given)


class Bare:
    """The C++ code by itself: sizes in, offsets out."""

    def __init__(self, layout):
        self.library = library.load()
        planned = library.table(layout.sizes, layout.offsets, layout.brief)
        limits = (max(layout.reserved, 64), layout.align, layout.smallest)
        self.handle = self.library.holdall_arena_make(0, 0, 0, *limits, *planned)
        self.library.holdall_arena_begin(self.handle, 0)

    def take(self, *sizes):
        found = [self.library.holdall_arena_take(self.handle, size) for size in sizes]
        return found[0] if len(found) == 1 else found

    def give(self, *offsets):
        for offset in offsets:
            self.library.holdall_arena_give(self.handle, offset)

    def counts(self):
        found = (library.ctypes.c_int64 * len(ArenaCounts()))()
        self.library.holdall_arena_counts(self.handle, found)
        return ArenaCounts(*found)

    def memory(self, size):
        base = self.library.holdall_arena_base(self.handle)
        return np.frombuffer((library.ctypes.c_uint8 * size).from_address(base), dtype=np.uint8)

    def begin(self):
        self.library.holdall_arena_begin(self.handle, 0)

    def drop(self):
        self.library.holdall_arena_drop(self.handle)


@pytest.fixture
def bare():
    made = []

    def make(*args, **kwargs):
        made.append(Bare(layout_of(*args, **kwargs)))
        return made[-1]

    yield make
    for arena in made:
        arena.drop()


# sizes in, offsets out


def test_requests_in_the_planned_order_have_the_planned_offsets(bare):
    arena = bare([64, 128, 64, 64], [0, 64, 192, 0])
    assert arena.take(64, 100, 1) == [0, 64, 192]  # sizes are rounded up to 64
    arena.give(0)
    assert arena.take(64) == 0
    assert arena.counts()[:5] == (4, 0, 0, 256, 256)
    arena.give(0, 64, 192)
    arena.begin()
    assert arena.take(64, 128) == [0, 64]


def test_a_request_that_is_not_planned_falls_outside_and_the_others_keep_their_places(bare):
    arena = bare([64, 128, 64], [0, 64, 192])
    assert arena.take(64, 4096, 128, 64) == [0, OUTSIDE, 64, 192]
    assert arena.counts().unknown == 1


def test_a_planned_request_that_never_comes_is_passed_over(bare):
    arena = bare([64, 4096, 128, 192], [0, 256, 64, 4352], brief=[1])
    assert arena.take(64, 128, 192) == [0, 64, 4352]


def test_results_of_an_op_may_come_in_another_order(bare):
    arena = bare([512, 64, 128, 192], [0, 512, 576, 704])
    assert arena.take(64, 128, 512, 192) == [512, 576, 0, 704]


def test_a_step_that_leaves_out_a_long_part_is_found_again(bare):
    sizes = [64 * (1 + n % 7) for n in range(60)] + [4096, 8192, 2048, 1024]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    arena = bare(sizes, offsets)
    assert arena.take(64) == 0
    assert arena.take(*sizes[60:]) == [OUTSIDE, OUTSIDE, *offsets[62:]]


def test_another_forward_of_the_same_step_begins_again(bare):
    sizes = [64, 128, 192, 256, 320]
    arena = bare(sizes, [0, 64, 192, 384, 640])
    first = arena.take(*sizes)
    arena.give(*first)
    assert arena.take(*sizes) == [OUTSIDE, OUTSIDE, *first[2:]]


def test_nothing_is_given_out_twice(bare):
    arena = bare([64, 64, 64], [0, 32 * 64, 0], reserved=64 * 64)
    assert arena.take(64, 64, 64) == [0, 2048, OUTSIDE]  # the first one lives longer than planned
    assert arena.counts().occupied == 1


@pytest.mark.parametrize("seed", range(4))
def test_live_ranges_never_share_a_byte_whatever_is_planned_and_asked_for(bare, seed):
    dice = random.Random(seed)
    sizes = [64 * dice.randint(1, 6) for _ in range(200)]
    arena = bare(sizes, [64 * dice.randint(0, 30) for _ in sizes], reserved=64 * 32)
    live = {}
    for n in range(2000):
        if live and dice.random() < 0.5:
            arena.give(live.pop(dice.choice(list(live)))[0])
        size = sizes[n % 200] if dice.random() < 0.9 else 64 * dice.randint(1, 6)
        low = arena.take(size)
        if low != OUTSIDE:
            assert low >= 0 and low + size <= 64 * 32
            live[n] = (low, low + size)
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(live.values())))
        if n % 200 == 199:
            arena.begin()
    assert arena.counts().live == sum(top - low for low, top in live.values())


def test_freed_ranges_are_poisoned(bare):
    arena = bare([64, 64], [0, 64])
    arena.library.holdall_arena_poison(arena.handle, None, None)
    memory = arena.memory(128)
    memory[:] = 0
    arena.take(64, 64)
    arena.give(64)
    assert (memory[:64] == 0).all()
    assert (memory[64:] == 0xFF).all()


# in front of torch's allocator


@pytest.fixture
def opened():
    made = []

    def make(layout, first=0):
        made.append(StepArena(layout, CPU, first=first))
        return made[-1]

    yield make
    for arena in made:
        arena.close()


def test_tensors_are_made_at_their_offsets_and_outlive_the_arena(opened):
    arena = opened(layout_of([4096, 8192, 4096], [0, 4096, 12288], smallest=1024))
    arena.begin_step()
    first, second, small = torch.full((1024,), 3.0), torch.ones(2048), torch.ones(8)
    third = first + 1
    base = arena.base
    assert [t.data_ptr() - base for t in (first, second, third)] == [0, 4096, 12288]
    assert not base <= small.data_ptr() < base + arena.size
    assert arena.counts[:5] == (3, 0, 0, 16384, 16384)
    del second
    assert arena.counts.live == 8192
    arena.end_step()
    between = torch.ones(2048)
    assert not base <= between.data_ptr() < base + arena.size
    arena.close()
    assert torch.equal(first, torch.full((1024,), 3.0)) and torch.equal(third, torch.full((1024,), 4.0))


def test_two_arenas_cannot_be_in_use(opened):
    layout, told = layout_of([4096], [0]), []
    arena = opened(layout)
    arena.begin_step()
    second = StepArena(layout, CPU, first=0, note=told.append)
    second.begin_step()
    assert second.size == 0
    assert "another arena is in use" in told[0]
    kept = torch.empty(1024)
    assert kept.data_ptr() == arena.base
    second.close()
    arena.end_step()


def test_memory_of_a_library_that_frees_by_address_is_freed(opened):
    """oneDNN takes bare addresses from the allocator, and gives them back by address."""
    arena = opened(layout_of([], [], reserved=64), first=1)  # it has to learn the first step
    layer, batch = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    expected = layer(batch)
    arena.begin_step()
    layer(batch).sum().backward()
    layer.zero_grad()
    arena.end_step()
    arena.begin_step()
    assert len(arena.layout.sizes) > 0
    assert torch.equal(layer(batch), expected)
    assert arena.counts.placed > 0
    arena.end_step()
    assert arena.counts.live == 0


def test_what_is_alive_at_the_end_of_a_recorded_step_keeps_its_place_in_all_of_the_next():
    events = [(0, 64, -1), (1, 128, -1), (9, -1, -1), (0, -1, -1)]
    found = lifetimes_of_events([holdall.runtime.arena.step_arena.ArenaEvent(*event) for event in events], 64)
    assert [(t.key, t.begin, t.end) for t in found.tensors] == [(0, 1, 3), (1, 2, 2)]
    placed = lay_out(build_member("layouts", "best_fit", {}, ""), found, 0)
    assert placed.reserved == 192


def ask(order):
    """Make and drop tensors: (name, bytes), or a name that is dropped. Whoever asks the last time has all that stay."""
    there = {}
    for name, size in order:
        if size:
            there[name] = torch.empty(size, dtype=torch.uint8)
        else:
            del there[name]
    return there


class NarrowArena(StepArena):
    """There is no more memory than was planned."""

    def _make(self, layout, *, dry):
        return super()._make(layout, dry=dry) if dry or layout.reserved <= 64 else None


def test_a_recorded_step_without_room_for_its_layout_keeps_the_planned_bytes():
    arena = NarrowArena(layout_of([64], [0]), CPU, first=1)
    try:
        for _ in range(2):
            arena.begin_step()
            there = ask([("first", 64), ("second", 128)])
            counts = arena.counts
            there["first"].fill_(1)
            there["second"].fill_(2)  # has its offset above the end
            arena.end_step()
            assert there["first"].tolist() == [1] * 64
            there.clear()
        assert (arena.size, arena.layout.sizes) == (64, (64, 128))
        assert (counts.placed, counts.occupied) == (1, 1)
    finally:
        arena.close()


def test_a_recorded_step_that_takes_more_than_planned_is_searched_for_longer(opened):
    order = [("a", 128), ("b", 256), ("c", 256), ("b", 0), ("d", 192), ("e", 128), ("a", 0), ("c", 0), ("e", 0), ("d", 0)]
    by_name = {}
    for planned in (704, 768):  # live bytes, and what the layout by name takes
        arena = opened(replace(layout_of([64], [0], reserved=planned), name="greedy_by_size"))
        arena.record_next()
        for _ in range(2):
            arena.begin_step()
            ask(order)
            arena.end_step()
        arena.begin_step()
        by_name[planned] = arena.layout
        ask(order)
        assert (arena.counts.missed, arena.counts.placed) == (0, 5)
        arena.end_step()
        arena.close()
    assert [layout.reserved for layout in by_name.values()] == [704, 768]
    assert by_name[704].offsets != by_name[768].offsets


# steps of planned models


def adam(model):
    return torch.optim.Adam(model.parameters(), foreach=False)


def loss_of(model, batch):
    return model(**batch).loss if isinstance(batch, dict) else model(*batch)


def step(model, batch, optimizer):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plainly(model, batch, steps=STEPS, step=step):
    model = copy.deepcopy(model)
    optimizer = adam(model)
    torch.manual_seed(1)
    return [step(model, batch, optimizer) for _ in range(steps)], model


def planned(name, planner="chen", layout="best_fit"):
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    model, batch = family(name)
    trace = holdall.trace(model, batch, optimizer=adam(model))
    return model, batch, holdall.plan(trace, planner=planner, hardware=machine(), layout=layout)


CASES = [("convnet", "chen", "best_fit"), ("recurrent", "nop", "stalloc"), ("tied", "chen", "greedy_by_size")]


@pytest.mark.parametrize(("name", "planner", "layout"), CASES)
def test_every_request_of_a_step_lies_at_its_offset_and_the_bits_are_the_same(name, planner, layout):
    model, batch, plan = planned(name, planner, layout)
    expected, trained = plainly(model, batch)
    optimizer, losses = adam(model), []
    torch.manual_seed(1)
    with holdall.apply(plan, model, optimizer) as harness:
        arena = harness.arena
        arena.poison()
        for n in range(STEPS):
            losses.append(step(model, batch, optimizer))
            counts = arena.counts
            if n >= IN_ARENA:
                assert counts.placed == len(arena.layout.sizes)
                assert (counts.missed, counts.outside, counts.live) == (0, 0, 0)
                assert counts.peak <= arena.size == arena.layout.reserved <= 1.03 * counts.peak
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(trained.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("name", "share", "precision"), [("tied", 0.4, None), ("convnet", 0.5, "bf16")])
def test_states_on_the_host_offloading_programs_and_working_copies_go_on_in_an_arena(name, share, precision):
    """In a part of plain training's memory: the same bits as with torch's allocator, and every request at its offset."""
    runs = []
    for layout in (None, "best_fit"):
        model, batch = family(name)
        optimizer, losses = adam(model), []
        plain = plain_outcome(holdall.trace(model, batch, optimizer=optimizer, precision=precision), machine())
        given = {"hardware": machine(), "budget": {"cpu": int(share * plain.peak["cpu"])}, "precision": precision}
        with holdall.fit(model, optimizer, batch, layout=layout, **given) as harness:
            assert {"offload", "place"} <= {action.name for action in harness.plan.actions}
            if layout is not None:
                harness.arena.poison()
            torch.manual_seed(1)
            for _ in range(STEPS):  # the first steps are not yet as the others: stores take buffers that they keep
                losses.append(step(model, batch, optimizer))
            if layout is not None:
                assert harness.arena.counts.missed == 0 < harness.arena.counts.placed
        runs.append((losses, list(model.parameters())))
    (expected, trained), (losses, found) = runs
    assert losses == expected
    assert all(map(torch.equal, trained, found))


def test_addresses_of_a_recorded_step_agree_with_its_lifetimes():
    model, batch, plan = planned("convnet")
    optimizer = adam(model)
    with holdall.apply(plan, model, optimizer) as harness:
        arena = harness.arena
        for _ in range(IN_ARENA + 1):
            step(model, batch, optimizer)
        arena.record_next()
        step(model, batch, optimizer)
        events = arena.recorded()
        assert_disjoint(events)
        born = [e for e in events if e.size >= 0]
        assert [e.offset for e in born] == list(arena.layout.offsets)
        assert lifetimes_of_events(events, 64).load == arena.counts.peak


def assert_disjoint(events):
    """Ranges that are alive together share no byte."""
    live = {}
    for key, size, offset in events:
        if size < 0:
            live.pop(key, None)
        else:
            assert all(offset + size <= low or top <= offset for low, top in live.values())
            live[key] = (offset, offset + size)
    assert not live


LEARNT = 3


def test_gradients_that_are_dropped_late_have_places_of_their_own():
    """A loop that empties them between forward and backward: they meet the next step's activations, which is seen when a step
    that found them is recorded."""

    def late(model, batch, optimizer):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, batch, plan = planned("tied", "nop")
    expected, _ = plainly(model, batch, step=late)
    optimizer, losses = adam(model), []
    torch.manual_seed(1)
    with holdall.apply(plan, model, optimizer) as harness:
        harness.arena.poison()
        for n in range(STEPS):
            losses.append(late(model, batch, optimizer))
            assert (harness.arena.counts.missed > 0) == (n < LEARNT)
    assert losses == expected


@pytest.mark.parametrize("leave", [lambda harness: harness.adopt(harness.plan), lambda harness: harness.close()])
def test_what_stays_leaves_an_arena_that_is_given_up(leave):
    """One gradient would keep all of its memory, which a retried step under another plan needs."""

    def keep(model, batch, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    model, batch, plan = planned("tied", "nop")
    expected, _ = plainly(model, batch, step=keep)
    optimizer = adam(model)
    gc.collect()
    others = library.load().holdall_arena_alive()
    torch.manual_seed(1)
    with holdall.apply(plan, model, optimizer) as harness:
        losses = [keep(model, batch, optimizer) for _ in range(IN_ARENA + 1)]
        low, top = harness.arena.base, harness.arena.base + harness.arena.size
        grads = [p.grad for p in model.parameters()]
        before = [g.clone() for g in grads]
        assert any(low <= g.data_ptr() < top for g in grads)
        assert library.load().holdall_arena_alive() == others + 1
        leave(harness)
        gc.collect()
        assert library.load().holdall_arena_alive() == others
        assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))
        losses += [keep(model, batch, optimizer) for _ in range(STEPS - len(losses))]
    assert losses == expected


def test_a_loop_that_keeps_what_is_planned_to_end_costs_room_and_never_values():
    model, batch, plan = planned("tiny-gpt2", "nop")
    kept, before = [], []
    optimizer = adam(model)
    with holdall.apply(plan, model, optimizer) as harness:
        harness.arena.poison()
        for n in range(STEPS):
            out = model(**batch)
            if n >= IN_ARENA:
                kept.append(out.logits)
                before.append(out.logits.detach().numpy().copy())
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert harness.arena.counts.missed > 0
        del out
    assert len(kept) == STEPS - IN_ARENA
    assert all(np.array_equal(a.detach().numpy(), b) for a, b in zip(kept, before, strict=True))


def test_a_wrong_layout_costs_room_and_never_values():
    model, batch, plan = planned("convnet", "nop")
    expected, _ = plainly(model, batch)
    layout = plan.about.layout
    wrong = replace(layout, offsets=(0,) * len(layout.offsets), reserved=max(layout.sizes))
    plan = replace(plan, about=replace(plan.about, layout=wrong))
    optimizer = adam(model)
    torch.manual_seed(1)
    with holdall.apply(plan, model, optimizer):
        assert [step(model, batch, optimizer) for _ in range(STEPS)] == expected


def test_a_plan_keeps_its_layout_in_its_file(tmp_path):
    _, _, plan = planned("convnet")
    assert plan.about.layout.name == "best_fit"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").about.layout == plan.about.layout


def test_fit_takes_a_layout_and_closing_gives_torch_its_allocator_back():
    model, batch = family("convnet")
    optimizer = adam(model)
    with holdall.fit(model, optimizer, batch, hardware=machine(), planner="nop", layout="best_fit") as harness:
        for _ in range(IN_ARENA + 1):
            step(model, batch, optimizer)
        arena = harness.arena
        assert arena.counts.placed > 0
        low, top = arena.base, arena.base + arena.size
    assert harness.arena is None and arena.size == 0
    gc.collect()
    assert not any(low <= p.data_ptr() < top for p in model.parameters())
    assert "record_stream" not in vars(torch.Tensor)


@pytest.mark.parametrize("name", ["caching", "roam", "nothing", 3])
def test_a_layout_that_has_no_offsets_is_refused(name):
    model, batch = family("convnet")
    with pytest.raises(InvalidInput, match="static layout"):
        holdall.fit(model, adam(model), batch, layout=name)


def test_without_a_compiler_a_layout_is_refused_before_the_first_step(monkeypatch):
    model, batch, plan = planned("convnet")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    library.load.cache_clear()
    try:
        with pytest.raises(Unsupported, match="no C\\+\\+ compiler"):
            holdall.apply(plan, model, adam(model))
    finally:
        library.load.cache_clear()
    step(model, batch, adam(model))  # the model is as it was
