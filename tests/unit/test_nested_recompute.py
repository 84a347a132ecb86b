"""Segments inside of segments: the same bits, the predicted peak, nothing left behind."""

import copy
import gc
import random
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.offload import Offload
from holdall.actions.recompute import Inner, Recompute, keepable, nested, obstacle
from holdall.actions.reschedule import Reschedule
from holdall.actions.reschedule import obstacle as op_obstacle
from holdall.actions.reschedule.op_graph import programs
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.planning.segments import runs
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import chain, far_peak, far_used
from holdall.types import Plan
from holdall.types.program import Nest

FAMILIES = ["convnet", "twice", "tied", "tiny-gpt2", "tiny-t5"]
DRAWS = 2


def random_inner(names, rng, depth=0):
    """Any segments of a stretch, each with any segments inside."""
    found, i = [], 0
    while i < len(names):
        length = rng.randint(1, len(names) - i)
        if rng.random() < 0.7 and depth < 5:
            part = names[i : i + length]
            found.append(Inner(blocks=part, inner=tuple(random_inner(part, rng, depth + 1))))
        i += length
    return found


def random_programs(trace, blocks, rng):
    """Programs for some of the blocks that can be run op by op."""
    able = [b for b in blocks if b.saves and not op_obstacle(trace, b) and rng.random() < 0.5]
    return [Reschedule.of(trace, b, rng.choice(menu)) for b in able if (menu := programs(trace, b))]


def random_nests(trace, rng):
    """Every row of blocks cut at random into segments with segments inside; some keep op results or let go of some tensors."""
    actions = []
    for row in runs(trace):
        i = 0
        while i < len(row):
            part = row[i : i + rng.choice([1, 2, 4, 8])]
            i += len(part)
            names = tuple(b.name for b in part)
            inner = random_inner(names, rng)
            can = list(keepable(trace, part[0]))
            keep = rng.sample(can, min(len(can), rng.choice([0, 0, 2])))
            only = [n for n in range(min(len(b.saves) for b in part)) if rng.random() < 0.5] if rng.random() < 0.3 else []
            by_op = [] if keep or only else random_programs(trace, part, rng)
            action = Recompute.of(trace, part, keep, only=only, inner=inner, programs=by_op)
            if not obstacle(trace, part, nested(action.blocks, action.inner)):
                actions.append(action)
                if rng.random() < 0.3:
                    actions.append(Offload.of(trace, part[0], overlap=rng.random() < 0.5))
    return actions


def depths(action):
    return 1 + max((depths(part) for part in action.inner), default=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_nesting_gives_the_same_bits_and_the_predicted_peak(name):
    """Losses, weights and buffers after two steps; dropout, running statistics, kept ops and offloaded inputs included."""
    rng = random.Random(name)
    model, batch, _, trace = traced(name)
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)
    weights = copy.deepcopy(model.state_dict())
    for _ in range(DRAWS):
        actions = random_nests(trace, rng)
        plan = finish(Nop(), problem_for(trace), actions)
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gc.collect()
        with holdall.apply(plan, model, optimizer) as harness:
            losses = train(model, batch, optimizer, 2)
        assert losses == expected, actions
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items()), actions
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"], actions
        assert far_peak(harness) == plan.predicted.peak.get("far", 0), actions
        assert far_used(harness) == 0
        assert harness.notes == []


RUNS = Counter()  # forwards of each layer


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)

    def forward(self, x):
        RUNS[id(self)] += 1  # no attribute of the module: a replay would put it back
        return self.drop(self.norm(torch.tanh(self.up(x))))


class Stack(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.layers = nn.ModuleList(Counted() for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def in_four(names):
    """Halves of halves: the first half of every stretch is a segment inside."""
    if len(names) < 2:
        return ()
    half = len(names) // 2
    first, second = names[:half], names[half:]
    return (Inner(blocks=first, inner=in_four(first)), *in_four(second))


def test_blocks_run_once_more_for_every_segment_around_them():
    torch.manual_seed(0)
    model, x = Stack(8), torch.randn(4, 16)
    trace = holdall.trace(model, x)
    names = tuple(b.name for b in trace.blocks)
    action = Recompute.of(trace, trace.blocks, inner=in_four(names))
    plan = finish(Nop(), problem_for(trace), [action])
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    reference(x).backward()
    RUNS.clear()
    gc.collect()
    gc.disable()
    try:
        with holdall.apply(plan, model, None) as harness:
            torch.manual_seed(1)
            loss = model(x)
            held = harness.ledger.live
            loss.backward()
            del loss
            after = harness.ledger.live - sum(p.grad.nbytes for p in model.parameters())
        assert [RUNS[id(layer)] for layer in model.layers] == [5, 4, 4, 3, 4, 3, 3, 2]
        own = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
        assert held > after == own  # nothing waits for the collector
    finally:
        gc.enable()
    assert harness.step_peaks == [plan.predicted.peak["cpu"]]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())  # statistics change once
    assert model.layers[0].norm.num_batches_tracked == 1


def test_what_a_block_returns_goes_when_the_blocks_that_take_it_are_over():
    """In plain training a container (here `Sequential`) may hold its argument for longer; a replay has no container."""
    model, batch, optimizer, trace = traced("convnet")
    blocks = runs(trace)[0]
    for only, part in (((0, 1), blocks[:3]), ((1,), blocks[4:])):
        inner = [Inner(blocks=tuple(b.name for b in part))]
        plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, blocks, only=only, inner=inner)])
        with holdall.apply(plan, model, optimizer) as harness:
            train(model, batch, optimizer, 2)
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


