"""Recomputation and offload inside ranks that divide tensors: the bits of the same ranks without a plan, dropout included.

`test_meshes.py` has those that divide sequences and experts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

WIDTH, LENGTH, ROWS, WORDS = 16, 16, 4, 32
LARGEST = ROWS * LENGTH * 4 * WIDTH * 8 + 1024  # bytes: the largest buffer that a collective has


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.inside, self.down, self.outside = (
            nn.Linear(WIDTH, 64),
            nn.Dropout(0.3),
            nn.Linear(64, WIDTH),
            nn.Dropout(0.3),
        )

    def forward(self, x):
        return self.outside(self.down(self.inside(torch.relu(self.up(x)))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.attention, self.perceptron = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            Attention(),
            Perceptron(),
        )

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.perceptron(self.two(x))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids, targets):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


CASES = {  # way, arguments of `fit`
    "segments": ("tensor", {"planner": "chen"}),
    "offload": ("tensor", {"allow": {"offload"}}),
    "sequence": ("sequence", {"planner": "chen", "variant": "all", "last": True}),
}
CASES = by_default(CASES, "segments")


def fitted(way, options):
    """The plan of a rank, gradients of two steps (random numbers included), and what was measured."""
    torch.manual_seed(0)
    model = Words().double()
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    given = {"ids": ids, "targets": ids.roll(-1, 1)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    asked = {"budget": "1GiB", "hardware": machine(), "mesh": {"tp": 2}, "shard": way} | options
    grads = []
    with holdall.fit(model, optimizer, given, **asked) as harness:
        torch.manual_seed(1)
        for _ in range(3):
            loss = model(**given)
            loss.backward()
            grads.append([p.grad.to_local().tolist() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
    return {
        "gradients": grads,
        "peaks": harness.step_peaks[1:],
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in traffic.items() if size},
        "actions": harness.plan.count(),
    }


def fitted_all():
    found = {way: fitted(way, {"planner": "nop"}) for way in ("tensor", "sequence")}
    plain = {case: found[way] for case, (way, _) in CASES.items()}
    for case, (way, options) in CASES.items():
        tight = {"budget": int(0.9 * plain[case]["predicted"].peak["cpu"])} if case == "offload" else {}
        found[case] = fitted(way, options | tight)
    return {case: (found[case], plain[case]) for case in CASES}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all)


each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_gradients_are_the_bits_of_the_same_ranks_without_a_plan(ran, case):
    """Dropout included, which draws other numbers on every rank inside of regions, and the same ones outside."""
    for rank in ran:
        planned, plain = rank[case]
        assert planned["gradients"] == plain["gradients"]
        assert planned["actions"].keys() - plain["actions"].keys() == {"offload" if case == "offload" else "recompute"}


@each_case
def test_the_peak_of_a_rank_is_the_predicted_one(ran, case):
    """To the byte; but a thread of gloo may hold a buffer for a moment after its collective is over."""
    for rank in ran:
        planned, plain = rank[case]
        predicted = planned["predicted"].peak["cpu"]
        assert predicted < plain["predicted"].peak["cpu"]
        assert predicted <= min(planned["peaks"]) <= predicted + LARGEST


@each_case
def test_collectives_of_replays_are_counted(ran, case):
    for rank in ran:
        planned, plain = (found["predicted"].traffic for found in rank[case])
        assert rank[case][0]["traffic"] == {link: size for link, size in planned.items() if size}
        kind = "tp all_gather" if case == "sequence" else "tp all_reduce"
        assert (planned[kind] > plain[kind]) == (case != "offload")
