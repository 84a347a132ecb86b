"""The allocator with expandable segments over numbers: its pages add up, and it moves them where it must and only there."""

import copy
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import holdall
from holdall.actions.place import Place
from holdall.machine.presets import gpu
from holdall.planners import auto
from holdall.planners.auto.search import Candidate
from holdall.problem import make_problem
from holdall.simulator.pages import Exhausted, Pages, churn
from holdall.units import PAGE, MiB


def blocks_of(space):
    """From the first address to the last."""
    block = next((b for _, b in space.unmapped), None)
    while block is not None and block.before is not None:
        block = block.before
    found = []
    while block is not None:
        found.append(block)
        block = block.after
    return found


def recount(pages):
    """Bytes in pages that are mapped, from the blocks alone; every list is held against them."""
    total = 0
    for space in (pages._small, pages._large):
        blocks = blocks_of(space)
        for a, b in pairwise(blocks):
            assert a.address + a.size == b.address
            assert b.before is a
            assert not (a.is_free and b.is_free and space.is_unmapped(a) == space.is_unmapped(b)), "neighbours that are one"
        mapped = [b for b in blocks if not space.is_unmapped(b)]
        assert sorted(id(b) for b in mapped if b.is_free) == sorted(id(b) for _, _, b in space.listed)
        assert all((size, address) == (b.size, b.address) for size, address, b in space.listed)
        assert space.listed == sorted(space.listed, key=lambda entry: entry[:2])
        unmapped = [b for b in blocks if space.is_unmapped(b)]
        assert all(b.address % space.page == 0 for b in unmapped)
        total += sum(b.size for b in mapped)
    assert {id(b) for b in pages.live.values() if b} == {
        id(b) for s in (pages._small, pages._large) for b in blocks_of(s) if not b.is_free and not s.is_unmapped(b)
    }
    return total


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_its_pages_add_up(seed):
    rng, pages, sizes = random.Random(seed), Pages(300 * MiB), {}
    for key in range(1500):
        if sizes and rng.random() < 0.48:
            gone = rng.choice(list(sizes))
            pages.free(gone)
            del sizes[gone]
        else:
            size = int(2 ** rng.uniform(4, 26.5))
            try:
                pages.alloc(key, size)
            except Exhausted as error:
                assert error.missing > 0
                continue
            sizes[key] = size
            assert pages.live[key].size - size < 1024
        if key % 10 == 0:
            assert recount(pages) == pages.reserved <= pages.limit + PAGE
    assert pages.halts > 0


def test_a_step_that_fits_as_it_is_moves_nothing():
    order = [(0, 100 * MiB), *[(n, 50 * MiB) for n in range(1, 5)], *[(n, -1) for n in range(1, 5)]]
    assert churn(order, 1, 400 * MiB) == (0, 0, 0)


def test_free_memory_in_the_wrong_places_makes_pages_move_in_every_step():
    """Every second of eight tensors goes; one as large as three of them finds no place, and is made room for page by page."""
    order = [(n, 48 * MiB) for n in range(8)]
    order += [(n, -1) for n in range(0, 8, 2)]
    order += [(9, 144 * MiB), (9, -1)]
    order += [(n, -1) for n in range(1, 8, 2)]
    found = churn(order, 0, 8 * 48 * MiB)
    assert found.halts >= 1
    assert found.remapped >= 144 * MiB
    assert found.missing == 0
    assert found.seconds > 0
    assert churn(order, 0, 11 * 48 * MiB + PAGE) == (0, 0, 0)  # room for it beside the holes


def test_what_shares_its_pages_with_live_tensors_is_lost():
    """Tensors of half a page: every second one goes, and not one page is free."""
    half = PAGE // 2
    order = [(n, half) for n in range(20)]
    order += [(n, -1) for n in range(0, 20, 2)]
    order += [(20, PAGE), (20, -1)]
    order += [(n, -1) for n in range(1, 20, 2)]
    assert churn(order, 0, 10 * PAGE).missing > 0
    assert churn(order, 0, 11 * PAGE).missing == 0


def test_a_step_that_is_too_large_is_said_to_be():
    assert churn([(0, 100 * MiB), (0, -1)], 0, 50 * MiB).missing == 50 * MiB


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8, vocab_size=4096
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train()


def traced(model, **options):
    ids = torch.zeros(4, 1024, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return holdall.trace(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer, device="cuda", **options)


def test_auto_leaves_room_where_pages_would_move(llama, monkeypatch):
    """In 70 % of what plain training takes, the fastest plan by bytes alone moves pages; a smaller one is faster."""
    trace, hardware = traced(copy.deepcopy(llama).bfloat16()), gpu("rtx-4090")
    budget = int(0.7 * holdall.plan(trace, planner="nop", hardware=hardware).predicted.peak["gpu"])
    chosen = holdall.plan(trace, budget=budget, hardware=hardware).predicted
    monkeypatch.setattr(auto, "_ROOM", ())
    by_bytes = holdall.plan(trace, budget=budget, hardware=hardware).predicted
    assert by_bytes.churn > 0 == chosen.churn
    assert chosen.seconds < by_bytes.seconds
    assert chosen.peak["gpu"] < by_bytes.peak["gpu"]


def test_plans_are_held_against_each_other_by_steps_of_both_kinds(llama):
    """Updates that begin early end early where nothing is clipped; a plan that makes more of that may be the better one."""
    trace, hardware = traced(llama, precision="bf16"), gpu("rtx-4090")
    plan = holdall.plan(trace, budget="1.5GiB", hardware=hardware)
    clipped, other = plan.predicted.seconds, plan.about.seconds_if_not_clipped
    assert other < clipped
    search = auto.PlacementSearch(make_problem(trace, budget="1.5GiB", hardware=hardware), via_device=None, ahead=True)
    one = Candidate("the plan", plan.actions, plan.predicted)
    assert search._seconds_either_way(one, plan.predicted) == pytest.approx((clipped + other) / 2)
    waits = tuple(replace(a, ahead=False) if isinstance(a, Place) else a for a in plan.actions)
    alone = Candidate("without", waits, search.outcome(waits))
    assert search._seconds_either_way(alone, alone.outcome) == alone.outcome.seconds
