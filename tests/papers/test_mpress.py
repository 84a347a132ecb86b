"""MPress: what it moves where, against naive counts and trying everything. All of it is simulated."""

import itertools
import random
from math import ceil

import pytest

from holdall.errors import Infeasible, InvalidInput
from holdall.pipelines import PipeCosts, pipeline, simulate
from holdall.pipelines.swapping.mpress import map_stages, plan_mpress
from holdall.pipelines.swapping.parked import (
    HOST,
    KEEP,
    PEER,
    RECOMPUTE,
    TO_HOST,
    LinkedGpus,
    StageTensor,
    TensorChoice,
    emulate,
)

FREE = float("inf")


def step(stages, micro_batches=None, weights=0):
    made = pipeline("1f1b", ranks=stages, micro_batches=micro_batches or 2 * stages)
    return made, PipeCosts.even(stages, forward=1.0, input=1.0, weight=1.0, weights=weights)


def server(stages, memory, peer=0.0, host=0.0):
    peers = tuple(tuple(0.0 if a == b else peer for b in range(stages)) for a in range(stages))
    return LinkedGpus(memory=memory, peers=peers, host=host)


def alike(stages, tensors=4, nbytes=100, again=float("inf")):
    return [[StageTensor(nbytes=nbytes, again=again) for _ in range(tensors)] for _ in range(stages)]


def kept(tensors):
    return [[TensorChoice() for _ in own] for own in tensors]


def by_looking(outcome, tensors, costs):
    """GPU -> most bytes, by looking at what is there in the middle of every stretch of time between two events."""
    spans = {(s.task.stage, s.task.kind, s.task.batch): s for s in outcome.spans}
    moments = sorted(
        {t for s in outcome.spans for t in (s.start, s.end)} | {t for c in outcome.copies for t in (c.start, c.end)}
    )
    most = [0] * len(outcome.gpus)
    for now in ((a + b) / 2 for a, b in itertools.pairwise(moments)):
        held = [0] * len(outcome.gpus)
        for (stage, kind, batch), forward in spans.items():
            if kind != "F":
                continue
            backward, gpu = spans[stage, "B", batch], outcome.gpus[stage]
            for number, (tensor, choice) in enumerate(zip(tensors[stage], outcome.choices[stage], strict=True)):
                if choice.way == KEEP:
                    held[gpu] += tensor.nbytes * (forward.start < now < backward.end)
                elif choice.way == RECOMPUTE:
                    held[gpu] += tensor.nbytes * (forward.start < now < forward.end or backward.start < now < backward.end)
                mine = [c for c in outcome.copies if (c.stage, c.batch, c.tensor) == (stage, batch, number)]
                for out in (c for c in mine if c.source == gpu):
                    (back,) = [c for c in mine if c.source == out.destination]
                    held[gpu] += out.nbytes * (forward.start < now < out.end or back.start < now < backward.end)
                    if out.destination != TO_HOST:
                        held[out.destination] += out.nbytes * (out.start < now < back.end)
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return tuple(m + costs.stages[outcome.gpus.index(gpu)].weights for gpu, m in enumerate(most))


def test_stage_s_of_p_holds_p_minus_s_micro_batches():
    for stages in (2, 3, 4, 6):
        made, costs = step(stages, weights=50)
        tensors = alike(stages)
        found = emulate(made, costs, tensors, server(stages, 10**9), kept(tensors))
        assert found.peak == tuple(50 + 400 * (stages - s) for s in range(stages))
        assert found.seconds == simulate(made, costs).makespan


@pytest.mark.parametrize("stages", [4, 6])
def test_free_links_even_out_what_the_gpus_hold(stages):
    """To the mean, rounded up to a micro-batch: for an odd number of stages there is no room for what is on its way."""
    made, costs = step(stages)
    tensors = alike(stages, tensors=6)
    most = ceil((stages + 1) / 2) * 600
    found = plan_mpress(made, costs, tensors, server(stages, most, peer=FREE))
    assert max(found.peak) <= most < 600 * stages
    assert found.count(PEER) and found.count(HOST) == found.count(RECOMPUTE) == 0
    assert found.seconds == pytest.approx(simulate(made, costs).makespan, rel=1e-9)
    assert all(c.way == KEEP for c in found.choices[-1])


def test_without_links_between_gpus_tensors_go_to_the_host_or_are_computed_again():
    made, costs = step(4)
    tensors = alike(4, again=0.1)
    slow = plan_mpress(made, costs, tensors, server(4, 1200, host=60.0))
    assert slow.count(PEER) == 0
    assert slow.count(HOST) + slow.count(RECOMPUTE) > 0
    none = plan_mpress(made, costs, tensors, server(4, 1200))
    assert none.count(PEER) == none.count(HOST) == 0
    assert none.count(RECOMPUTE) > 0
    assert none.seconds > simulate(made, costs).makespan


def test_the_host_is_taken_where_the_wait_is_long_and_peers_where_it_is_not():
    """A micro-batch is away for 9 seconds on the first stage; a tensor for 2 at the host, or 0.2 at a peer."""
    made, costs = step(4)
    tensors = alike(4, again=1.0)
    long = plan_mpress(made, costs, tensors, server(4, 1500, peer=1000.0, host=100.0))
    assert long.count(HOST) > 0 and long.count(PEER) == long.count(RECOMPUTE) == 0
    short = plan_mpress(made, costs, tensors, server(4, 1500, peer=1000.0, host=10.0))
    assert short.count(PEER) > 0 and short.count(HOST) == 0
    assert long.seconds == short.seconds == simulate(made, costs).makespan
    neither = plan_mpress(made, costs, tensors, server(4, 1500, peer=5.0, host=5.0))
    assert neither.count(RECOMPUTE) > 0 and neither.count(PEER) == neither.count(HOST) == 0


