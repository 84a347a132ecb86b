"""Shamshoum et al., CompAct (NAACL 2025, arXiv 2410.15352): forward exact, gradients sketched, bytes saved."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdall
from holdall.errors import InvalidInput, Unsupported
from holdall.optim.compact import Compact
from holdall.testing.optimizers import seed_after, sketch
from holdall.testing.worlds import machine

SHAPE = (3, 7, 24)  # batch, length, inputs


def make(**options):
    torch.manual_seed(0)
    layer = nn.Linear(24, 16)
    optimizer = Compact([{"params": [layer.weight], "rank": 6, **options}, {"params": [layer.bias]}], lr=1e-2)
    return layer, optimizer, torch.randn(SHAPE, requires_grad=True), torch.randn(3, 7, 16)


def saved_bytes(run, exclude=()):
    """Bytes that autograd keeps, by storage, without the parameters."""
    known, kept = {p.untyped_storage()._cdata for p in exclude}, {}

    def pack(t):
        if t.untyped_storage()._cdata not in known:
            kept[t.untyped_storage()._cdata] = (t.untyped_storage().nbytes(), t.untyped_storage())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    return sum(n for n, _ in kept.values()), out


def projector(optimizer, weight):
    return optimizer.projector(weight, weight)  # (rank, inputs)


@pytest.mark.parametrize("shape", [SHAPE, (5, 24)])
def test_the_output_and_the_gradient_of_the_input_are_those_of_linear_bit_for_bit(shape):
    layer, optimizer, _, _ = make()
    x = torch.randn(shape, requires_grad=True)
    plain = layer(x)
    grad = torch.randn_like(plain)
    plain.backward(grad)
    expected, bias = x.grad.clone(), layer.bias.grad.clone()
    x.grad = layer.bias.grad = layer.weight.grad = None
    with optimizer.sketching(layer):
        out = layer(x)
        out.backward(grad)
    assert torch.equal(out, plain)
    assert torch.equal(x.grad, expected)
    assert torch.equal(layer.bias.grad, bias)
    assert layer.weight.grad is None


def test_under_autocast_it_computes_as_linear_does():
    layer, optimizer, x, _ = make()
    found = []
    for context in (torch.enable_grad(), optimizer.sketching(layer)):
        x.grad = None
        with context, torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
            out.float().sum().backward()
        found.append((out, x.grad))
    assert found[0][0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert optimizer._sketched[id(layer.weight)].dtype == torch.float32


def test_the_sketched_gradient_is_the_gradient_times_the_projector():
    layer, optimizer, x, grad = make()
    layer(x).backward(grad)
    whole = layer.weight.grad.clone()
    layer.weight.grad = None
    with optimizer.sketching(layer):
        layer(x).backward(grad)
    low = optimizer._sketched[id(layer.weight)]
    assert low.shape == (16, 6)
    torch.testing.assert_close(low, whole @ projector(optimizer, layer.weight).t(), rtol=1e-5, atol=1e-5)


def test_over_seeds_the_gradient_is_unbiased():
    """E[G P P^T] = G: 3,000 seeds, each entry within 3.9 standard errors (384 entries; none beyond that by chance)."""
    layer, optimizer, x, grad = make()
    layer(x).backward(grad)
    whole = layer.weight.grad.clone()
    found = []
    for seed in range(1, 3001):
        optimizer.state[layer.weight]["seed"] = seed
        p = projector(optimizer, layer.weight)
        found.append(whole @ p.t() @ p)
    found = torch.stack(found)
    error = (found.mean(0) - whole).abs() / (found.std(0) / 3000**0.5)
    assert error.max() < 3.9
    assert (error < 3).float().mean() > 0.99


@pytest.mark.parametrize("projection", ["orthogonal"])
def test_at_full_rank_an_orthogonal_projector_gives_the_exact_gradient(projection):
    layer, optimizer, x, grad = make(rank=24, projection=projection)
    layer(x).backward(grad)
    whole = layer.weight.grad.clone()
    layer.weight.grad = None
    with optimizer.sketching(layer):
        layer(x).backward(grad)
    back = optimizer._sketched[id(layer.weight)] @ projector(optimizer, layer.weight)
    torch.testing.assert_close(back, whole, rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_rank_wide_and_not_input_wide():
    layer, optimizer, x, _ = make()
    plain, _ = saved_bytes(lambda: layer(x), layer.parameters())
    with optimizer.sketching(layer):
        sketched, _ = saved_bytes(lambda: layer(x), layer.parameters())
    assert plain == 3 * 7 * 24 * 4
    assert sketched == 3 * 7 * 6 * 4
    assert optimizer.state_bytes(layer.weight) == 2 * 16 * 6 * 4


class Attention(nn.Module):
    """Query, key and value from one tensor, then another layer from another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, x):
        return self.o(torch.sigmoid(self.q(x)) * self.k(x) + self.v(x))


