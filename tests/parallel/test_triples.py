"""All ten triples of PaRO on two groups of two real ranks: weights, bytes sent and held; and by `fit`, with peaks."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import holdall
from holdall.cost.collectives import sent_bytes
from holdall.cost.sharding import ModelStates, ShardStep, sendings
from holdall.parallel.counting import CollectiveBytes
from holdall.parallel.groups import device_mesh, flat_mesh, group_dims
from holdall.parallel.sharding.build import divide_update, follow_parameters, put_off_sums, shard_model
from holdall.parallel.sharding.ho_ring import HORing, HORingGather, HORingReduce
from holdall.parallel.sharding.paro import TRIPLES, paro_factors
from holdall.sharded import local_of
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine
from holdall.types import Mesh

GROUPS, FLAT, NODES = {"replicate": 2, "dp": 2}, {"dp": 4}, {"nodes": 2, "dp": 2}
OTHERWISE = {"NNN": (FLAT, "ddp"), "III": (GROUPS, "zero3"), "GGG": (FLAT, "zero3")}  # ways of torch's engine
FITTED = tuple(by_default(dict.fromkeys(("nig", "igg")), "igg"))  # `test_mics.py` has iig
RING = HORing(groups=2, members=2)
STEPS, BACKWARDS = 5, 2
NORM = 0.05  # gradients are clipped to it


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(2))
        self.last = torch.nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def build(width=16):
    torch.manual_seed(0)
    model = Stack(width)
    if width % 2:
        model.layers[0].spare = torch.nn.Linear(width, 3)  # without gradients
    return model


def frozen():
    """The weights of layers are."""
    model = build()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias") or name.startswith("last"))
    return model


def batch(rank, nth, width=16):
    return torch.randn(64, width, generator=torch.Generator().manual_seed(10 * nth + rank))


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def by_hand(width=16, model=None):
    """One process: the mean over ranks of gradients that add up over the backwards of a step, clipped."""
    model = build(width) if model is None else model
    optimizer = adam(model)
    for _ in range(STEPS):
        for rank in range(4):
            for nth in range(BACKWARDS):
                (model(batch(rank, nth, width)) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], [optimizer.state.get(p, {}).get("exp_avg") for p in model.parameters()]


def stored(tensors):
    """Bytes of the memory behind tensors, each once."""
    return sum({s._cdata: s.nbytes() for s in (local_of(t).untyped_storage() for t in tensors)}.values())


def train(model, optimizer, width=16):
    """Steps of several backwards; returns the bytes of gradients before the last update."""
    for _ in range(STEPS):
        for nth in range(BACKWARDS):
            mine = batch(dist.get_rank(), nth, width)
            loss = model(mine)
            loss.backward()
        grads = stored(p.grad for p in model.parameters() if p.grad is not None)
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    return grads


def divided(mesh, way, *, width=16, folder=None, model=None):
    """Trains without `fit`, which traces for a second; bytes of the whole run by kind of collective."""
    model = build(width) if model is None else model
    optimizer, before = adam(model), dict(model.named_parameters())
    mesh = Mesh.of(mesh)
    on = device_mesh(mesh, "cpu")
    shard_model(model, [f"layers.{n}" for n in range(2)], on, way)
    follow_parameters(optimizer, before, model)
    divide_update(optimizer, model, on, way)
    if mesh.replicas:
        put_off_sums(model, optimizer, BACKWARDS)
    with CollectiveBytes("dp", 4, group_dims(on, mesh) if len(mesh.dims) > 1 else None) as counted:
        grads = train(model, optimizer, width)
    if folder is not None:
        holdall.save_checkpoint(folder, step=STEPS, model=model, optimizer=optimizer)
    sent = {}
    for link, size in counted.sent.items():
        kind = link.split()[1]
        sent[kind] = sent.get(kind, 0) + size
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {
        "weights": [p.full_tensor().detach() for p in model.parameters()],
        "held": (stored(model.parameters()), grads, stored(states)),
        "sent": sent,
        "links": counted.sent,
    }


def fitted(way):
    model = build()
    optimizer = adam(model)
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": GROUPS, "shard": way, "accumulate": BACKWARDS}
    with holdall.fit(model, optimizer, (batch(dist.get_rank(), 0),), planner="nop", **asked) as harness:
        train(model, optimizer)
        traffic, peaks = harness.measured().traffic, harness.step_peaks[1:]
    return {
        "weights": [p.full_tensor().detach() for p in model.parameters()],
        "peaks": peaks,
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in traffic.items() if size},
    }


def way_of(triple):
    return OTHERWISE.get(triple, (GROUPS, triple.lower()))


def wrong_steps():
    """What loops are told that step too early, and that keep the gradients of the step before."""
    model = build()
    optimizer, before = adam(model), dict(model.named_parameters())
    on = device_mesh(Mesh.of(GROUPS), "cpu")
    shard_model(model, [], on, "nig")
    follow_parameters(optimizer, before, model)
    divide_update(optimizer, model, on, "nig")
    put_off_sums(model, optimizer, 2)
    mine = batch(dist.get_rank(), 0)
    model(mine).backward()
    with pytest.raises(holdall.HoldallError) as early:
        optimizer.step()
    model(mine).backward()
    optimizer.step()
    with pytest.raises(holdall.HoldallError) as kept:
        model(mine).backward()
    return early.value.fact, kept.value.fact


def rings():
    """HO-Ring's collectives, and torch's; what this rank sent in each."""
    mesh = Mesh.of(NODES)
    on = device_mesh(mesh, "cpu")
    group, rank = flat_mesh(on).get_group(), dist.get_rank()
    own = torch.randn(7, generator=torch.Generator().manual_seed(rank))
    whole = torch.arange(28.0) + 100 * rank  # small integers: sums are exact in any order
    gathered, plain, part, mean, one = (torch.empty(n) for n in (28, 28, 7, 7, 7))
    dist.all_gather_single(plain, own, group=group)
    dist.reduce_scatter_single(one, whole, group=group)
    messages = []
    with CollectiveBytes("all", 4, group_dims(on, mesh)) as gathering, Sends(messages):
        HORingGather(on)(gathered, own, group)
    with CollectiveBytes("all", 4, group_dims(on, mesh)) as reducing:
        HORingReduce(on)(part, whole, group, dist.ReduceOp.SUM)
    HORingReduce(on)(mean, whole, group, dist.ReduceOp.AVG)
    return {
        "gathered": torch.equal(gathered, plain),
        "reduced": torch.equal(part, one) and torch.equal(mean, one / 4) and whole[0] == 100 * rank,
        "sent": (gathering.sent, reducing.sent),
        "messages": messages,
    }


class Sends(TorchDispatchMode):
    """Elements of every message that is sent."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::send":
            self.found.append(sum(t.numel() for t in args[0]))
        return func(*args, **(kwargs or {}))


