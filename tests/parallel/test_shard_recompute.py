"""Recomputing and offloading inside ranks that `fit` has sharded: bits, peaks and bytes on two real ranks."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.testing.ranks import by_default, on_ranks
from holdall.testing.worlds import machine

PLANS = {
    "segments": {"planner": "chen", "variant": "sqrt", "last": True},
    "auto": {"allow": ["recompute"]},
    "offload": {"allow": ["offload"]},
}
CASES = [
    *(("mlp", way, "segments") for way in ("ddp", "zero3")),
    *(("llama", "fsdp", plan) for plan in PLANS),
]
CASES = [*by_default(dict.fromkeys(CASES), ("mlp", "ddp", "segments"))]
STEPS = 3


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(torch.nn.Module):
    def __init__(self, width=16, depth=6):
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build(name):
    torch.manual_seed(0)
    if name == "mlp":
        return Stack()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def batch(rank, name):
    generator = torch.Generator().manual_seed(rank)
    if name == "mlp":
        return {"x": torch.randn(200, 16, generator=generator)}
    ids = torch.randint(0, 64, (4, 32), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model, batch):
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@cache
def whole(name, way):
    """What a rank's step is predicted to take without other actions."""
    model = build(name)
    trace = holdall.trace(model, batch(0, name), optimizer=momentum(model), mesh={"dp": 2}, shard=way)
    return holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine()).predicted


def budget_of(name, way, plan):
    return "1GiB" if "planner" in PLANS[plan] else int(0.9 * whole(name, way).peak["cpu"])


def gradients_by_hand(name):
    """The mean of the gradients that single processes have of the ranks' batches."""
    found = []
    for rank in range(2):
        model = build(name)
        torch.manual_seed(7 + rank)  # dropout
        loss_of(model, batch(rank, name)).backward()
        found.append([p.grad for p in model.parameters()])
    return [sum(grads) / 2 for grads in zip(*found, strict=True)]


def fitted(name, way, plan, budget):
    rank = dist.get_rank()
    model, mine = build(name), batch(rank, name)
    optimizer = momentum(model)
    given = {"budget": budget, "hardware": machine(), "mesh": {"dp": 2}, "shard": way, **PLANS[plan]}
    with holdall.fit(model, optimizer, mine, **given) as harness:
        for step in range(STEPS):
            torch.manual_seed(7 + rank)
            loss = loss_of(model, mine)  # a loop's variable, which the prediction counts
            loss.backward()
            if step == 0:
                grads = [p.grad.full_tensor().tolist() for p in model.parameters()]  # no tensors, which would count
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
    return {
        "gradients": grads,
        "peaks": harness.step_peaks[1:],  # the first makes the optimizer's states
        "predicted": harness.plan.predicted,
        "traffic": {link: size for link, size in traffic.items() if size},
        "actions": harness.plan.count(),
    }


def fitted_all(budgets):
    return {case: fitted(*case, budget) for case, budget in budgets.items()}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all, {case: budget_of(*case) for case in CASES}, timeout=300)


each_case = pytest.mark.parametrize("case", CASES, ids="-".join)


@each_case
def test_gradients_are_those_of_single_processes(ran, case):
    expected = gradients_by_hand(case[0])
    for rank in ran:
        assert all(torch.equal(torch.tensor(a), b) for a, b in zip(rank[case]["gradients"], expected, strict=True))


@each_case
def test_the_peak_is_the_predicted_one(ran, case):
    """To the byte; but a thread of gloo may hold a buffer for a moment after its collective is over."""
    for rank in ran:
        predicted = rank[case]["predicted"].peak["cpu"]
        assert predicted <= min(rank[case]["peaks"]) <= 1.02 * predicted


@each_case
def test_the_plan_does_what_it_is_asked_to(ran, case):
    name, way, plan = case
    for rank in ran:
        found = rank[case]["actions"]
        assert found.pop("shard") == 1
        assert set(found) in ([{"offload"}] if plan == "offload" else [{"recompute"}, {"reschedule"}])
        assert rank[case]["predicted"].peak["cpu"] < whole(name, way).peak["cpu"]


@each_case
def test_collectives_send_what_they_send_without(ran, case):
    """A replay gathers nothing twice: recomputing costs no traffic between ranks."""
    name, way, _ = case
    for rank in ran:
        assert between_ranks(rank[case]["traffic"]) == between_ranks(whole(name, way).traffic) != {}


def between_ranks(traffic):
    return {link: size for link, size in traffic.items() if link.startswith("dp ")}


def chosen(budgets):
    """On a rank: the way to shard that is chosen for each budget, and what it is predicted to take."""
    found = []
    for budget in budgets:
        model = build("mlp")
        given = {"budget": budget, "hardware": machine(), "mesh": "auto", "shard": "auto"}
        with holdall.fit(model, momentum(model), batch(dist.get_rank(), "mlp"), **given) as harness:
            (shard,) = [a for a in harness.plan.actions if a.name == "shard"]
            found.append((shard.way, dict(shard.mesh), harness.plan.predicted.peak["cpu"]))
    return found


def test_mesh_and_way_are_chosen_by_the_budget():
    """What is fastest on these ranks, and what fits where that does not."""
    tight = whole("mlp", "zero3").peak["cpu"]
    first, second = on_ranks(2, chosen, ["1GiB", tight])
    assert first == second
    (fast, mesh, _), (lean, _, peak) = first
    assert mesh == {"dp": 2}
    assert whole("mlp", fast).seconds <= min(whole("mlp", way).seconds for way in ("zero2", "zero3"))
    assert lean != fast
    assert peak <= tight < whole("mlp", fast).peak["cpu"]
