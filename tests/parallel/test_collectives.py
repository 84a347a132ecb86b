"""Collectives in the cost model and in the simulator."""

import pytest
import torch
import torch.distributed as dist

import holdall
from holdall.cost.collectives import KINDS, collective_seconds, messages, sent_bytes
from holdall.machine.networks import network, network_names
from holdall.parallel.counting import CollectiveBytes
from holdall.simulator.check import Illegal, check
from holdall.simulator.lower import close
from holdall.simulator.replay import replay
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import chain, machine
from holdall.types import Collect, Mesh, MeshDim, Network, Run, Schedule, Wait


def ring(kind, nbytes, ranks):
    """(bytes that rank 0 sends, rounds) of a ring, passed around part by part until all have what they should."""
    part, sent, rounds = nbytes // ranks, 0, 0
    for half in ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,):
        has = [{rank} if half == "all_gather" else set(range(ranks)) for rank in range(ranks)]
        summed = [[1] * ranks for _ in range(ranks)]  # terms of every part on every rank
        for turn in range(ranks - 1):
            moved = [(rank - turn) % ranks for rank in range(ranks)]
            for rank, piece in enumerate(moved):
                there = (rank + 1) % ranks
                summed[there][piece] += summed[rank][piece] if half == "reduce_scatter" else 0
                has[there].add(piece)
            sent, rounds = sent + part, rounds + 1
        if half == "reduce_scatter":
            assert all(max(terms) == ranks for terms in summed)
        else:
            assert all(len(pieces) == ranks for pieces in has)
    return sent, rounds


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_and_messages_are_those_of_a_ring(kind, ranks):
    assert (sent_bytes(kind, 240, ranks), messages(kind, ranks)) == ring(kind, 240, ranks)


def test_a_group_over_two_networks_sends_little_over_the_slow_one():
    fast = MeshDim(name="inside", size=8, network=Network(name="fast", rate=1e9, latency=1e-6))
    slow = MeshDim(name="across", size=4, network=Network(name="slow", rate=1e7, latency=1e-4))
    flat = MeshDim(name="all", size=32, network=slow.network)
    size = 64_000_000
    both = collective_seconds("all_reduce", size, [slow, fast])
    by_hand = 2 * (7e-6 + size * 7 / 8 / 1e9) + 2 * (3e-4 + size / 8 * 3 / 4 / 1e7)
    assert both == pytest.approx(by_hand)
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert collective_seconds(kind, size, [slow, fast]) < collective_seconds(kind, size, [flat]) / 4
    assert all(collective_seconds(kind, size, [MeshDim(name="one", size=1)]) == 0 for kind in KINDS)


def test_networks_have_names():
    rates = [network(name).rate for name in ("ethernet-10", "infiniband-ndr", "pcie-5", "nvlink-4")]
    assert rates == sorted(rates)
    assert all(network(name).name == name for name in network_names())
    with pytest.raises(holdall.HoldallError, match="did you mean `nvlink-4`"):
        network("nvlink4")


@pytest.mark.parametrize("sizes", [{}, {"dp": 0}, {"dp": 1.5}, {"": 2}, 2])
def test_a_mesh_that_cannot_be_is_refused(sizes):
    with pytest.raises(holdall.HoldallError, match=r'mesh=\{"dp": 2\}'):
        Mesh.of(sizes)
    assert Mesh.of({"dp": 4, "tp": 2}).ranks == 8


# the primitive

GATHER = {"kind": "all_gather", "dim": "dp", "nbytes": 1000}


def gathered(seconds, *, wait=True, used_by=2):
    """A chain whose weights are gathered after its first op, and awaited by the third."""
    trace = chain([10, 10, 10])
    schedule = Schedule(trace=trace, home="cpu")
    (made,) = trace.ops[0].writes
    schedule.insert(0, [Collect(tensors=(made,), seconds=seconds, **GATHER)])
    if wait:
        schedule.insert(used_by - 1, [Wait(tensors=(made,))])
    return schedule, made


def outcome(schedule, *, overlap):
    return replay(close(schedule), schedule, machine(overlap=overlap))


def plain(overlap):
    return outcome(Schedule(trace=chain([10, 10, 10]), home="cpu"), overlap=overlap).seconds


def test_a_collective_takes_time_and_sends_bytes():
    schedule, _ = gathered(5.0, used_by=1)
    serial, beside = outcome(schedule, overlap=False), outcome(schedule, overlap=True)
    assert serial.seconds == pytest.approx(plain(False) + 5.0)
    assert beside.seconds == pytest.approx(plain(True) + 5.0)  # the next op waits for it
    assert serial.traffic == beside.traffic == {"dp all_gather": 1000}


def test_a_collective_overlaps_what_does_not_wait_for_it():
    ops = chain([10, 10, 10]).ops
    hidden = ops[1].seconds
    schedule, _ = gathered(hidden)
    schedule.runs[1] = Run(op=1, reads=(), writes=ops[1].writes, seconds=hidden, name="other work")
    assert outcome(schedule, overlap=True).seconds == pytest.approx(plain(True))
    assert outcome(schedule, overlap=False).seconds == pytest.approx(plain(False) + hidden)


def test_two_collectives_of_a_dimension_go_one_after_the_other():
    trace = chain([10, 10])
    one, two = (trace.ops[n].writes[0] for n in (0, 1))

    def seconds(lanes):
        schedule = Schedule(trace=trace, home="cpu")
        steps = [Collect(tensors=(x,), seconds=7.0, lane=lane, **GATHER) for x, lane in zip((one, two), lanes, strict=True)]
        schedule.insert(1, [*steps, Wait(tensors=(one, two))])
        return replay(close(schedule), schedule, machine(overlap=True)).seconds

    assert seconds(["", ""]) == pytest.approx(seconds(["a", "b"]) + 7.0)


def test_the_checker_knows_a_collective():
    def legal(schedule):
        return check(close(schedule), {**schedule.trace.tensors, **schedule.added}, "cpu")

    schedule, _ = gathered(1.0, used_by=1)
    assert legal(schedule) == legal(Schedule(trace=schedule.trace, home="cpu"))
    with pytest.raises(Illegal, match="before its copy has arrived"):
        legal(gathered(1.0, wait=False)[0])
    early, made = gathered(1.0, used_by=1)
    early.insert(-1, [Collect(tensors=(made,), seconds=1.0, **GATHER)])
    with pytest.raises(Illegal, match="which is not there"):
        legal(early)


def counted():
    other, x = 1 - dist.get_rank(), torch.ones(8)
    with CollectiveBytes("dp", 2) as outer:
        dist.all_reduce(x)
        with CollectiveBytes("dp", 2) as inner:
            dist.all_gather_into_tensor(torch.empty(16), x)
            dist.reduce_scatter_tensor(torch.empty(4), x)
            dist.all_to_all_single(torch.empty(8), x)
            ends = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(8), other)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
    dist.all_reduce(x)
    return outer.sent, inner.sent


def test_collectives_are_counted_where_they_are_called():
    sent = {"dp all_gather": 32, "dp reduce_scatter": 16, "dp all_to_all": 16, "dp shift": 32}
    assert on_ranks(2, counted) == [({"dp all_reduce": 32, **sent}, sent)] * 2
