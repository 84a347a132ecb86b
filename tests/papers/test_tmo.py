"""TMO: turns at a link that data-parallel GPUs share, against a naive link; which of its relations hold, and which do not.
All of it is simulated; `tests/parallel/test_pipeline_planned.py` has ranks that send different layers away."""

import random

import pytest

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines.swapping.shared_link import SharedLink, SwapBlock, can_fit, play_shared
from holdall.pipelines.swapping.tmo import CONTENDED, DISJOINT, ORCHESTRATED, chosen, dealt, plan_tmo, tmo_way

WAYS = (CONTENDED, DISJOINT, ORCHESTRATED)


def made_up(drawn):
    """(blocks, rate of the link, GPUs, memory): 1.1 to 2.5 times as much as a GPU holds; the paper has 1.33 to 2."""
    blocks = [
        SwapBlock(nbytes=drawn.randint(50, 150), forward=drawn.uniform(0.5, 1.5), backward=drawn.uniform(1, 3))
        for _ in range(drawn.choice([6, 12, 24]))
    ]
    gpus = drawn.choice([2, 4])
    memory = max(int(sum(b.nbytes for b in blocks) / drawn.uniform(1.1, 2.5)), max(b.nbytes for b in blocks))
    return blocks, drawn.uniform(12, 200) * gpus, gpus, memory


def naive(blocks, rate, away, memory, steps=200):
    """One GPU alone, in small steps of time: (seconds, peak)."""
    count, tick = len(blocks), 1 / steps
    now = held = peak = 0
    at, left, out, back, gone = 0, None, [], [], set()
    while at < 2 * count:
        n = at if at < count else 2 * count - 1 - at
        if at >= count and not back and gone and held + blocks[max(gone)].nbytes <= memory:
            held += blocks[max(gone)].nbytes
            back.append([max(gone), blocks[max(gone)].nbytes])
            gone.discard(max(gone))
        if left is None and at < count and held + blocks[n].nbytes <= memory:
            held, left = held + blocks[n].nbytes, blocks[n].forward
        elif left is None and at >= count and n not in gone and all(b != n for b, _ in back):
            out, left = [c for c in out if c[0] != n], blocks[n].backward
        peak, now = max(peak, held), now + tick
        for copies in (out, back):
            if copies:
                copies[0][1] -= rate * tick
                if copies[0][1] <= 0:
                    n_over = copies.pop(0)[0]
                    if copies is out:
                        gone.add(n_over)
                        held -= blocks[n_over].nbytes
        if left is not None:
            left -= tick
            if left <= 0:
                held -= blocks[n].nbytes if at >= count else 0
                out += [[n, blocks[n].nbytes]] if at < count and n in away else []
                at, left = at + 1, None
    return now, peak


def test_one_gpu_is_a_naive_walk_in_small_steps():
    drawn = random.Random(0)
    for _ in range(8):
        blocks, rate, _, memory = made_up(drawn)
        away = chosen(blocks, sum(b.nbytes for b in blocks) - memory)
        step = play_shared(blocks, SharedLink(rate=rate), [away], memory=memory)
        seconds, peak = naive(blocks, rate, away, memory)
        assert step.seconds == pytest.approx(seconds, rel=0.02)
        assert abs(step.peak[0] - peak) <= 150 and step.peak[0] <= memory


def test_one_gpu_has_one_step_whatever_the_way():
    """Relation (2): with nobody to share the link, nothing changes."""
    drawn = random.Random(1)
    for _ in range(10):
        blocks, rate, _, memory = made_up(drawn)
        steps = {tmo_way(way, blocks, SharedLink(rate=rate), gpus=1, memory=memory).step for way in WAYS}
        assert len(steps) == 1 and steps.pop().most_copies == 1


