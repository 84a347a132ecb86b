"""Optimizer states on the host over meshes of all kinds: bits, peaks, bytes and checkpoints on two and four real ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

WORDS, WIDTH, LENGTH, ROWS, EXPERTS, STEPS, SAVED = 32, 16, 16, 2, 4, 3, 2
HELD = 3 * ROWS * LENGTH * WORDS * 4  # bytes: three times the largest buffer that a collective has
TWO = {  # ranks in all: mesh, way, precision, rule, backwards of a step
    "zero1": ({"dp": 2}, "zero1", None, "adamw", 2),
    "sequence": ({"tp": 2}, "sequence", "bf16", "adamw", 2),
    "ring": ({"cp": 2}, "ring", None, "fused", 1),
    "experts": ({"ep": 2}, "experts", None, "momentum", 1),
}
FOUR = {
    "replicas": ({"replicate": 2, "dp": 2}, "fsdp", "bf16", "adamw", 2),
    "triple": ({"replicate": 2, "dp": 2}, "nig", None, "adamw", 2),
    "nodes": ({"nodes": 2, "dp": 2}, "hpz", "bf16", "fused", 1),
    "data x tensors": ({"dp": 2, "tp": 2}, "zero2", None, "adamw", 2),
}
TWO, FOUR = by_default(TWO, "ring", "experts"), by_default(FOUR, "triple", "nodes")
CASES = {**TWO, **FOUR}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.inner_dim = 4, WIDTH

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.inner_dim, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) / 4)

    def forward(self, tokens, experts, weights):
        chosen = [torch.relu(tokens.unsqueeze(1) @ self.up[e]) @ self.down[e] for e in experts.T]
        return sum(y.squeeze(1) * w.unsqueeze(1) for y, w in zip(chosen, weights.T, strict=True))


class Mixture(nn.Module):
    """Every expert has as many tokens, as traces have it."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = (torch.arange(len(flat)).unsqueeze(1) + torch.arange(2)) % EXPERTS
        return self.experts(flat, chosen, self.router(flat).softmax(-1).gather(1, chosen)).view_as(x)


class Layer(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.norm, self.inside, self.drop = nn.LayerNorm(WIDTH), Mixture() if mixes else Attention(), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.inside(self.norm(x)))


class Words(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Layer(mixes) for _ in range(3))

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def optimizer_of(model, rule):
    if rule == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=rule == "fused" or None)


def built(case):
    mesh, _, _, rule, _ = CASES[case]
    torch.manual_seed(0)
    model = Words("ep" in mesh)
    return model, optimizer_of(model, rule)


def batch(mesh, rank, nth=0):
    """Ranks that divide a model have one batch, but for experts; others have their own."""
    alike = 2 if {"tp", "cp"} & mesh.keys() else 1
    generator = torch.Generator().manual_seed(10 * nth + rank // alike)
    return {name: torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for name in ("ids", "labels")}


def planned(case):
    """What ranks do with everything on the device, and what `auto` finds where there is no room for half of the states."""
    mesh, way, precision, _, backwards = CASES[case]
    model, optimizer = built(case)
    trace = holdall.trace(model, batch(mesh, 0), optimizer=optimizer, mesh=mesh, shard=way, precision=precision)
    asked = {"hardware": machine(), "allow": ["place"], "accumulate": backwards}
    plain = holdall.plan(trace, budget="1GiB", **asked)
    states = sum(t.nbytes for t in trace.tensors.values() if t.name.endswith(("exp_avg", "exp_avg_sq", "momentum_buffer")))
    return {"plain": plain, "there": holdall.plan(trace, budget=plain.predicted.peak["cpu"] - states // 2, **asked)}


def step(case, model, optimizer, nth, held):
    """Clipped, after as many backwards as the case has, with dropout."""
    torch.manual_seed(nth)
    for half in range(CASES[case][-1]):
        held["batch"] = batch(CASES[case][0], dist.get_rank(), 2 * nth + half)
        held["loss"] = model(**held["batch"])
        held["loss"].backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model):
    return [p.full_tensor().detach() for p in model.parameters()]


def trained(case, plan, folder):
    """Steps with a checkpoint in the middle, and again from the checkpoint."""
    (model, optimizer), held = built(case), {}
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:  # gloo may hold a buffer after its collective is over
        for nth in range(STEPS):
            step(case, model, optimizer, nth, held)
            if nth + 1 == SAVED and "host_states" in plan.count():
                holdall.save_checkpoint(folder, model, optimizer, step=SAVED)
        found = {
            "weights": weights_of(model),
            "peaks": list(harness.step_peaks),
            "host": harness.measured().peak.get("far", 0),
            "copied": {k: v for k, v in harness.measured().traffic.items() if "far" in k},
        }
        optimizer.state.clear()
        for nth in range(holdall.load_checkpoint(folder, model, optimizer).step, STEPS):
            step(case, model, optimizer, nth, held)
    return {**found, "again": weights_of(model)}


def trained_all(plans, folder):
    return {
        case: {how: trained(case, plan[how], folder / case.replace(" ", "-")) for how in ("there", "plain")}
        for case, plan in plans.items()
    }


@pytest.fixture(scope="module")
def plans():
    return {case: planned(case) for case in CASES}


@pytest.fixture(scope="module")
def ran(plans, tmp_path_factory):
    """case -> what every rank found."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = []
    for ranks, cases in ((2, TWO), (4, FOUR)):
        found += on_ranks(ranks, trained_all, {case: plans[case] for case in cases}, folder)
    return {case: [rank[case] for rank in found if case in rank] for case in CASES}


each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_weights_are_those_of_the_same_ranks_without_a_plan(ran, case):
    """Also those that go on from a checkpoint that states on the host were written to, read into the host and elsewhere."""
    for rank in ran[case]:
        plain = rank["plain"]["weights"]
        for weights in (rank["there"]["weights"], rank["there"]["again"], rank["plain"]["again"]):
            assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


@each_case
def test_peaks_are_the_predicted_ones(ran, plans, case):
    """To the byte; threads of gloo may hold buffers for a moment after collectives are over. The first step makes states."""
    plain, there = plans[case]["plain"], plans[case]["there"]
    assert plain.count().keys() ^ there.count().keys() == {"host_states"}
    assert there.predicted.peak["cpu"] < plain.predicted.peak["cpu"]
    for rank in ran[case]:
        for how, plan in plans[case].items():
            peaks, predicted = rank[how]["peaks"], plan.predicted.peak["cpu"]
            assert min(peaks[1:]) == predicted <= max(peaks) <= predicted + HELD


@each_case
def test_bytes_on_the_host_and_copied_are_the_predicted_ones(ran, plans, case):
    """Once there and back in each step, but for the first."""
    predicted = plans[case]["there"].predicted
    moved = {link: size for link, size in predicted.traffic.items() if "far" in link}
    for rank in ran[case]:
        assert rank["there"]["host"] == predicted.peak["far"] > 0 == rank["plain"]["host"]
        assert rank["there"]["copied"] == {link: round((STEPS - 1) * size / STEPS) for link, size in moved.items()}
        assert set(moved) == {"cpu->far", "far->cpu"} and not rank["plain"]["copied"]
