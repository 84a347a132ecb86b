"""GMLake (ASPLOS 2024): stitched virtual blocks over 2 MiB chunks."""

import random
from collections import Counter

import pytest

from holdall.layouts.caching import CachingLayout
from holdall.layouts.gmlake import GMLake
from holdall.packing.playing import play
from holdall.packing.stitching import CHUNK, Stitching
from holdall.testing.oracles import training_lifetimes
from holdall.types.lifetimes import lifetimes_of
from holdall.units import MiB

SEEDS = range(5)


def step(seed):
    return training_lifetimes(random.Random(seed), 10, recompute=True, unit=CHUNK)


def test_a_growing_batch_takes_what_is_live_in_chunks():
    stitching, reserved = Stitching(), []
    for n in range(100, 105):
        sizes = [n * share * MiB // 4 for share in (40, 10, 40, 10, 20)]
        for key, size in enumerate(sizes):
            stitching.alloc(key, size)
        assert stitching.reserved <= sum(-(-size // CHUNK) for size in sizes) * CHUNK
        reserved.append(stitching.reserved // MiB)
        for key in range(5):
            stitching.free(key)
    assert reserved == [3000, 3034, 3062, 3092, 3120]  # the caching allocator ends with 11200


@pytest.mark.parametrize("seed", SEEDS)
def test_no_chunk_is_in_two_allocated_blocks(seed):
    found, stitching = step(seed), Stitching()
    for events in found.events(4):
        for number, is_free in events:
            stitching.free(number) if is_free else stitching.alloc(number, found.tensors[number].size)
            uses = Counter(stitching.allocated())
            assert not uses or max(uses.values()) == 1
            assert len(uses) <= stitching.chunks


@pytest.mark.parametrize("seed", SEEDS)
def test_later_steps_need_no_new_chunks_and_soon_no_new_stitches(seed):
    found, stitching = step(seed), Stitching()
    made = [(stitching.chunks, stitching.stitches) for _ in play(found, stitching, 16)]
    assert {chunks for chunks, _ in made} == {found.load // CHUNK}  # nothing is lost: chunks are as many as are live
    assert made[-1] == made[-2]


@pytest.mark.parametrize("seed", SEEDS)
def test_it_never_reserves_more_than_the_caching_allocator(seed):
    assert GMLake()(step(seed)).reserved <= CachingLayout()(step(seed)).reserved


def test_small_requests_go_to_the_caching_allocator_s_small_pool():
    stitching = Stitching()
    stitching.alloc(0, MiB)
    stitching.alloc(1, CHUNK)
    assert (stitching.chunks, stitching.small.reserved) == (1, CHUNK)
    stitching.free(0)
    assert stitching.small.allocated == 0


def test_requests_below_the_limit_are_not_rounded_to_chunks():
    """Tensors of a little more than a chunk lose nearly half of two; a limit leaves them to the caching allocator."""
    order = [(key, 2 * MiB + 512) for key in range(40)] + [(key, -1) for key in range(40)]
    found = lifetimes_of(order, align=512)
    assert GMLake()(found).reserved == 40 * 2 * CHUNK
    assert GMLake(smallest=128 * MiB)(found).reserved == CachingLayout()(found).reserved <= 50 * CHUNK