def test_gpus_keep_to_their_memory_and_only_turns_leave_the_link_to_one_copy():
    drawn = random.Random(2)
    shared = 0
    for _ in range(20):
        blocks, rate, gpus, memory = made_up(drawn)
        found = {way: tmo_way(way, blocks, SharedLink(rate=rate), gpus=gpus, memory=memory) for way in WAYS}
        for plan in found.values():
            assert max(plan.step.peak) <= memory
            for gpu, own in enumerate(plan.away):
                assert plan.step.sent[gpu] <= sum(blocks[n].nbytes for n in own)
        assert found[ORCHESTRATED].step.most_copies == 1
        shared += found[CONTENDED].step.most_copies == gpus
    assert shared == 20


def test_blocks_are_dealt_out_until_each_gpu_fits():
    blocks = [SwapBlock(nbytes=100)] * 8
    assert dealt(blocks, 2, 600) == ((0, 2), (1, 3))
    assert dealt(blocks, 4, 700) == ((0,), (1,), (2,), (3,))
    assert dealt(blocks, 2, 300) == ((0, 1, 2, 4, 6), (0, 1, 2, 3, 5, 7))  # one round is not enough
    assert dealt(blocks, 3, 800) == ((), (), ())
    drawn = random.Random(3)
    for _ in range(50):
        blocks, _, gpus, memory = made_up(drawn)
        found = dealt(blocks, gpus, memory)
        assert all(can_fit(blocks, own, memory) for own in found)
        first = [n for n in range(len(blocks)) if any(n in own for own in found)]
        assert first == list(range(len(first)))


def test_a_link_that_is_never_short_makes_all_ways_one():
    blocks = [SwapBlock(nbytes=100)] * 8
    for way in WAYS:
        assert tmo_way(way, blocks, SharedLink(rate=1e9), gpus=4, memory=500).seconds == pytest.approx(24, rel=1e-5)


def counts(sync, together):
    """Of 120 made-up steps: disjoint slower than contended, orchestrated slower, and faster; the best gain, and the mean."""
    drawn = random.Random(4)
    slower = {DISJOINT: 0, ORCHESTRATED: 0}
    faster, gains = 0, []
    for _ in range(120):
        blocks, rate, gpus, memory = made_up(drawn)
        link = SharedLink(rate=rate, together=together and together * rate)
        seconds = {way: tmo_way(way, blocks, link, gpus=gpus, memory=memory, sync=sync).seconds for way in WAYS}
        for way in slower:
            slower[way] += seconds[way] > seconds[CONTENDED] * (1 + 1e-9)
        faster += seconds[ORCHESTRATED] < seconds[CONTENDED] * (1 - 1e-9)
        gains.append(seconds[CONTENDED] / min(seconds[DISJOINT], seconds[ORCHESTRATED]))
    return slower[DISJOINT], slower[ORCHESTRATED], faster, max(gains), sum(gains) / len(gains)


def test_turns_cost_nothing_and_gain_where_a_shared_link_loses_rate_but_different_tensors_mostly_lose():
    """Relation (1), that different tensors are no slower than the same ones, does not hold here; nor do the 32 to 38 % of the
    paper. These are the figures of docs/pipelines.md."""
    found = {(sync, together): counts(sync, together) for sync in (0, 1) for together in (None, 0.7)}
    assert {case: told[:3] for case, told in found.items()} == {
        (0, None): (81, 0, 23),
        (0, 0.7): (73, 0, 57),
        (1, None): (81, 1, 16),
        (1, 0.7): (75, 0, 57),
    }
    best, mean = found[0, None][3:]
    assert 1.13 < best < 1.14 and 1.008 < mean < 1.01
    best, mean = found[0, 0.7][3:]
    assert 1.56 < best < 1.57 and 1.08 < mean < 1.1


def test_what_makes_no_sense_is_refused():
    blocks = [SwapBlock(nbytes=100)] * 4
    with pytest.raises(Infeasible, match="a block holds 100 bytes, and a GPU has 90"):
        plan_tmo(blocks, SharedLink(rate=1.0), gpus=2, memory=90)
    with pytest.raises(InvalidInput, match="4 blocks on 0 GPUs"):
        plan_tmo(blocks, SharedLink(rate=1.0), gpus=0, memory=200)
    with pytest.raises(InvalidInput, match="GPU 1 has no room"):
        play_shared(blocks, SharedLink(rate=1.0), [(0, 1), ()], memory=200)
