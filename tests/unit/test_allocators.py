"""The model allocators: the caching one against values worked out by hand, and against its own invariants."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.errors import InvalidInput, OverBudget
from holdall.simulator.allocators import Caching, Expandable, Ideal, make_allocator, segment_size
from holdall.units import KiB, MiB

A, B, C, D, E, F, G, H = range(8)

# (event, key, bytes, allocated after, reserved after in MiB)
SEQUENCE = [
    ("alloc", A, 600, 1_024, 2),
    ("alloc", B, MiB + 1, 1_050_112, 22),
    ("alloc", C, 10 * MiB, 11_535_872, 22),  # from the rest of the 20 MiB segment
    ("alloc", D, 11 * MiB, 24_118_784, 34),  # 12 MiB, whose last MiB is not split off
    ("alloc", E, 9 * MiB, 33_555_968, 54),
    ("free", B, 0, 32_506_880, 54),
    ("alloc", F, 2 * MiB, 34_604_032, 54),
    ("free", C, 0, 24_118_272, 54),
    ("alloc", G, 10 * MiB + 512, 35_652_608, 54),  # an 11 MiB hole, slack stays
    ("free", D, 0, 23_069_696, 54),
    ("alloc", H, 10 * MiB, 33_555_456, 54),  # from the merged hole, not from the 12 MiB segment
]


def test_caching_follows_the_malloc_sequence_to_the_byte():
    caching = Caching()
    for event, key, nbytes, allocated, reserved in SEQUENCE:
        caching.alloc(key, nbytes) if event == "alloc" else caching.free(key)
        assert (caching.allocated, caching.reserved) == (allocated, reserved * MiB), (event, key)
    caching.empty_cache()
    assert caching.reserved == 42 * MiB
    assert (caching.peak_allocated, caching.peak_reserved) == (35_652_608, 54 * MiB)


def test_a_growing_batch_never_reuses_its_old_segments():
    caching, reserved, allocated = Caching(), [], []
    for n in range(100, 105):
        for key, share in enumerate((40, 10, 40, 10, 20)):
            caching.alloc(key, n * share * MiB // 4)
        allocated.append(caching.allocated // MiB)
        for key in range(5):
            caching.free(key)
        reserved.append(caching.reserved // MiB)
    assert reserved == [3000, 5020, 7060, 9120, 11200]
    assert allocated == [3000, 3030, 3060, 3090, 3120]


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (19 * MiB, 20 * MiB, 20 * MiB),
        (21 * MiB + 1, 22 * MiB, 22 * MiB),
    ],
)
def test_the_first_request_takes_the_segment_its_size_calls_for(nbytes, allocated, reserved):
    caching = Caching()
    caching.alloc(0, nbytes)
    assert (caching.allocated, caching.reserved) == (allocated, reserved)


def test_streams_do_not_share_free_blocks():
    caching = Caching()
    caching.alloc(0, 30 * MiB, stream=0)
    caching.free(0)
    caching.alloc(1, 30 * MiB, stream=1)
    assert caching.reserved == 60 * MiB
    caching.alloc(2, 30 * MiB, stream=0)
    assert caching.reserved == 60 * MiB


def test_at_the_limit_unsplit_segments_are_given_back_first():
    caching = Caching(limit=50 * MiB)
    caching.alloc(0, 30 * MiB)
    caching.free(0)
    caching.alloc(1, 40 * MiB)
    assert (caching.reserved, caching.retries) == (40 * MiB, 1)


def test_over_the_limit_is_refused_and_leaves_the_books_in_order():
    caching = Caching(limit=50 * MiB)
    caching.alloc(0, 30 * MiB)
    with pytest.raises(OverBudget, match=r"30\.0 MiB are in use"):
        caching.alloc(1, 30 * MiB)
    caching.free(0)
    caching.alloc(1, 50 * MiB)
    assert caching.allocated == caching.reserved == 50 * MiB


def test_a_segment_with_one_live_block_cannot_be_given_back():
    caching = Caching(limit=50 * MiB)
    caching.alloc(0, 40 * MiB)
    caching.free(0)
    caching.alloc(1, 2 * MiB)
    with pytest.raises(OverBudget):
        caching.alloc(2, 45 * MiB)
    caching.alloc(2, 38 * MiB)
    assert caching.reserved == 40 * MiB


def test_ideal_counts_live_bytes_and_refuses_at_its_limit():
    ideal = Ideal(align=512, limit=2 * KiB)
    ideal.alloc(0, 1)
    ideal.alloc(1, 1025)
    assert (ideal.allocated, ideal.reserved, ideal.peak_allocated) == (2048, 2048, 2048)
    with pytest.raises(OverBudget):
        ideal.alloc(2, 1)
    ideal.free(1)
    assert (ideal.allocated, ideal.peak_reserved) == (512, 2048)


def test_allocators_are_made_by_name_and_an_unknown_name_gets_the_closest():
    assert isinstance(make_allocator("ideal"), Ideal)
    caching = make_allocator("caching", limit=MiB)
    with pytest.raises(OverBudget):
        caching.alloc(0, 1)
    with pytest.raises(InvalidInput, match="did you mean `caching`"):
        make_allocator("cachng")


SIZES = st.one_of(st.integers(0, 4 * KiB), st.integers(0, 2 * MiB), st.integers(0, 64 * MiB))
EVENTS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1), st.integers(0, 10**6)), max_size=60)


def feed(allocator, events):
    """Each event allocates, or frees one of the live keys; yields after each with what was asked for by key."""
    asked = {}
    for key, (is_alloc, nbytes, stream, pick) in enumerate(events):
        if is_alloc or not asked:
            allocator.alloc(key, nbytes, stream)
            asked[key] = nbytes
        else:
            victim = sorted(asked)[pick % len(asked)]
            allocator.free(victim)
            del asked[victim]
        yield asked


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_blocks_tile_their_segments_and_the_sums_agree(events):
    caching = Caching()
    for asked in feed(caching, events):
        live, total, end = 0, 0, {}
        for blocks in caching.segments():
            for block in blocks:
                assert end.get("address", block.address) == block.address  # no gap, no overlap inside a segment
                end["address"] = block.address + block.size
                total += block.size
                live += 0 if block.is_free else block.size
            assert not any(a.is_free and b.is_free for a, b in pairwise(blocks))  # neighbours are merged
            end.clear()
        spans = sorted((b[0].address, b[-1].address + b[-1].size) for b in caching.segments())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert total == caching.reserved >= caching.allocated == live >= sum(asked.values())
        assert caching.peak_reserved >= caching.reserved and caching.peak_allocated >= caching.allocated


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_freeing_everything_and_emptying_the_cache_leaves_nothing(events):
    caching = Caching()
    live = [dict(asked) for asked in feed(caching, events)][-1:]
    for key in live[0] if live else ():
        caching.free(key)
    caching.empty_cache()
    assert (caching.allocated, caching.reserved) == (0, 0)


class Naive:
    """The rules again, as lists and linear searches: segments of [address, size, key or None]."""

    def __init__(self):
        self.segments = []  # (is_small, stream, blocks)
        self.end = 0

    def alloc(self, key, nbytes, stream=0):
        if nbytes == 0:
            return
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= MiB
        fits = [
            (b[1], b[0], blocks, b)
            for s, st_, blocks in self.segments
            if (s, st_) == (small, stream)
            for b in blocks
            if b[2] is None and b[1] >= size
        ]
        if fits:
            _, _, blocks, b = min(fits, key=lambda f: f[:2])
        else:
            b = [self.end, segment_size(size), None]
            blocks = [b]
            self.end += b[1]
            self.segments.append((small, stream, blocks))
        rest = b[1] - size
        if rest >= 512 if small else rest > MiB:
            blocks.insert(blocks.index(b) + 1, [b[0] + size, rest, None])
            b[1] = size
        b[2] = key

    def free(self, key):
        for _, _, blocks in self.segments:
            for b in blocks:
                if b[2] == key:
                    b[2] = None
            at = 0
            while at + 1 < len(blocks):
                if blocks[at][2] is None and blocks[at + 1][2] is None:
                    blocks[at][1] += blocks.pop(at + 1)[1]
                else:
                    at += 1

    @property
    def totals(self):
        blocks = [b for _, _, s in self.segments for b in s]
        return sum(b[1] for b in blocks if b[2] is not None), sum(b[1] for b in blocks)


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_caching_equals_a_naive_program_of_the_same_rules(events):
    caching, naive = Caching(), Naive()
    for _ in zip(feed(caching, events), feed(naive, events), strict=True):
        assert (caching.allocated, caching.reserved) == naive.totals


def test_a_hundred_thousand_events_take_about_a_second():
    rng, caching, live = random.Random(0), Caching(), []
    events = []
    for key in range(100_000):
        if live and rng.random() < 0.49:
            events.append((False, live.pop(rng.randrange(len(live))), 0))
        else:
            live.append(key)
            events.append((True, key, int(2 ** rng.uniform(4, 28))))
    best = float("inf")
    for _ in range(3):  # other processes share the machine
        caching = Caching()
        begun = time.process_time()
        for is_alloc, key, nbytes in events:
            caching.alloc(key, nbytes) if is_alloc else caching.free(key)
        best = min(best, time.process_time() - begun)
        if best < 1.5:
            break
    assert best < 1.5


@pytest.mark.parametrize("limit", [200_000, 300 * MiB, 450 * MiB, 12 << 30])
def test_what_may_be_live_in_expandable_segments_is_what_their_reservation_allows(limit):
    live = Expandable.usable(limit)
    assert Expandable.taken(live) <= limit < Expandable.taken(live + live // 1000 + 4)


def test_what_is_taken_for_something_is_a_limit_that_it_may_be_live_under():
    """To the byte: a plan that fits what it is said to need must not be told that a byte is missing."""
    rng = random.Random(7)
    for live in [19_147_426_816, *(int(2 ** rng.uniform(10, 40)) for _ in range(2000))]:
        limit = Expandable.taken(live)
        assert live <= Expandable.usable(limit)
        assert Expandable.taken(Expandable.usable(limit)) <= limit
