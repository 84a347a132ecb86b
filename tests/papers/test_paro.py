"""PaRO: its triples, how the choice moves with memory, and HO-Ring's messages."""

import random
from itertools import pairwise

import pytest

import holdall
from holdall.cost.sharding import ModelStates, NodeLinks, ShardStep, memory, step_seconds
from holdall.parallel.sharding.ho_ring import HORing
from holdall.parallel.sharding.paro import TRIPLES, paro_factors, paro_triple
from holdall.types import Network

STEP = ShardStep(ranks=64, backwards=8, forward=0.05, backward=0.1)
MODEL = ModelStates.mixed(7_000_000_000, units=32)


def links(ratio):
    """Nodes of 8, joined by a network that many times slower."""
    fast = Network(name="fast", rate=360e9, latency=5e-6)
    return NodeLinks(per_node=8, inside=fast, across=Network(name="slow", rate=360e9 / ratio, latency=1e-5))


def test_ten_triples_are_of_use():
    assert sorted(TRIPLES) == sorted(["NNN", "NNI", "NNG", "NII", "NIG", "NGG", "III", "IIG", "IGG", "GGG"])
    assert paro_factors("IIG", 64, 8) == (8, 8, 64)
    assert paro_factors("NNG", 64, 8) == (1, 1, 64)
    with pytest.raises(holdall.HoldallError, match="no triple of PaRO"):
        paro_factors("GII", 64, 8)
    with pytest.raises(holdall.HoldallError, match="do not fill groups"):
        paro_factors("III", 12, 8)


def chosen(room, ratio=10):
    return paro_triple(MODEL, STEP, links(ratio), group=8, room=room)


@pytest.mark.parametrize("ratio", [1, 4, 10, 40])
def test_the_choice_is_brute_force(ratio):
    draw = random.Random(ratio)
    for _ in range(20):
        room = draw.uniform(3e9, 130e9)
        fitting = [t for t in TRIPLES if memory(paro_factors(t, 64, 8), MODEL, STEP) <= room]
        times = {t: step_seconds(paro_factors(t, 64, 8), MODEL, STEP, links(ratio)) for t in fitting}
        assert times[chosen(room, ratio)] == pytest.approx(min(times.values()))


def test_the_choice_moves_from_global_shards_to_near_ones_as_memory_grows():
    """What is sent in every backward is sharded globally only where nothing else fits, optimizer states almost always."""
    least = memory(paro_factors("GGG", 64, 8), MODEL, STEP)
    found = list(dict.fromkeys(chosen(least + n * 0.25e9) for n in range(500)))
    assert found[:3] == ["GGG", "IGG", "IIG"]
    assert found[-1].startswith("NN")
    times = [step_seconds(paro_factors(t, 64, 8), MODEL, STEP, links(10)) for t in found]
    assert all(b <= a for a, b in pairwise(times))
    with pytest.raises(holdall.Infeasible, match="no triple of PaRO fits"):
        chosen(least - 1)


# HO-Ring

SHAPES = [(1, 4), (2, 2), (3, 4), (4, 8), (8, 2)]


def played(ring, messages):
    """(the chunks that every rank has in the end, the seconds), by the arrival of every message: a rank's links across and
    inside send one at a time, and only what has come."""
    across, inside = 3.0, 1.0
    has = {(rank, rank): 0.0 for rank in range(ring.ranks)}
    free = {}
    for message in messages:
        link = (message.source, message.link)
        assert (message.source, message.chunk) in has, f"{message} before it has come"
        begin = max(free.get(link, 0.0), has[message.source, message.chunk])
        end = free[link] = begin + (across if message.link == "across" else inside)
        assert (message.target, message.chunk) not in has, "sent twice"
        has[message.target, message.chunk] = end
    chunks = [{chunk for rank, chunk in has if rank == r} for r in range(ring.ranks)]
    return chunks, max(has.values()), ring.seconds(across, inside), ring.ring_seconds(across, inside)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_has_every_chunk_in_the_predicted_time(shape):
    ring = HORing(groups=shape[0], members=shape[1])
    messages = ring.all_gather()
    order = sorted(messages, key=lambda m: (m.phase, m.turn, m.link))
    chunks, seconds, said, plain = played(ring, order)
    assert all(c == set(range(ring.ranks)) for c in chunks)
    assert len(messages) == ring.ranks * (ring.ranks - 1)  # none is sent twice
    assert seconds == said <= plain


def test_both_kinds_of_links_are_busy_at_once():
    ring = HORing(groups=4, members=8)
    for across, inside in ((7.0, 1.0), (3.0, 1.0), (100.0, 1.0)):
        assert ring.seconds(across, inside) == 3 * max(across, 7 * inside) + 7 * inside
    assert ring.ring_seconds(7.0, 1.0) == 31 * 7
    sent_across = sum(m.link == "across" for m in ring.all_gather())
    assert sent_across == ring.ranks * (ring.groups - 1)
