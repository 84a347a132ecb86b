"""Expert parallelism through `fit`: gradients of two ranks are means of those of single processes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

WORDS, LENGTH, ROWS, WIDTH, INSIDE, EXPERTS, TOP = 64, 8, 2, 16, 24, 4, 2
CASES = ("mixtral", "grouped", "own")


class Stack(nn.Module):
    """Experts with two matrices each, which are computed together."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INSIDE) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH) / 4)

    def forward(self, tokens, experts, weights):
        chosen = [torch.relu(tokens.unsqueeze(1) @ self.up[e]) @ self.down[e] for e in experts.T]
        return sum(y.squeeze(1) * w.unsqueeze(1) for y, w in zip(chosen, weights.T, strict=True))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS), Stack()

    def forward(self, x):
        flat = self.first(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(TOP)
        return (flat + self.experts(flat, chosen, weights)).square().mean()


def build(name):
    torch.manual_seed(0)
    if name == "own":
        return Own().double()
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INSIDE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP,
    )
    config._experts_implementation = "grouped_mm" if name == "grouped" else "batched_mm"  # the first has no float64
    return MixtralForCausalLM(config).to(torch.float32 if name == "grouped" else torch.float64)


def batch(name, rank):
    generator = torch.Generator().manual_seed(rank)
    if name == "own":
        return {"x": torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)}
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model, given):
    out = model(**given)
    return out if isinstance(out, torch.Tensor) else out.loss


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fitted(name):
    model, given = build(name), batch(name, dist.get_rank())
    optimizer = momentum(model)
    with holdall.fit(model, optimizer, given, budget="1GiB", hardware=machine(), mesh={"ep": 2}) as harness:
        for step in range(2):
            loss = loss_of(model, given)
            loss.backward()
            if step == 0:
                grads, value = [p.grad.full_tensor().tolist() for p in model.parameters()], loss.item()
            optimizer.step()
            optimizer.zero_grad()
        traffic = harness.measured().traffic
    return {
        "loss": value,
        "gradients": grads,
        "predicted": harness.plan.predicted,
        "peaks": harness.step_peaks[1:],
        "traffic": traffic,
        "local": {n: p.to_local().numel() for n, p in model.named_parameters()},
        "actions": harness.plan.count(),
    }


def fitted_all():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(holdall.HoldallError) as error:
        holdall.fit(
            dense,
            momentum(dense),
            torch.randn(4, 8),
            loss=lambda m, b: m(b).mean(),
            budget="1GiB",
            hardware=machine(),
            mesh={"ep": 2},
        )
    return {name: fitted(name) for name in CASES} | {"refused": str(error.value)}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, fitted_all, timeout=300)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_mean_of_single_processes(ran, name):
    losses, gradients = [], []
    for rank in range(2):
        model = build(name)
        loss = loss_of(model, batch(name, rank))
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
    near = 1e-7 if name == "grouped" else 1e-8 if name == "mixtral" else 1e-14  # routers of Hugging Face compute in float32
    for rank, loss in zip(ran, losses, strict=True):
        assert rank[name]["loss"] == pytest.approx(loss, rel=1e-6)
        for a, b, c in zip(rank[name]["gradients"], *gradients, strict=True):
            assert torch.allclose(torch.tensor(a, dtype=b.dtype), (b + c) / 2, rtol=0, atol=near)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_has_its_share_of_the_experts(ran, name):
    whole = {n: p.numel() for n, p in build(name).named_parameters()}
    for rank in ran:
        assert {n: whole[n] // size for n, size in rank[name]["local"].items()} == {
            n: 2 if "experts" in n else 1 for n in whole
        }
        assert rank[name]["actions"] == {"experts": 1}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_paper(ran, name):
    """Two all-to-alls forward and two backward of every token's state, `TOP` times, and the numbers of tokens; over both ranks
    what is sent is what is predicted for equal loads, since what one rank sends more another sends less."""
    state = ROWS * LENGTH * TOP * WIDTH * (4 if name == "grouped" else 8)
    for rank in ran:
        assert rank[name]["predicted"].traffic["ep all_to_all"] == 4 * state // 2
    sent = sum(rank[name]["traffic"]["ep all_to_all"] for rank in ran)
    assert sent == 2 * (4 * state // 2 + EXPERTS * 8 // 2)
    reduced = [sum(link[1] for link in rank[name]["traffic"].items() if link[0] == "ep all_reduce") for rank in ran]
    assert reduced == [rank[name]["predicted"].traffic["ep all_reduce"] for rank in ran]


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_near_the_prediction_for_equal_loads(ran, name):
    """One rank has more tokens and the other fewer; `own` gathers a matrix for every token."""
    for rank in ran:
        assert max(rank[name]["peaks"]) == pytest.approx(rank[name]["predicted"].peak["cpu"], rel=0.15)


def test_a_model_without_experts_is_refused_in_a_line(ran):
    for rank in ran:
        assert "Sequential has no experts that can be divided over 2 ranks" in rank["refused"]