def test_memory_falls_with_every_level_and_time_rises():
    trace = chain([100] * 16)
    names = tuple(b.name for b in trace.blocks)

    def level(stretch, n):
        if n == 0 or len(stretch) < 2:
            return ()
        half = len(stretch) // 2
        return (Inner(blocks=stretch[:half], inner=level(stretch[:half], n - 1)), *level(stretch[half:], n - 1))

    found = []
    for n in range(5):
        action = Recompute.of(trace, trace.blocks, inner=level(names, n))
        assert depths(action) == n + 1
        found.append(simulate(problem_for(trace), [action], checked=True))
    peaks, seconds = [o.peak["cpu"] for o in found], [o.seconds for o in found]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[4] < peaks[0] / 5
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[4]


def test_a_nested_plan_survives_saving_and_loading(tmp_path):
    trace = chain([50] * 6)
    names = tuple(b.name for b in trace.blocks)
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, trace.blocks, only=[0], inner=in_four(names))])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("inner", [[("b1", "b3")], [("b1", "b2"), ("b0",)], [("b0", "b1"), ("b1",)], [()], [("other",)]])
def test_inner_segments_that_are_no_parts_are_refused(inner):
    trace = chain([50] * 4)
    action = Recompute.of(trace, trace.blocks, inner=[Inner(blocks=part) for part in inner])
    with pytest.raises(InvalidInput, match="is not consecutive"):
        simulate(problem_for(trace), [action])
    assert nested(("a", "b", "c"), [Inner(blocks=("b", "c"), inner=(Inner(blocks=("c",)),))]) == (Nest(1, 2, (Nest(1, 1),)),)


def test_what_a_later_block_changes_in_place_cannot_be_an_input_of_a_second_replay():
    class Add(nn.Module):
        def __init__(self, inplace):
            super().__init__()
            self.weight, self.inplace = nn.Parameter(torch.ones(8)), inplace

        def forward(self, x, y):
            y = y * self.weight
            return (x.add_(y) if self.inplace else x + y), y

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Add(False), Add(False), Add(True)])

        def forward(self, x):
            first, y = self.layers[0](x, x)
            _, y = self.layers[1](first, y)
            out, y = self.layers[2](first, y)
            return out.sum() + y.sum()

    model, x = Changing(), torch.randn(4, 8)
    trace = holdall.trace(model, x)
    names = [b.name for b in trace.blocks]
    assert names == ["layers.0", "layers.1", "layers.2"]
    simulate(problem_for(trace), [Recompute.of(trace, trace.blocks)], checked=True)
    with pytest.raises(Unsupported, match="second replay"):
        simulate(problem_for(trace), [Recompute.of(trace, trace.blocks, inner=[Inner(blocks=("layers.1",))])])


def test_an_abandoned_replay_leaves_no_tensor_behind():
    """Backward stops between an outer replay and an inner one; what the replay made goes with the graph."""
    torch.manual_seed(0)
    model, x = Stack(4), torch.randn(4, 16)
    trace = holdall.trace(model, x)
    names = tuple(b.name for b in trace.blocks)
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, trace.blocks, inner=[Inner(blocks=names[:2])])])

    def stop(_):
        raise KeyboardInterrupt

    gc.collect()
    with holdall.apply(plan, model, None) as harness:
        before = harness.ledger.live
        outputs = []
        handle = model.layers[1].register_forward_hook(lambda m, a, out: outputs.append(out) if not outputs else None)
        loss = model(x)
        outputs[0].register_hook(stop)
        handle.remove()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        graph = weakref.ref(loss)
        model.zero_grad()
        del loss
        outputs.clear()
        gc.collect()
        assert graph() is None
        assert harness.ledger.live == before + x.nbytes


def test_nested_segments_work_beside_other_shapes_and_branches():
    """A loop that leaves the trace costs memory or time, never correctness."""
    model, _, optimizer, trace = traced("tied")
    reference = copy.deepcopy(model)
    names = tuple(f"layers.{n}" for n in range(4))
    blocks = [trace.block(n) for n in names]
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, blocks, only=[0, 1, 5], inner=in_four(names))])
    longer = (torch.randint(0, 64, (2, 24)),)

    for m in (model, reference):  # one layer is left out
        m.forward = lambda ids, m=m: nn.functional.cross_entropy(
            m.head(m.layers[3](m.layers[2](m.layers[0](m.embed(ids))))).flatten(0, 1), ids.flatten()
        )
    expected = train(reference, longer, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        got = train(model, longer, optimizer)
    assert got == expected
    assert any("left the trace" in note for note in harness.notes)


def test_a_kept_op_that_draws_leaves_the_same_masks_to_those_after_it():
    """Its result is not drawn again, so the random state behind it must be put back."""

    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            x = torch.native_dropout(self.first(x), 0.5, True)[0]
            return torch.native_dropout(self.second(x), 0.5, True)[0].tanh()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Drawing(), Drawing()])

        def forward(self, x):
            return self.layers[1](self.layers[0](x)).sum()

    torch.manual_seed(0)
    model, x = Two(), torch.randn(8, 16)
    trace = holdall.trace(model, x)
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    reference(x).backward()
    names = tuple(b.name for b in trace.blocks)
    action = Recompute.of(trace, trace.blocks, ["aten.native_dropout.default#0"], inner=[Inner(blocks=names[:1])])
    with holdall.apply(finish(Nop(), problem_for(trace), [action]), model, None) as harness:
        torch.manual_seed(1)
        model(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert harness.step_peaks == [harness.plan.predicted.peak["cpu"]]
