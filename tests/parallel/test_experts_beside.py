"""Experts divided beside tensors or the sequence: gradients, weights, peaks and bytes of 2 x 2 and 2 x 2 x 2 ranks against one
process and the prediction. `test_three_dimensions.py` has Mixtral."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

WORDS, WIDTH, INSIDE, LENGTH, ROWS, STEPS, EXPERTS, TOP = 64, 16, 8, 16, 2, 2, 4, 2
LARGEST = ROWS * LENGTH * WORDS * 8 + 1024  # bytes: the largest buffer that a collective has
CHEN = {"planner": "chen", "variant": "all"}
EVERY = {  # mesh, way, other arguments of `fit`
    "tensors": ({"tp": 2, "ep": 2}, "fsdp", CHEN),
    "narrow": ({"tp": 2, "ep": 2}, "fsdp", {"precision": "bf16"}),
    "odd": ({"ep": 2, "tp": 2}, "fsdp", {"accumulate": 2}),
    "context": ({"cp": 2, "ep": 2}, "ring", {"allow": {"offload"}, "budget": 320_000}),
    "drops": ({"tp": 2, "ep": 2}, "fsdp", {}),
    "data, tensors": ({"dp": 2, "tp": 2, "ep": 2}, "zero3", CHEN),
    "data, context": ({"dp": 2, "ep": 2, "cp": 2}, "zero2+zigzag", {}),
    "tensors, context": ({"tp": 2, "cp": 2, "ep": 2}, "fsdp", {}),
}
CASES = by_default(EVERY, "narrow", "odd", "data, tensors", "data, context", "tensors, context")
EIGHT = tuple(case for case in CASES if "," in case)
FOUR = tuple(case for case in CASES if case not in EIGHT)
SAME = tuple(case for case in CASES if case != "drops")  # as one process, which draws other numbers


class Experts(nn.Module):
    def __init__(self, drops):
        super().__init__()
        self.num_experts, self.drop = EXPERTS, nn.Dropout(drops)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INSIDE) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH) / 4)

    def forward(self, tokens, experts, weights):
        chosen = [self.drop(torch.relu(tokens.unsqueeze(1) @ self.up[e])) @ self.down[e] for e in experts.T]
        return sum(y.squeeze(1) * w.unsqueeze(1) for y, w in zip(chosen, weights.T, strict=True))


class Layer(nn.Module):
    """Attention of matrices side by side, and experts that follow from words, so that all have as many tokens; with dropout by
    a router."""

    def __init__(self, drops):
        super().__init__()
        self.norm, self.drop, self.router = nn.LayerNorm(WIDTH), nn.Dropout(drops), nn.Linear(WIDTH, EXPERTS)
        self.n_head, self.inner_dim = 4, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(drops)

    def forward(self, x, words):
        parts = self.qkv(self.norm(x)).split(self.inner_dim, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        flat, first = x.flatten(0, 1), words.flatten().unsqueeze(1)
        scores = self.router(flat).softmax(-1)
        best = scores.topk(TOP).indices if self.drop.p else torch.cat([first, first + 1], 1) % EXPERTS
        return x + self.drop(self.experts(flat, best, scores.gather(1, best)).view_as(x))


class Mixtures(nn.Module):
    def __init__(self, layers, drops):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(Layer(drops) for _ in range(layers))

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, ids)
        logits = self.head(x)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), labels.flatten())


def made(case, number):
    """The batch has each expert's words once in each four positions."""
    options = EVERY[case][2]
    torch.manual_seed(0)
    layers = 2 if case in ("drops", "context") or options is CHEN else 1
    model = Mixtures(layers, 0.3 if case == "drops" else 0.0).to(torch.float32 if "precision" in options else torch.float64)
    drawn = torch.Generator().manual_seed(number)
    kinds = torch.stack([torch.randperm(EXPERTS, generator=drawn) for _ in range(ROWS * LENGTH // EXPERTS)])
    ids = kinds + EXPERTS * torch.randint(0, WORDS // EXPERTS, kinds.shape, generator=drawn)
    ids = ids.view(1, -1)[:, :15] if case == "odd" else ids.view(ROWS, LENGTH)
    given = {"ids": ids, "labels": ids.roll(-1, 1)}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), given


def number_of(mesh, rank):
    """Of the batch that a rank has: ranks that differ in `tp` or `cp` have the same."""
    number, places = 0, torch.arange(dist.get_world_size()).view(*mesh.values())
    for name, place in zip(mesh, (places == rank).nonzero()[0].tolist(), strict=True):
        number = number if name in ("tp", "cp") else 2 * number + place
    return number


def fitted(case, folder):
    mesh, way, options = CASES[case]
    model, optimizer, given = made(case, number_of(mesh, dist.get_rank()))
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": mesh, "shard": way} | options
    with holdall.fit(model, optimizer, given, **asked) as harness:
        for step in range(STEPS):
            for _ in range(options.get("accumulate", 1)):
                model(**given).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor().item()
            if step == 0:
                norms, grads = norm, [p.grad.full_tensor().tolist() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        traffic = {link: size for link, size in harness.measured().traffic.items() if size}
        if case == "tensors":
            holdall.save_checkpoint(folder, model, optimizer, step=STEPS)
    return {
        "gradients": grads,
        "norm": norms,
        "weights": [p.full_tensor().tolist() for p in model.parameters()],
        "own": {name: p.to_local().tolist() for name, p in model.named_parameters()},
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": traffic,
        "actions": harness.plan.count(),
    }


def refused():
    said = {}
    for name, mesh in {"turned": {"tp": 2, "ep": 2}, "neighbours": {"ep": 2, "tp": 2}}.items():
        model, optimizer, given = made("tensors", dist.get_rank())
        with pytest.raises(holdall.HoldallError) as error:
            holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), mesh=mesh)
        said[name] = str(error.value)
    model, optimizer, given = made("context", dist.get_rank() // 2)
    model.layers[0].experts.register_forward_hook(lambda module, _, out: module.__dict__.update(last=out))
    with pytest.raises(holdall.HoldallError) as error:
        holdall.fit(
            model,
            optimizer,
            given,
            loss=lambda m, b: m(**b) + 1e-9 * m.layers[0].experts.last.square().mean(),
            budget="1GiB",
            hardware=machine(),
            mesh={"ep": 2, "cp": 2},
        )
    return said | {"loss": str(error.value)}


def fitted_all(cases, folder):
    found = {case: fitted(case, folder) for case in cases}
    return found | ({"refused": refused()} if cases == FOUR else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "latest"


@pytest.fixture(scope="module")
def four(folder):
    return on_ranks(4, fitted_all, FOUR, folder)


@pytest.fixture(scope="module")
def eight(folder):
    return on_ranks(8, fitted_all, EIGHT, folder)


@pytest.fixture
def ran(request, case):
    return [rank[case] for rank in request.getfixturevalue("four" if case in FOUR else "eight")]


def alone(case):
    """Clipped gradients of the first step, their norm, and the weights after all, of one process that has all batches."""
    mesh, _, options = CASES[case]
    model, optimizer, given = made(case, 0)
    batches = [made(case, number)[2] for number in range(4 if "dp" in mesh else 2)]
    with holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), precision=options.get("precision")):
        for step in range(STEPS):
            for given in batches * options.get("accumulate", 1):
                (model(**given) / len(batches)).backward()
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            if step == 0:
                norms, grads = norm, [p.grad.double().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return grads, norms, [p.detach().double() for p in model.parameters()]


def flat(tensors):
    return torch.cat([torch.as_tensor(t, dtype=torch.float64).flatten() for t in tensors])


@pytest.mark.parametrize("case", SAME)
def test_gradients_and_weights_are_those_of_one_process(ran, case):
    """In float64 by rounding, which AdamW magnifies where gradients are near zero; in bf16 by 1 % of the norm."""
    grads, norm, weights = alone(case)
    for rank in ran:
        error = flat(rank["gradients"]) - flat(grads)
        if case == "narrow":
            assert error.norm() < 0.01 * flat(grads).norm()
            assert rank["norm"] == pytest.approx(norm, rel=1e-2)
            continue
        assert error.abs().max() <= 1e-14 * flat(grads).abs().max()
        assert rank["norm"] == pytest.approx(norm, rel=1e-13)
        assert (flat(rank["weights"]) - flat(weights)).abs().max() <= 1e-9


@pytest.mark.parametrize("case", SAME)
def test_peaks_and_bytes_are_the_predicted_ones(ran, case):
    """Peaks but for a scalar. Experts have equal loads, but for tokens that are no multiple of the ranks."""
    mesh, _, options = CASES[case]
    for rank in ran:
        predicted = rank["predicted"]
        if case == "odd":
            assert max(rank["peaks"]) == pytest.approx(predicted.peak["cpu"], rel=0.15)
            continue
        assert predicted.peak["cpu"] - 8 <= min(rank["peaks"]) <= predicted.peak["cpu"] + LARGEST
        calls = {"tensors": 4, "data, tensors": 4, "context": 2}.get(case, 1)  # of experts: layers, and again in replays
        counts = calls * EXPERTS * 8 // 2  # tokens that each expert will get
        assert rank["traffic"].pop("ep all_to_all") == predicted.traffic["ep all_to_all"] + counts
        planned = {link: size for link, size in predicted.traffic.items() if size and link != "ep all_to_all"}
        assert rank["traffic"] == planned
        assert {link.split()[0] for link in planned if "->" not in link} == set(mesh)
        assert ("recompute" in rank["actions"]) == (options is CHEN)
        assert ("offload" in rank["actions"]) == (case == "context")


def test_ranks_with_the_same_tokens_take_a_part_of_them_each(four):
    """A rank sends those of a half of its batch, and dropout on them does not tell ranks apart afterwards."""
    for rank in four:
        state = ROWS * LENGTH * TOP * WIDTH * 8 // 2
        assert rank["tensors"]["predicted"].traffic["ep all_to_all"] == 2 * 6 * state // 2  # of two layers, forward thrice
    for name in ("norm.weight", "router.weight"):
        whole = f"layers.1.{name}"
        assert all(rank["drops"]["own"][whole] == four[0]["drops"]["own"][whole] for rank in four)
    for number, rank in enumerate(four):  # 0 and 2 have one part of the experts, 1 and 3 the other
        experts = [rank["drops"]["own"]["layers.1.experts.up"], four[number % 2]["drops"]["own"]["layers.1.experts.up"]]
        assert experts[0] == experts[1]


def test_a_checkpoint_loads_in_one_process(four, folder):
    model, optimizer, _ = made("tensors", 0)
    holdall.load_checkpoint(folder, model, optimizer)
    weights = four[0]["tensors"]["weights"]
    assert all(torch.equal(p, torch.tensor(w, dtype=p.dtype)) for p, w in zip(model.parameters(), weights, strict=True))
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())


def test_what_cannot_be_is_refused_in_a_line(four):
    """Among it a loss with a small term that ranks compute from their parts of the sequence."""
    for rank in four:
        assert "whose gradients are not sums over the ranks of `cp`" in rank["refused"]["loss"]
        assert "the batch of rank 2, 3 differs from that of rank 0" in rank["refused"]["turned"]
        assert 'use mesh={"ep": 2, "tp": 2}, with the same batches where `rank // 2` is the same' in rank["refused"]["turned"]
        assert "the batch of rank 1, 3 differs from that of rank 0" in rank["refused"]["neighbours"]
        assert "where `rank // 2` is the same, as by a sampler" in rank["refused"]["neighbours"]


def test_one_process_plans_for_many_ranks():
    model, optimizer, given = made("data, context", 0)
    mesh = {"dp": 4, "tp": 2, "cp": 2, "ep": 4}
    shards = holdall.trace(model, given, optimizer=optimizer, mesh=mesh, shard="zero3+ring").about.shards
    assert shards.way == "zero3+tensor+ring+experts"
    assert {found.dim for found in shards.collectives} == set(mesh)