def test_a_tensor_is_striped_over_all_links_by_their_rates():
    made, costs = step(4)
    rates = ((0.0, 0.0, 1e3, 3e3), (0.0,) * 4, (1e3, 0.0, 0.0, 0.0), (3e3, 0.0, 0.0, 0.0))
    own = [[StageTensor(nbytes=400)] * 2, [StageTensor(nbytes=100)], [StageTensor(nbytes=100)], [StageTensor(nbytes=100)]]
    found = plan_mpress(made, costs, own, LinkedGpus(memory=2900, peers=rates, host=0.0))
    parked = [c for c in found.choices[0] if c.way == PEER]
    assert parked
    assert all(dict(c.stripes) == {2: 100, 3: 300} for c in parked)


def test_stages_are_mapped_to_where_links_serve_them_most():
    paired = ((0, 9, 1, 1), (9, 0, 1, 1), (1, 1, 0, 9), (1, 1, 9, 0))  # two fast pairs
    gpus = map_stages([300, 100, 0, 0], [0, 0, 100, 300], paired)
    assert {frozenset((gpus[0], gpus[3])), frozenset((gpus[1], gpus[2]))} == {frozenset((0, 1)), frozenset((2, 3))}
    drawn = random.Random(0)
    for _ in range(20):
        peers = [[drawn.randint(0, 9) * (a != b) for b in range(4)] for a in range(4)]
        over, spare = [drawn.randint(0, 5), drawn.randint(0, 5), 0, 0], [0, 0, drawn.randint(0, 5), drawn.randint(0, 5)]
        found = map_stages(over, spare, peers)

        def score(gpus, over=over, spare=spare, peers=peers):
            return sum(min(over[s], spare[t]) * peers[gpus[s]][gpus[t]] for s in range(4) for t in range(4))

        assert score(found) == max(map(score, itertools.permutations(range(4))))


def test_peaks_are_those_of_a_naive_count():
    drawn = random.Random(1)
    ways = set()
    for _ in range(12):
        stages = drawn.choice([2, 3, 4])
        made, costs = step(stages, drawn.randint(2, 6), weights=drawn.randint(0, 100))
        tensors = [[StageTensor(nbytes=drawn.randint(1, 200), again=drawn.random()) for _ in range(3)] for _ in range(stages)]
        gpus = tuple(drawn.sample(range(stages), stages))
        choices = kept(tensors)
        for stage, own in enumerate(choices):
            for number, tensor in enumerate(tensors[stage]):
                way = drawn.choice([KEEP, HOST, RECOMPUTE, PEER] if stage == 0 else [KEEP, HOST, RECOMPUTE])
                stripes = ((gpus[-1], tensor.nbytes),) if way == PEER else ()
                own[number] = TensorChoice(way=way, stripes=stripes)
                ways.add(way)
        found = emulate(
            made, costs, tensors, server(stages, 10**9, peer=drawn.uniform(20, 300), host=drawn.uniform(20, 300)), choices, gpus
        )
        assert found.peak == by_looking(found, tensors, costs)
        assert all(
            a.end <= b.start
            for a, b in itertools.combinations(found.copies, 2)
            if (a.source, a.destination) == (b.source, b.destination) and a.start < b.start
        )
    assert ways == {KEEP, HOST, RECOMPUTE, PEER}


def test_no_backward_begins_before_its_tensors_are_back():
    made, costs = step(3)
    tensors = alike(3, tensors=2)
    choices = [[TensorChoice(way=HOST)] * 2 for _ in range(3)]
    found = emulate(made, costs, tensors, server(3, 10**9, host=50.0), choices)
    starts = {(s.task.stage, s.task.batch): s.start for s in found.spans if s.task.kind == "B"}
    ends = {(s.task.stage, s.task.batch): s.end for s in found.spans if s.task.kind == "F"}
    for copy in found.copies:
        is_out = copy.destination == TO_HOST
        assert copy.start >= ends[copy.stage, copy.batch] if is_out else copy.end <= starts[copy.stage, copy.batch]
    assert found.seconds > simulate(made, costs).makespan  # 100 bytes a second are asked of a link of 50


def test_choices_are_near_the_best_of_all():
    """Three stages of two tensors, host or recomputation: within a twentieth of the best of 729 ways."""
    drawn = random.Random(2)
    for _ in range(2):
        made, costs = step(3, 4)
        tensors = [
            [StageTensor(nbytes=drawn.randint(50, 150), again=drawn.uniform(0.1, 1)) for _ in range(2)] for _ in range(3)
        ]
        gpus = server(3, 400, host=drawn.uniform(40, 120))
        best = min(
            found.seconds
            for ways in itertools.product([KEEP, HOST, RECOMPUTE], repeat=6)
            for found in [
                emulate(made, costs, tensors, gpus, [[TensorChoice(way=w) for w in ways[i : i + 2]] for i in (0, 2, 4)])
            ]
            if max(found.peak) <= 400
        )
        assert best <= plan_mpress(made, costs, tensors, gpus).seconds <= 1.05 * best


def test_what_fits_moves_nothing_and_what_cannot_fit_is_said():
    made, costs = step(4)
    assert plan_mpress(made, costs, alike(4), server(4, 1600)).count(KEEP) == 16
    with pytest.raises(Infeasible, match="nothing is left to move"):
        plan_mpress(made, costs, alike(4), server(4, 1000))
    with pytest.raises(InvalidInput, match="one stage on each rank"):
        folded = pipeline("interleaved:chunks=2", ranks=2, micro_batches=4)
        plan_mpress(folded, PipeCosts.even(4), alike(4), server(4, 1000))
