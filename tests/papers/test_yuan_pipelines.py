"""Yuan et al., the pipeline half: what leaves between forward and backward, against naive counts and trying everything.
Seconds are simulated; `tests/parallel/test_pipeline_planned.py` runs a plan."""

import itertools
import random

import pytest

from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.pipelines import PipeCosts, pipeline, simulate
from holdall.pipelines.costs import StageCosts
from holdall.pipelines.swapping.gaps import play_gaps, staying
from holdall.pipelines.swapping.yuan import BALANCED, FULL, KINDS, NONE, YuanLayer, hidden_share, plan_yuan

FREE = float("inf")
LAYER = YuanLayer(forward=1.0, backward=2.0, saved=1000, input=100, lean=600, lean_again=0.05)


def by_looking(made, costs, leaving, step):
    """Rank -> most bytes, by looking at what is there in the middle of every stretch of time between two events."""
    spans = {(s.task.stage, s.task.kind, s.task.batch): s for s in step.spans}
    moments = {t for s in step.spans for t in (s.start, s.end)} | {t for c in step.copies for t in (c.start, c.end)}
    most = [0] * made.ranks
    for now in ((a + b) / 2 for a, b in itertools.pairwise(sorted(moments))):
        held = [sum(costs.stages[s].weights for s in made.stages_of(rank)) for rank in range(made.ranks)]
        for (stage, kind, batch), forward in spans.items():
            backward, own = spans[stage, "B", batch], costs.stages[stage]
            if kind != "F" or not forward.start < now < backward.end:
                continue
            held[forward.rank] += max(own.activations, own.in_backward or 0) if now > backward.start else own.activations
            copies = {c.is_out: c for c in step.copies if (c.stage, c.batch) == (stage, batch)}
            if copies and copies[True].end < now < copies[False].start:
                held[forward.rank] -= leaving[stage]
        most = [max(pair) for pair in zip(most, held, strict=True)]
    return tuple(most)


def made_up(drawn, count):
    return [
        StageCosts(
            forward=drawn.uniform(0.5, 2),
            input=drawn.uniform(0.5, 2),
            activations=drawn.randint(50, 200),
            in_backward=drawn.randint(100, 250),
            weights=drawn.randint(0, 100),
        )
        for _ in range(count)
    ]


def test_peaks_are_those_of_a_naive_count_and_links_serve_one_copy_at_a_time():
    drawn = random.Random(0)
    for _ in range(12):
        name, ranks = drawn.choice(["1f1b", "interleaved:chunks=2", "gpipe", "hanayo"]), drawn.choice([2, 4])
        made = pipeline(name, ranks=ranks, micro_batches=2 * ranks)
        costs = PipeCosts(stages=tuple(made_up(drawn, made.chain)))
        leaving = [drawn.randint(0, stage.activations) for stage in costs.stages]
        step = play_gaps(made, costs, leaving, drawn.choice([30.0, 200.0]))
        assert step.peak == by_looking(made, costs, leaving, step)
        spans = {(s.task.stage, s.task.kind, s.task.batch): s for s in step.spans}
        stay = staying(made)
        for copy in step.copies:
            assert (copy.stage, copy.batch) not in stay
            assert copy.start >= spans[copy.stage, "F", copy.batch].end
            assert copy.is_out or copy.end <= spans[copy.stage, "B", copy.batch].start
        for a, b in itertools.combinations(step.copies, 2):
            assert (a.rank, a.is_out) != (b.rank, b.is_out) or a.end <= b.start or b.end <= a.start
        back = [(c.start, spans[c.stage, "B", c.batch].end, c.rank) for c in step.copies if not c.is_out]
        for rank in range(made.ranks):  # two buffers
            events = sorted((t, d) for a, b, r in back if r == rank for t, d in ((a, 1), (b, -1)))
            assert max(itertools.accumulate(d for _, d in events), default=0) <= 2