def test_layers_with_the_same_input_share_one_sketch():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(SHAPE, requires_grad=True)
    optimizer = Compact(model.parameters(), rank=6, lr=1e-2)
    with optimizer.sketching(model):
        kept, out = saved_bytes(lambda: model(x), model.parameters())
        out.sum().backward()
        seeds = [optimizer.state[layer.weight]["seed"] for layer in (model.q, model.k, model.v, model.o)]
        assert seeds[0] == seeds[1] == seeds[2] != seeds[3]
        sketch, inner = 3 * 7 * 6 * 4, 3 * 7 * 24 * 4
        assert kept == 2 * sketch + 2 * inner  # one for q, k, v, one for o; the product's two factors
        before = copy.deepcopy(optimizer.state_dict())
        optimizer.step()
    again = Compact(model.parameters(), rank=6, lr=1e-2)
    again.load_state_dict(before)
    assert [again.state[layer.weight]["seed"] for layer in (model.q, model.k, model.v, model.o)] == seeds


def test_sketched_layers_train_as_projected_gradients_do_and_survive_recomputation():
    """Three ways to the same update: projecting the whole gradient, sketching the input, sketching it in a checkpoint."""
    results = {}
    for way in ("projected", "sketched", "checkpointed"):
        torch.manual_seed(0)
        model = Attention()
        x, optimizer = torch.randn(4, *SHAPE), Compact(model.parameters(), rank=6, lr=1e-2, update_proj_gap=2)
        for layer in (model.k, model.v):  # as sharing will have it
            optimizer.state[layer.weight]["seed"] = optimizer.state[model.q.weight]["seed"]
        context = optimizer.sketching(model) if way != "projected" else torch.enable_grad()
        with context:
            for batch in x:
                batch = batch.requires_grad_()
                out = checkpoint(model, batch, use_reentrant=False) if way == "checkpointed" else model(batch)
                out.pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results[way] = [p.detach() for p in model.parameters()]
    for a, b in zip(results["projected"], results["sketched"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(results["sketched"], results["checkpointed"], strict=True))


def test_micro_batches_add_up():
    layer, optimizer, x, grad = make()
    with optimizer.sketching(layer):
        layer(x).backward(grad)
        whole = optimizer._sketched[id(layer.weight)].clone()
        optimizer.zero_grad()
        for part in range(3):
            layer(x[part]).backward(grad[part])
        torch.testing.assert_close(optimizer._sketched[id(layer.weight)], whole, rtol=1e-5, atol=1e-5)


def test_the_seed_changes_after_so_many_steps_and_only_then():
    layer, optimizer, x, grad = make(update_proj_gap=3)
    seeds = []
    with optimizer.sketching(layer):
        for _ in range(7):
            before = optimizer.state[layer.weight]["seed"]
            layer(x).backward(grad)
            assert optimizer.state[layer.weight]["seed"] == before
            optimizer.step()
            optimizer.zero_grad()
            seeds.append(before)
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3] == seeds[4] == seeds[5] != seeds[6]