def run_all(folder):
    ran = {triple: divided(*way_of(triple)) for triple in TRIPLES}
    ran |= {way: fitted(way) for way in FITTED}
    return {
        **ran,
        "odd": divided(GROUPS, "nig", width=15, folder=folder),
        "odd igg": divided(GROUPS, "igg", width=15),
        "frozen": divided(GROUPS, "i-nig", model=frozen()),
        "wrong": wrong_steps(),
        "rings": rings(),
        "horing": divided(NODES, "horing"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def ran(folder):
    return on_ranks(4, run_all, folder, timeout=300)


each_triple = pytest.mark.parametrize("triple", TRIPLES)
each_fit = pytest.mark.parametrize("way", FITTED)


@pytest.mark.parametrize("name", [*TRIPLES, *FITTED, "horing"])
def test_weights_are_those_of_data_parallelism(ran, name):
    """AMSP's (1, 2, 4) is NIG here."""
    alone, _ = by_hand()
    for rank in ran:
        for weight, plain, expected in zip(rank[name]["weights"], rank["NNN"]["weights"], alone, strict=True):
            torch.testing.assert_close(weight, plain, rtol=0, atol=1e-6)
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)


@each_triple
def test_bytes_sent_are_those_of_the_closed_form(ran, triple):
    """To the byte; torch's engine reduces replicas of ddp in every backward, the closed form once in a step."""
    size = sum(4 * p.numel() for p in build().parameters())
    times = STEPS * (BACKWARDS if triple == "NNN" else 1)
    said = {kind: times * nbytes for kind, nbytes in closed_form(triple, size, BACKWARDS).items()}
    for rank in ran:
        assert {kind: rank[triple]["sent"][kind] for kind in said} == said
        assert rank[triple]["sent"].keys() - said.keys() <= {"all_reduce"}  # of norms


def closed_form(triple, size, backwards, *, trained=True):
    """Bytes that a rank sends in a step, by kind."""
    model = ModelStates(params=size, grads=size * trained, states=2 * size * trained)
    said = {}
    for one in sendings(paro_factors(triple, 4, 2), model, ShardStep(ranks=4, backwards=backwards)):
        said[one.kind] = said.get(one.kind, 0) + one.sent
    return said


@each_triple
def test_bytes_held_are_those_of_the_closed_form(ran, triple):
    size = sum(4 * p.numel() for p in build().parameters())
    p, g, o = paro_factors(triple, 4, 2)
    for rank in ran:
        assert rank[triple]["held"] == (size // p, size // g, 2 * size // o)


def of_frozen(backwards):
    """Bytes that a rank sends in a step, by kind: frozen weights are gathered inside the group, the others as NIG says."""
    kept = sum(4 * p.numel() for p in frozen().parameters() if not p.requires_grad)
    trained = sum(4 * p.numel() for p in frozen().parameters() if p.requires_grad)
    said = closed_form("NIG", trained, backwards)
    said["all_gather"] += closed_form("III", kept, backwards, trained=False)["all_gather"]
    return (kept // 2 + trained, trained // 2, 2 * trained // 4), said


def test_frozen_weights_have_shards_of_their_own(ran):
    """And a traced step sends what a run does."""
    alone, _ = by_hand(model=frozen())
    held, said = of_frozen(BACKWARDS)
    for rank in ran:
        assert rank["frozen"]["held"] == held
        assert {kind: rank["frozen"]["sent"][kind] for kind in said} == {kind: STEPS * size for kind, size in said.items()}
        for weight, expected in zip(rank["frozen"]["weights"], alone, strict=True):
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    model = frozen()
    found = holdall.trace(model, (batch(0, 0),), optimizer=adam(model), mesh=GROUPS, shard="i-nig").about.shards
    traced = {}
    for one in found.collectives:
        traced[one.kind] = traced.get(one.kind, 0) + sent_bytes(one.kind, one.nbytes, 2)
    assert traced == of_frozen(1)[1]


@each_fit
def test_the_peak_is_the_predicted_one(ran, way):
    """To the byte; but a thread of gloo may hold a buffer for a moment after its collective is over."""
    for rank in ran:
        predicted = rank[way]["predicted"].peak["cpu"]
        assert predicted <= min(rank[way]["peaks"]) <= 1.02 * predicted


@each_fit
def test_collectives_send_the_predicted_bytes(ran, way):
    """Of one backward: sums over groups and gathers after the update come once in a step."""
    every = {"nig": ("dp reduce_scatter",), "igg": ("dp reduce_scatter", "dp all_gather", "replicate reduce_scatter")}
    for rank in ran:
        said = {k: v for k, v in rank[way]["predicted"].traffic.items() if k.split()[0] in ("dp", "replicate")}
        times = {link: BACKWARDS if link in every[way] else 1 for link in said}
        counted = {link: rank[way]["traffic"][link] for link in said}
        assert counted == {link: times[link] * size for link, size in said.items()} != {}


def test_uneven_rows_and_checkpoints(ran, folder):
    """Of a width that ranks cannot share evenly, with weights that have no gradient; one process loads what four saved."""
    weights, momenta = by_hand(15)
    model = build(15)
    optimizer = adam(model)
    holdall.load_checkpoint(folder, model=model, optimizer=optimizer)
    for p, saved, weight, moment in zip(model.parameters(), ran[0]["odd"]["weights"], weights, momenta, strict=True):
        assert torch.equal(p, saved)
        torch.testing.assert_close(p.detach(), weight, rtol=0, atol=1e-6)
        assert (moment is None) == (p not in optimizer.state)
        if moment is not None:
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], moment, rtol=0, atol=1e-6)
    for other, weight in zip(ran[0]["odd igg"]["weights"], weights, strict=True):
        torch.testing.assert_close(other, weight, rtol=0, atol=1e-6)


def test_steps_that_would_be_wrong_are_refused(ran):
    early, kept = ran[0]["wrong"]
    assert early == "a step came after 1 of 2 backwards, when gradients were not yet summed over replicas"
    assert kept == "gradients of the last step are still there, in the shards of who updates what"


@pytest.mark.parametrize(
    ("way", "rule", "fact"),
    [
        ("nig", torch.optim.Adafactor, "Adafactor may not update a parameter in parts"),
        ("nig", None, "`scale` has no rows that ranks could share"),
    ],
)
def test_models_and_rules_that_cannot_be_divided_are_refused(way, rule, fact):
    model = build()
    if rule is None:
        model.scale = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = (rule or torch.optim.SGD)(model.parameters(), lr=0.1)
    with pytest.raises(holdall.HoldallError, match=fact):
        holdall.trace(model, (batch(0, 0),), optimizer=optimizer, mesh=GROUPS, shard=way)


# HO-Ring


def test_ho_ring_gives_what_torchs_collectives_do(ran):
    assert all(rank["rings"]["gathered"] and rank["rings"]["reduced"] for rank in ran)


def test_ho_ring_sends_the_messages_of_its_schedule(ran):
    """Each of one chunk: one between groups and two inside for 2 x 2 ranks, in either direction."""
    for number, rank in enumerate(ran):
        for messages, sent in zip((RING.all_gather(), RING.reduce_scatter()), rank["rings"]["sent"], strict=True):
            mine = [m.link for m in messages if m.source == number]
            assert sent == {"nodes shift": 28 * mine.count("across"), "dp shift": 28 * mine.count("inside")}
        assert rank["rings"]["messages"] == [7] * len(mine)


def test_a_traced_step_with_ho_ring_sends_what_a_run_does(ran):
    model = build()
    found = holdall.trace(model, (batch(0, 0),), optimizer=adam(model), mesh=NODES, shard="horing").about.shards
    said = {}
    for one in found.collectives:
        said[f"{one.dim} {one.kind}"] = said.get(f"{one.dim} {one.kind}", 0) + one.nbytes
    counted = {link: size for link, size in ran[0]["horing"]["links"].items() if link.endswith("shift")}
    assert counted == {link: STEPS * BACKWARDS * size for link, size in said.items()} != {}