def test_without_copies_it_is_the_simulator():
    for name in ("1f1b", "interleaved:chunks=2"):
        made = pipeline(name, ranks=4, micro_batches=8)
        costs = PipeCosts.even(made.chain, forward=1.0, input=1.0, weight=1.0, hop=0.1, activations=10, weights=7)
        step, plain = play_gaps(made, costs, [0] * made.chain, 1.0), simulate(made, costs)
        assert step.seconds == plain.makespan and step.peak == tuple(held.bytes for held in plain.held)


@pytest.mark.parametrize("ranks", [3, 4])
def test_memory_is_linear_in_alpha_and_copies_that_the_gap_hides_cost_nothing(ranks):
    made = pipeline("interleaved:chunks=2", ranks=ranks, micro_batches=2 * ranks)
    costs = PipeCosts.even(made.chain, forward=1.0, input=1.0, weight=1.0, activations=1024)
    plain = simulate(made, costs)
    last = made.rank_of.index(ranks - 1, ranks)
    for host in (256.0, 512.0, 2048.0):
        shares = hidden_share(made, costs, host)
        assert shares == tuple(0.0 if s == last else min(1.0, host / 1024) for s in range(made.chain))
        peaks = []
        for alpha in (0, 0.25, 0.5, 0.75, 1.0):
            step = play_gaps(made, costs, [int(alpha * 1024) if s != last else 0 for s in range(made.chain)], host)
            assert (step.seconds == plain.makespan) == (alpha <= shares[0]), (host, alpha)
            peaks.append(step.peak)
        if shares[0] == 1:
            assert all(a - b == b - c for p in zip(*peaks, strict=True) for a, b, c in zip(p, p[1:], p[2:], strict=False))
            assert peaks[-1][0] == 3 * 1024 < peaks[0][0] == (3 * ranks - 1) * 1024


def test_a_micro_batch_whose_backward_follows_at_once_stays():
    made = pipeline("interleaved:chunks=2", ranks=4, micro_batches=8)
    assert {stage for stage, _ in staying(made)} == {7}
    assert {stage for stage, _ in staying(pipeline("1f1b", ranks=4, micro_batches=8))} == {3}


def test_alpha_is_the_smallest_that_fits_and_nothing_is_done_where_all_fits():
    made = pipeline("interleaved:chunks=2", ranks=4, micro_batches=8)
    layers = [[LAYER]] * 8
    plain = plan_yuan(made, layers, memory=11_000, host=500.0)
    assert plain.leaving == (0,) * 8 and all(own == (NONE,) for own in plain.kinds)
    hidden = plan_yuan(made, layers, memory=8_000, host=500.0)  # half of it is hidden; a step of alpha is four bytes
    assert hidden.seconds == plain.seconds and max(hidden.peak) <= 8_000 and all(own == (NONE,) for own in hidden.kinds)
    assert hidden.peak[0] >= 8_000 - 8 * 4 and hidden.alphas[7] == 0 < hidden.alphas[0] == hidden.alphas[4] < 0.5
    assert hidden.alphas[0] > hidden.alphas[1] > 0  # the second rank holds fewer micro-batches


def test_what_copies_do_not_hide_is_computed_again_the_cheapest_first():
    made = pipeline("interleaved:chunks=2", ranks=3, micro_batches=6)
    layers = [[LAYER] * 2] * 6
    free = plan_yuan(made, layers, memory=6_500, host=FREE)
    assert (
        all(kind == NONE for own in free.kinds for kind in own)
        and free.seconds == 2 * simulate(made, PipeCosts.even(6, forward=1.0, input=1.0, weight=1.0)).makespan
    )
    slow = plan_yuan(made, layers, memory=6_500, host=600.0)
    found = {kind for own in slow.kinds for kind in own}
    assert BALANCED in found and any(slow.alphas) and slow.seconds < 1.05 * free.seconds
    none = plan_yuan(made, layers, memory=6_500, host=1e-3)
    assert FULL in {kind for own in none.kinds for kind in own} and none.seconds > slow.seconds