def naive(x, grads, *, rank, gap, lr, scale, weight_decay, seed=1, eps=1e-8):
    """Adam on G P with moments that a new P finds as they are, in the place of sketched layers; from the formulae."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        p = sketch(seed, rank, x.shape[1], g)  # (rank, inputs)
        low = g @ p.T
        m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
        step = lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        x = x - lr * weight_decay * x - step * scale * (m / (v.sqrt() + eps)) @ p
        if t % gap == 0:
            seed = seed_after(seed)
    return x


@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "weight_decay": 0.1}], ids=str)
def test_it_follows_the_algorithm_through_changes_of_the_seed(options):
    """Claim: on a new seed the moments stay as they are. 20 steps with six changes, in double precision, to 1e-10."""
    random = torch.Generator().manual_seed(3)
    start = torch.randn(8, 12, generator=random, dtype=torch.float64)
    grads = torch.randn(20, 8, 12, generator=random, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    optimizer = Compact([p], lr=0.01, rank=4, update_proj_gap=3, **options)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    told = {"scale": 1.0, "weight_decay": 0.0, **options}
    torch.testing.assert_close(p.detach(), naive(start, grads, rank=4, gap=3, lr=0.01, **told), rtol=0, atol=1e-10)


def learned(inputs_per_rank):
    """The mean loss of the last 40 of 250 steps on a teacher's noisy answers, fresh ones at every step; None: AdamW."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8)).requires_grad_(False)
    for p in teacher.parameters():
        p.mul_(2)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
    biases = [model[0].bias, model[2].bias]
    if inputs_per_rank is None:
        optimizer, context = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0), nullcontext()
    else:
        ranked = [{"params": [model[k].weight], "rank": model[k].in_features // inputs_per_rank} for k in (0, 2)]
        optimizer = Compact([*ranked, {"params": biases}], lr=1e-2, update_proj_gap=10)
        context = optimizer.sketching(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=250)
    losses = []
    with context:
        for _ in range(250):
            x = torch.randn(64, 24)
            loss = (model(x) - teacher(x) - 0.5 * torch.randn(64, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return losses[0], sum(losses[-40:]) / 40


def test_on_fresh_data_it_learns_with_a_small_loss_of_quality():
    """Claim: a little above AdamW at half of the width, more at a quarter (LLaMA's perplexity there; a toy's loss here).

    Reached: 1.0 to 0.310 by AdamW, where the noise alone is 0.25; 0.318 at a half and 0.321 at a quarter. A fixed set of data
    it does not fit as far: 0.15 where AdamW comes to 1e-6.
    """
    begun, adamw = learned(None)
    assert adamw < 0.35 * begun
    assert learned(2)[1] < 1.05 * adamw
    assert learned(4)[1] < 1.08 * adamw


def test_clipping_counts_sketched_gradients_too():
    layer, optimizer, x, grad = make()
    with optimizer.sketching(layer):
        layer(x).backward(grad)
        low = optimizer._sketched[id(layer.weight)]
        before = torch.cat([low.flatten(), layer.bias.grad])
        norm = optimizer.clip_grad_norm_(1.0)
        after = torch.cat([low.flatten(), layer.bias.grad])
    assert norm.item() == pytest.approx(before.norm().item(), rel=1e-5) and norm > 1
    torch.testing.assert_close(after, before / (norm + 1e-6), rtol=1e-5, atol=0)  # as torch does
    assert optimizer.clip_grad_norm_(2.0).item() == pytest.approx(1.0, rel=1e-5)
    assert torch.equal(after, torch.cat([low.flatten(), layer.bias.grad]))  # what is short enough stays


@pytest.mark.parametrize("recompute", [False, True])
def test_sketches_and_plans_go_together(recompute):
    """Under a plan the bits are the same, and everything is restored."""
    results = []
    for way in ("plain", "planned"):
        torch.manual_seed(0)
        model = Stack()
        x = torch.randn(16, 24)
        optimizer = Compact(Compact.groups(model, rank=6), lr=1e-2)
        planner = {"planner": "chen", "variant": "all"} if recompute else {"planner": "nop"}
        plan = holdall.plan(holdall.trace(model, x, optimizer=optimizer), hardware=machine(), **planner)
        with (
            optimizer.sketching(model),
            holdall.apply(plan, model, optimizer) if way == "planned" else nullcontext(),
        ):
            for _ in range(3):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
        assert not any("forward" in vars(m) for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for one in self.layers:
            x = one(x)
        return x.pow(2).mean()


def test_leaving_restores_every_layer_and_wrong_use_is_told():
    model = Attention()
    optimizer = Compact(model.parameters(), rank=6)
    with pytest.raises(KeyError), optimizer.sketching(model):
        assert "forward" in vars(model.q)
        with pytest.raises(Unsupported, match="was already replaced"), optimizer.sketching(model):
            pass
        raise KeyError
    assert not any("forward" in vars(m) for m in model.modules())
    with pytest.raises(Unsupported, match="no linear layer"), Compact(model.parameters()).sketching(model):
        pass
    with pytest.raises(InvalidInput, match="rank 100"):
        Compact(model.parameters(), rank=100)
    with pytest.raises(InvalidInput, match="no gradient"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(InvalidInput, match="projection"):
        Compact(model.parameters(), rank=2, projection="sparse")
