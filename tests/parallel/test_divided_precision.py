"""`precision="bf16"` on models that are divided, and over replicas and nodes: against single processes in that precision."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

WORDS, WIDTH, LENGTH, ROWS, EXPERTS, STEPS = 32, 16, 16, 2, 4, 3
LARGEST = ROWS * LENGTH * WORDS * 4 + 1024  # bytes: the largest buffer that a collective has
CHEN = {"planner": "chen", "variant": "all"}
ALONE = {  # mesh of two ranks with one batch, way, other arguments of `fit`
    "sequence": ({"tp": 2}, "sequence", CHEN),
    "ring": ({"cp": 2}, "ring", CHEN),
}
BESIDE = by_default(  # the same of four ranks with batches of their own over the first dimension
    {
        "data x tensors": ({"dp": 2, "tp": 2}, "fsdp+sequence", {}),
        "data x experts": ({"dp": 2, "ep": 2}, "zero2", {}),
        "replicas": ({"replicate": 2, "dp": 2}, "fsdp", {}),
        "hpz": ({"nodes": 2, "dp": 2}, "hpz", CHEN),
        "horing": ({"nodes": 2, "dp": 2}, "horing", {}),
    },
    "data x experts",
    "horing",
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=n == 3) for n in range(4))

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
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
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return self.experts(flat, chosen, weights).view_as(x)


class Layer(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.one, self.two, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.wide = Mixture() if mixes else nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.wide(self.two(x))


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


def made(number, mixes=False):
    torch.manual_seed(0)
    model = Words(mixes)
    ids = torch.randint(0, WORDS, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"ids": ids[0], "labels": ids[1]}


def number_of(mesh, rank):
    """Of the batch that a rank has."""
    return rank // 2 if {"tp", "cp"} & mesh.keys() else rank


def trained(harness, model, optimizer, given):
    """What clipped steps leave."""
    for step in range(STEPS):
        model(**given).backward()
        if step == 0:
            grads = [whole(p.grad).tolist() for p in model.parameters()]  # no tensors, which would count
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "gradients": grads,
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in harness.measured().traffic.items() if "->" not in link},
        "actions": harness.plan.count(),
        "dtypes": {p.dtype for p in (*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values()))},
    }


def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().float().clone()


def fitted(mesh, way, options):
    model, optimizer, given = made(number_of(mesh, dist.get_rank()), "ep" in mesh)
    asked = {"budget": "1GiB", "hardware": machine(), "precision": "bf16", "mesh": mesh, "shard": way}
    with holdall.fit(model, optimizer, given, **asked, **options) as harness:
        found = trained(harness, model, optimizer, given)
    return found | {"weights": [whole(p) for p in model.parameters()]}


def fitted_all(cases):
    return {case: fitted(*given) for case, given in cases.items()}


@pytest.fixture(scope="module")
def alone():
    return on_ranks(2, fitted_all, ALONE)


@pytest.fixture(scope="module")
def beside():
    return on_ranks(4, fitted_all, BESIDE)


@pytest.fixture(scope="module")
def one():
    """(number of the batch, with experts?) -> what a single process has."""
    found = {}
    for number, mixes in [*((n, False) for n in range(4)), *((n, True) for n in range(4))]:
        model, optimizer, given = made(number, mixes)
        asked = {"budget": "1GiB", "hardware": machine(), "precision": "bf16"}
        with holdall.fit(model, optimizer, given, **asked) as harness:
            found[number, mixes] = trained(harness, model, optimizer, given)
        found[number, mixes]["weights"] = [whole(p) for p in model.parameters()]
    return found


def error(found, exact):
    """Norm of the difference, relative."""
    exact = [torch.as_tensor(t) for t in exact]
    off = [(torch.as_tensor(a) - b).flatten() for a, b in zip(found, exact, strict=True)]
    return (torch.cat(off).norm() / torch.cat([t.flatten() for t in exact]).norm()).item()


@pytest.mark.parametrize("case", ALONE)
def test_a_divided_model_trains_as_one_process_in_bf16(alone, one, case):
    """Sums are rounded at other places: first gradients differ by 1 % of their norm, and clipped steps end within 2 % of the
    way that they went."""
    start = [p.detach() for p in made(0)[0].parameters()]
    for rank in alone:
        assert error(rank[case]["gradients"], one[0, False]["gradients"]) < 0.01
        way = [b - a for a, b in zip(start, rank[case]["weights"], strict=True)]
        assert error(way, [b - a for a, b in zip(start, one[0, False]["weights"], strict=True)]) < 0.02
        assert rank[case]["dtypes"] == {torch.float32}


@pytest.mark.parametrize("case", BESIDE)
def test_gradients_over_data_are_the_mean_of_single_processes(beside, one, case):
    """Of models that are not divided to the last bit but one: four numbers are added up in another order."""
    mesh, _, _ = BESIDE[case]
    numbers = sorted({number_of(mesh, rank) for rank in range(4)})
    each = [one[number, "ep" in mesh]["gradients"] for number in numbers]
    mean = [sum(map(torch.tensor, some)) / len(numbers) for some in zip(*each, strict=True)]
    divided = {"tp", "cp", "ep"} & mesh.keys()
    for rank in beside:
        assert error(rank[case]["gradients"], mean) < (0.01 if divided else 1e-7)
        assert rank[case]["dtypes"] == {torch.float32}
        assert all(map(torch.equal, rank[case]["weights"], beside[0][case]["weights"]))


def test_ways_over_all_ranks_give_the_same_weights(beside):
    """Over nodes and over replicas: means of the same four batches."""
    for case in BESIDE.keys() - {"hpz", "data x tensors", "data x experts"}:
        assert error(beside[0][case]["weights"], beside[0]["hpz"]["weights"]) < 1e-6


@pytest.mark.parametrize("case", [*ALONE, *BESIDE])
def test_peaks_and_bytes_are_the_predicted_ones(request, case):
    for found, cases in (("alone", ALONE), ("beside", BESIDE)):
        for rank in request.getfixturevalue(found) if case in cases else ():
            predicted = rank[case]["predicted"]
            if case == "data x experts":  # their loads are taken to be equal
                assert max(rank[case]["peaks"]) == pytest.approx(predicted.peak["cpu"], rel=0.25)
                continue
            assert predicted.peak["cpu"] <= min(rank[case]["peaks"]) <= predicted.peak["cpu"] + LARGEST
            assert rank[case]["traffic"] == {link: size for link, size in predicted.traffic.items() if "->" not in link}
            assert ("recompute" in rank[case]["actions"]) == (cases[case][2] == CHEN)


@pytest.mark.parametrize(("mesh", "way"), [({"nodes": 2, "dp": 2}, "qwz"), ({"replicate": 2, "dp": 2}, "nig")])
def test_ways_with_gathers_of_their_own_are_refused(mesh, way):
    model, optimizer, given = made(0)
    with pytest.raises(holdall.Unsupported, match=f"not by {way}"):
        holdall.trace(model, given, optimizer=optimizer, mesh=mesh, shard=way, precision="bf16")