def brute_force(made, layers, memory, host, shares):
    """The fastest of all checkpointings of all layers and these shares of all ranks."""
    best = FREE
    counts = [len(own) for own in layers]
    for flat in itertools.product(KINDS, repeat=sum(counts)):
        rest, kinds = iter(flat), []
        for count in counts:
            kinds.append([next(rest) for _ in range(count)])
        costs = []
        for own, of in zip(layers, kinds, strict=True):
            kept = [layer.kept(k) for layer, k in zip(own, of, strict=True)]
            again = sum(layer.again(k) for layer, k in zip(own, of, strict=True))
            most = max(sum(kept[:n]) + layer.saved for n, layer in enumerate(own))
            forward, backward = sum(layer.forward for layer in own), sum(layer.backward for layer in own)
            costs.append(StageCosts(forward=forward, input=backward + again, weight=0, activations=sum(kept), in_backward=most))
        priced = PipeCosts(stages=tuple(costs))
        for alphas in itertools.product(shares, repeat=made.ranks - 1):
            leaving = [int(a * c.activations) for a, c in zip([*alphas, 0], costs, strict=True)]
            step = play_gaps(made, priced, leaving, host)
            if max(step.peak) <= memory:
                best = min(best, step.seconds)
    return best


def test_plans_are_near_the_best_of_all():
    """Three stages of one unequal layer: three times the best of all checkpointings and shares, once 6.5 % slower."""
    drawn = random.Random(3)
    slower = []
    for _ in range(4):
        made = pipeline("1f1b", ranks=3, micro_batches=4)
        layers = [
            [
                YuanLayer(
                    forward=drawn.uniform(0.8, 1.2),
                    backward=drawn.uniform(1.6, 2.4),
                    saved=(saved := drawn.randint(80, 120)),
                    input=saved // 10,
                    lean=int(0.6 * saved),
                    lean_again=drawn.uniform(0.02, 0.2),
                )
            ]
            for _ in range(3)
        ]
        memory, host = drawn.choice([150, 180, 220]), drawn.uniform(20, 90)
        best = brute_force(made, layers, memory, host, [n / 4 for n in range(5)])
        found = plan_yuan(made, layers, memory=memory, host=host)
        assert max(found.peak) <= memory
        slower.append(found.seconds / best)
    assert max(slower) < 1.07 and sorted(slower)[2] <= 1


def test_a_plan_is_no_slower_than_one_checkpointing_for_all_with_the_smallest_share():
    """The paper's own search: every kind for the whole model."""
    made = pipeline("interleaved:chunks=2", ranks=3, micro_batches=6)
    layers = [[LAYER] * 2] * 6
    for memory, host in ((9000, 300.0), (6000, 800.0), (5000, 1500.0)):
        found = plan_yuan(made, layers, memory=memory, host=host)
        for kind in KINDS:
            kept, again = 2 * LAYER.kept(kind), 2 * LAYER.again(kind)
            costs = PipeCosts.even(
                6, forward=2.0, input=4.0 + again, weight=0.0, activations=kept, in_backward=LAYER.kept(kind) + 1000
            )
            for alpha in (0, 0.25, 0.5, 0.75, 1):
                step = play_gaps(made, costs, [int(alpha * kept) if s != 5 else 0 for s in range(6)], host)
                assert max(step.peak) > memory or found.seconds <= step.seconds


def test_what_cannot_fit_or_is_no_such_pipeline_is_refused():
    made = pipeline("1f1b", ranks=3, micro_batches=6)
    with pytest.raises(Infeasible, match="bytes more than its memory") as error:
        plan_yuan(made, [[LAYER]] * 3, memory=500, host=1e9)
    assert plan_yuan(made, [[LAYER]] * 3, memory=error.value.smallest, host=1e9).peak
    with pytest.raises(InvalidInput, match="layers of 2 stages for 3"):
        plan_yuan(made, [[LAYER]] * 2, memory=500, host=1e9)
    with pytest.raises(InvalidInput, match="other tasks than forwards and whole backwards"):
        plan_yuan(pipeline("zb_h1", ranks=3, micro_batches=6), [[LAYER]] * 3, memory=500, host=1e9)
    with pytest.raises(Unsupported, match="this plan divides some"):
        plan_yuan(made, [[LAYER]] * 3, memory=2500, host=1e9).start_with()
