"""Plans on models that torch has sharded: what works gives the same bits, the rest is refused in a line."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdall
from holdall.actions.head import Head
from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

WIDTH, ROWS = 16, 6


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def rows(rank=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)


def sharded(how):
    model, mesh = Stack(), init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "tensor":
        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def planned(how):
    """A plan for the unsharded model."""
    model = Stack()
    trace = holdall.trace(model, rows(), optimizer=momentum(model))
    plan = holdall.plan(trace, budget="1GiB", planner="nop", hardware=machine())
    blocks = [b for b in trace.blocks if b.name.startswith("layers")]
    wide = [n for n, i in enumerate(blocks[0].saves) if trace.tensors[trace.saves[i].tensor].shape == (ROWS, 4 * WIDTH)]
    actions = {
        "recompute": [Recompute.of(trace, [b]) for b in blocks],
        "recompute in pairs": [Recompute.of(trace, blocks[i : i + 2]) for i in (0, 2)],
        "recompute some": [Recompute.of(trace, [b], only=wide) for b in blocks],
        "offload": [Offload(block=b.name) for b in blocks],
        "offload some": [Offload(block=b.name, saves=tuple(wide)) for b in blocks],
        "place": [Place.all(trace, update="host")],
        "head": [Head(module="first", rows=2)],
    }
    assert len(blocks) == 4
    assert wide
    return replace(plan, actions=tuple(actions[how]))


def train(model, optimizer, batch, steps=3):
    for _ in range(steps):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def run(how, plan):
    """On a rank: (same bits as without the plan, left in shards, bytes offloaded), or the error."""
    model = sharded(how)
    optimizer, batch = momentum(model), rows(0 if how == "tensor" else dist.get_rank())
    try:
        with holdall.apply(plan, model, optimizer) as harness:
            train(model, optimizer, batch)
            far = harness.measured().peak.get("far", 0)
    except holdall.HoldallError as error:
        return str(error)
    plain = sharded(how)
    train(plain, momentum(plain), batch)
    same = all(torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    return same, all(isinstance(p, DTensor) for p in model.layers[0].up.parameters()), far


def run_all(plans):
    logging.getLogger("holdall").setLevel(logging.ERROR)
    return {(how, name): run(how, plan) for how in ("fully_shard", "tensor") for name, plan in plans.items()}


@pytest.fixture(scope="module")
def ran():
    """What came of every plan on every kind of shards, by rank."""
    return on_ranks(2, run_all, {name: planned(name) for name in (*WORK, *REFUSED)})


WORK = ("recompute", "recompute in pairs", "recompute some", "offload", "offload some")
REFUSED = ("place", "head")


@pytest.mark.parametrize("actions", WORK)
@pytest.mark.parametrize("how", ["fully_shard", "tensor"])
def test_a_plan_on_a_sharded_model_has_the_same_bits(ran, how, actions):
    for rank in ran:
        same, left_sharded, far = rank[how, actions]
        assert same
        assert left_sharded
        assert bool(far) == actions.startswith("offload")


@pytest.mark.parametrize("actions", ["offload", "offload some"])
def test_gathered_weights_are_not_offloaded(ran, actions):
    """What leaves is what leaves from a model that is not sharded."""
    model = Stack()
    with holdall.apply(planned(actions), model, optimizer := momentum(model)) as harness:
        train(model, optimizer, rows())
        expected = harness.measured().peak["far"]
    assert expected > 0
    assert [rank["fully_shard", actions][2] for rank in ran] == [expected, expected]


@pytest.mark.parametrize("actions", REFUSED)
@pytest.mark.parametrize("how", ["fully_shard", "tensor"])
def test_what_does_not_work_on_shards_is_refused(ran, how, actions):
    for rank in ran:
        said = rank[how, actions]
        assert f"the plan has `{actions}`, which does not work on a model that is sharded" in said
        assert "allow=['keep', 'offload', 'recompute']" in said


def ledgered():
    """The peaks of single steps by the ledger; the first has no optimizer states yet."""
    model = sharded("fully_shard")
    optimizer, batch, found = momentum(model), rows(), []
    with Ledger(seed=[*model.parameters(), batch]) as ledger:
        for _ in range(6):
            ledger.restart()
            train(model, optimizer, batch, steps=1)
            found.append(ledger.peak)
    return found[1:]


def tracked():
    """The peak by torch's tracker."""
    model = sharded("fully_shard")
    optimizer, batch = momentum(model), rows()
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((batch,))
    with tracker:
        train(model, optimizer, batch, steps=1)
        tracker.reset_mod_stats()
        train(model, optimizer, batch, steps=1)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def peaks():
    """The least of several each: a thread of gloo may hold a buffer for a moment after its collective is over."""
    return min(ledgered()), min(tracked() for _ in range(3))


def test_the_measured_peak_is_that_of_torchs_own_tracker():
    for ours, theirs in on_ranks(2, peaks):
        assert ours == pytest.approx(theirs, rel=0.02)  # about that buffer


def traced():
    said = {}
    for name, model in {
        "is a DTensor": sharded("fully_shard"),
        "FullyShardedDataParallel": FullyShardedDataParallel(Stack(), device_id=torch.device("cpu")),
    }.items():
        with pytest.raises(holdall.HoldallError) as by_trace:
            holdall.trace(model, rows())
        with pytest.raises(holdall.HoldallError) as by_fit:
            holdall.fit(model, momentum(model), rows(), budget="1GiB", hardware=machine())
        said[name] = (str(by_trace.value), str(by_fit.value))
    return said


def test_a_sharded_model_cannot_be_traced_and_says_so():
    for rank in on_ranks(2, traced):
        for fact, said in rank.items():
            assert all(fact in one and "before it is sharded" in one for one in said)


def replicated():
    """On a rank: the predicted peak of a model in DistributedDataParallel, and those of its steps."""
    model = torch.nn.parallel.DistributedDataParallel(Stack())
    optimizer, batch = momentum(model), rows(dist.get_rank())
    with holdall.fit(model, optimizer, batch, budget="1GiB", hardware=machine()) as harness:
        for _ in range(4):
            loss = model(batch)  # a loop's variable, which the prediction counts
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return harness.plan.predicted.peak["cpu"], harness.step_peaks[1:]


def penalised(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def sloped(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x), x)
    return model(x - 0.1 * slope)


@pytest.mark.parametrize("way", ["zero3", "zero2", "ddp"])
def test_gradients_of_gradients_are_refused_where_weights_are_gathered(way):
    model = Stack()
    with pytest.raises(holdall.Unsupported, match="gradients in it") as refused:
        holdall.trace(model, rows(), loss=penalised, mesh={"dp": 2}, shard=way)
    assert "leave out `mesh`" in str(refused.value)
    assert holdall.trace(model, rows(), loss=sloped, mesh={"dp": 2}, shard=way).about.shards is not None


def test_the_buckets_of_replicas_are_predicted():
    for predicted, measured in on_ranks(2, replicated):
        assert min(measured) == predicted
