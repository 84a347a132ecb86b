"""Formats and recipes of few bits against what their papers say: grids, means, errors, and what switching them off gives."""

import copy
import math

import pytest
import torch
from torch import nn

import holdall
from holdall import precision
from holdall.narrow.formats import BlockFloats, Float8, Integer, Radix4, rounded
from holdall.narrow.hadamard import block_of, turn
from holdall.narrow.range_norm import spread
from holdall.precision.dorefa import Grids, on_grid, rounded_gradient
from holdall.precision.int4 import chances, sampled, split
from holdall.precision.layerwise import LayerChoice, choose, choose_layers
from holdall.testing.worlds import family, machine
from holdall.types import Kind


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(*shape):
    values = normal(*shape)
    values[:, 3] *= 30
    return values


# formats


@pytest.mark.parametrize("form", [Float8(), Float8(rows=True, powers=True)], ids=["tensor", "row"])
def test_fp8_is_within_a_sixteenth_of_normal_numbers(form):
    values = normal(64, 64).clamp(0.05, 4)
    assert ((rounded(form, values) - values) / values).abs().max() <= 2**-4


def test_scales_of_rows_that_are_powers_of_two_round_nothing_themselves():
    scale = Float8(rows=True, powers=True).scale_of(normal(8, 32))
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale) and scale.shape == (8, 1)


def test_a_tensor_of_zeros_stays_one():
    for form in (
        Float8(),
        Integer(),
        Integer(bits=4),
        BlockFloats(),
        BlockFloats(element="e2m1", block=16, unit="e4m3"),
        Radix4(),
    ):
        assert torch.equal(rounded(form, torch.zeros(4, 32)), torch.zeros(4, 32))


@pytest.mark.parametrize("odd", [(3, 5), (1, 1), (7, 31)])
@pytest.mark.parametrize("dim", [0, 1])
def test_shapes_that_blocks_and_bytes_do_not_divide(odd, dim):
    for form in (Integer(bits=4), BlockFloats(), BlockFloats(element="e2m1", block=16, unit="e4m3"), Radix4()):
        values = normal(*odd)
        assert rounded(form, values, dim).shape == values.shape


def test_numbers_of_e2m1_are_those_of_the_format_and_ties_go_to_even():
    form = BlockFloats(element="e2m1", block=8, unit="e8m0")
    known = torch.tensor([[0.0, 0.5, -1.0, 1.5, -2.0, 3.0, 4.0, -6.0]])
    assert torch.equal(rounded(form, known), known)
    between = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0]])
    assert torch.equal(rounded(form, between), torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0]]))


def test_mx_scales_are_powers_of_two_for_blocks_of_the_summed_dimension():
    values = normal(4, 64) * torch.tensor([1.0] * 32 + [1000.0] * 32)
    _, units, _ = BlockFloats().narrow(values, 1)
    assert units.dtype == torch.uint8 and units.shape == (4, 2, 1)
    assert (units[:, 1] > units[:, 0]).all()
    assert BlockFloats().narrow(values, 0)[1].shape == (64, 1, 1)


BY_CHANCE = [Integer(stochastic=True), Integer(bits=4, stochastic=True), BlockFloats(element="e2m1", block=32, stochastic=True)]


@pytest.mark.parametrize("form", BY_CHANCE, ids=["int8", "int4", "mxfp4"])
def test_rounding_by_chance_is_right_on_average(form):
    torch.manual_seed(0)
    values = normal(1, 32)
    draws = torch.stack([rounded(form, values) for _ in range(3000)])
    apart = (draws.mean(0) - values).abs() / (draws.std(0) / math.sqrt(3000)).clamp(min=1e-4)
    inside = values.abs() < 0.7 * values.abs().max()  # a power of two as a scale cuts what is above the largest number
    assert apart[inside].max() < 4.5


@pytest.mark.parametrize(("name", "error"), [("fp8", 0.05), ("mxfp8", 0.08), ("nvfp4", 0.2), ("int8", 0.025)])
def test_an_emulated_product_is_near_the_exact_one(name, error):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32, bias=False), normal(48, 64)
    undo = precision.find(name).put_on(nn.Sequential(layer))
    made = layer(x)
    undo()
    exact = x.double() @ layer.weight.detach().double().t()
    assert 1e-4 < (made.double() - exact).norm() / exact.norm() < error


# DoReFa


def test_dorefa_with_32_bits_is_plain_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    undo = precision.find("dorefa:weight_bits=32:gradients=32").put_on(model)
    assert all(type(layer) is nn.Linear for layer in model)
    undo()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_dorefa_numbers_lie_on_the_grid_and_the_gradient_passes_straight(bits):
    values = torch.rand(50, requires_grad=True)
    out = on_grid(values, bits)
    levels = out.detach() * (2**bits - 1)
    assert torch.equal(levels, levels.round()) and len(out.unique()) <= 2**bits
    out.sum().backward()
    assert torch.equal(values.grad, torch.ones(50))


def test_dorefa_weights_of_one_bit_have_one_size():
    weight = normal(6, 6)
    assert torch.equal(Grids(weights=1, activations=32, gradients=32).weight(weight).abs().unique(), weight.abs().mean()[None])


def test_dorefa_gradients_are_right_on_average():
    torch.manual_seed(0)
    grad = normal(4, 8)
    draws = torch.stack([rounded_gradient(grad, 4) for _ in range(4000)])
    inside = grad.abs() < grad.abs().amax(1, keepdim=True)  # at the ends, noise is cut off
    apart = (draws.mean(0) - grad).abs() / (draws.std(0) / math.sqrt(4000)).clamp(min=1e-4)
    assert apart[inside].max() < 4.5


# INT8


@pytest.mark.parametrize("n", [128, 1024, 8192])
def test_the_range_of_normal_numbers_bounds_their_deviation(n):
    """0.5 C(n) range <= sigma <= C(n) range."""
    found = spread(normal(200, n)).mean()
    assert 0.5 * found <= 1 <= found


def test_int8_with_its_products_off_is_the_plain_layer():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    kinds = [type(m) for m in model]
    undo = precision.find("int8:output=false:grad_input=false:range_norm=false").put_on(model)
    assert [type(m) for m in model] == kinds
    undo()


def test_the_weights_gradient_of_int8_has_the_gradient_as_it_is():
    """Bifurcation: only what goes on to the input is rounded."""
    layer, x = nn.Linear(16, 8, bias=False), normal(32, 16)
    undo = precision.find("int8:output=false").put_on(nn.Sequential(layer))
    given = x.clone().requires_grad_()
    grad = normal(32, 8, seed=1)
    layer(given).backward(grad)
    undo()
    assert torch.allclose(layer.weight.grad, grad.t() @ x, atol=1e-5)
    exact = grad @ layer.weight.detach()
    assert not torch.allclose(given.grad, exact, atol=1e-5)
    assert (given.grad - exact).norm() / exact.norm() < 0.05


# INT4


@pytest.mark.parametrize("block", [1, 2, 16, 32])
def test_the_hadamard_transform_is_its_own_inverse(block):
    values = normal(5, 64)
    assert torch.allclose(turn(turn(values, block), block), values, atol=1e-6)
    assert torch.allclose(turn(values, block).norm(), values.norm())
    assert block_of(48, 32) == 16 and block_of(7, 32) == 1


def test_the_hadamard_transform_lowers_the_error_where_there_are_outliers():
    values = with_outliers(64, 64)
    four = Integer(bits=4)
    turned = turn(rounded(four, turn(values, 32)), 32)
    assert (turned - values).norm() < 0.8 * (rounded(four, values) - values).norm()


def test_two_parts_of_four_bits_leave_at_most_a_step_of_the_low_one():
    grad = normal(16, 16)
    high, low = split(grad)
    step = grad.abs().max() / 7 / 14
    assert (high + low - grad).abs().max() <= step * (1 + 1e-5)


def test_sampled_rows_are_right_on_average_with_less_variance_than_uniform_ones():
    torch.manual_seed(0)
    rows = normal(16, 6) * torch.logspace(0, -2, 16)[:, None]
    weights = rows.norm(dim=1)
    chance = chances(weights, 8)
    assert chance.max() <= 1 and chance.sum() == pytest.approx(8, rel=1e-4)
    by_size = torch.stack([sampled(rows, weights).sum(0) for _ in range(2000)])
    evenly = torch.stack([sampled(rows, torch.ones(16)).sum(0) for _ in range(2000)])
    assert ((by_size.mean(0) - rows.sum(0)).abs() < 4.5 * by_size.std(0) / math.sqrt(2000) + 1e-4).all()
    assert by_size.var(0).sum() < 0.5 * evenly.var(0).sum()


# FP4


def test_the_two_phases_of_radix_four_cancel_in_the_mean():
    values = normal(4096).abs() + 0.01
    even, odd = rounded(Radix4(), values), rounded(Radix4(phase=1), values)
    assert ((even + odd) / 2 - values).norm() < 0.8 * min((even - values).norm(), (odd - values).norm())
    sizes = even[even > 0].unique()
    assert len(sizes) <= 7 and torch.allclose(sizes[1:] / sizes[:-1], torch.tensor(4.0))


# layer by layer


class _Overflows(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.calm = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.wild = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.calm:
            x = x + 0.1 * layer(x)
        apart = self.wild(x) - nn.functional.linear(x, self.wild.weight, self.wild.bias)
        return x.square().mean() + 1e6 * apart.square().mean()


def test_the_layer_that_the_loss_depends_on_keeps_its_precision():
    model, x = _Overflows(), normal(32, 8)
    chosen = choose(model, lambda m: [m(x)], error=0.02, to="fp4")
    assert chosen.low.split("+") == ["calm.0", "calm.1", "calm.2"]
    undo = chosen.put_on(model)
    assert type(model.wild) is nn.Linear and all(type(layer) is not nn.Linear for layer in model.calm)
    undo()
    assert type(model.calm[0]) is nn.Linear


@pytest.mark.parametrize("name", ["layerwise", "layerwise:low=nothing", "layerwise:low=wild:to=bf16"])
def test_layers_that_are_not_there_and_other_recipes_are_refused_before_anything_changes(name):
    model = _Overflows()
    with pytest.raises(holdall.InvalidInput) as refused:
        precision.find(name).put_on(model)
    assert refused.value.hint and type(model.wild) is nn.Linear


def test_the_layers_that_are_lowered_are_nearly_the_best_ones():
    """Ten layers, against every subset."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 100, (10,), generator=generator).tolist()
    costs = torch.rand(10, generator=generator).tolist()
    layers = [LayerChoice(name=f"{n}", nbytes=s, sensitivity=c) for n, (s, c) in enumerate(zip(sizes, costs, strict=True))]
    saved = sum(sizes[int(n)] for n in choose_layers(layers, error=2.0))
    best = max(
        sum(sizes[n] for n in range(10) if pick >> n & 1)
        for pick in range(1024)
        if sum(costs[n] for n in range(10) if pick >> n & 1) <= 2.0
    )
    assert saved >= 0.95 * best


# under plans


NAMES = [
    "fp8",
    "fp8:scaling=row",
    "fp8:scaling=delayed:history=2",
    "int8",
    "mxfp8",
    "nvfp4",
    "fp4",
    "int4",
    "dorefa",
    "layerwise:low=block.1.0+block.3.0",
]
COUNT = 4


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(COUNT)])

    def forward(self, x):
        for block in self.block:
            x = x + block(x)
        return x.float().square().mean()


def fitted(model, optimizer, batch, budget, **options):
    """In the budget, or in the smallest that the refusals name."""
    for _ in range(4):
        try:
            return holdall.fit(model, optimizer, batch, budget=budget, **options)
        except holdall.Infeasible as refused:
            assert refused.smallest > budget
            budget = refused.smallest
    raise AssertionError("refusals name budgets that are refused")


def train(model, batch, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_gives_the_same_numbers_in_every_budget_and_its_peak_is_the_predicted_one(name):
    model, batch = _Blocks(), {"x": normal(128, 16)}
    kinds, optimizer = [type(m) for m in model.modules()], torch.optim.AdamW(model.parameters(), fused=True)
    trace = holdall.trace(model, batch, optimizer=optimizer, precision=name)
    peak = holdall.plan(trace, hardware=machine(), planner="nop").predicted.peak["cpu"]
    seen = []
    for allow in (None, ["recompute"], ["offload", "place"])[: 3 if name[:4] in ("fp8", "fp8:", "int8") else 2]:
        trained = copy.deepcopy(model)
        mine = torch.optim.AdamW(trained.parameters(), lr=1e-3, fused=True)
        options = {"hardware": machine(), "precision": name, "allow": allow}
        with fitted(trained, mine, batch, 2 * peak if allow is None else 1000, **options) as harness:
            losses = train(trained, batch, mine)
        assert harness.measured().peak["cpu"] == harness.plan.predicted.peak["cpu"] <= harness.plan.budget["cpu"]
        assert allow is None or harness.plan.actions
        assert harness.notes == []
        assert [type(m) for m in trained.modules()] == kinds
        seen.append((losses, [p.detach() for p in trained.parameters()]))
    for losses, weights in seen[1:]:
        assert losses == seen[0][0] and all(map(torch.equal, weights, seen[0][1]))
    assert losses[-1] < losses[0]


def test_fp8_saves_half_of_what_bf16_saves_for_products():
    model, batch = _Blocks(), {"x": normal(128, 16)}
    held = {}
    for name in ("bf16", "fp8", "fp8:saved=false"):
        trace = holdall.trace(copy.deepcopy(model), batch, precision=name)
        inputs = [trace.tensors[s.tensor] for s in trace.saves if trace.tensors[s.tensor].nbytes in (128 * 16 * 2, 128 * 16)]
        held[name] = sum(t.nbytes for t in inputs if t.kind is Kind.ACTIVATION)
    assert held["bf16"] - held["fp8"] == pytest.approx(COUNT * 128 * 16, rel=0.02)
    assert held["fp8:saved=false"] >= held["bf16"]


def test_layers_that_are_named_and_the_head_keep_their_precision():
    model, _ = family("tiny-gpt2")
    undo = precision.find("int8:skip=mlp").put_on(model)
    changed = {name for name, m in model.named_modules() if type(m).__name__.startswith("Narrow")}
    undo()
    assert changed and not any("mlp" in name or "lm_head" in name for name in changed)
    with pytest.raises(holdall.InvalidInput, match="no layer") as refused:
        precision.find("int8:skip=nothing").put_on(model)
    assert "layers are" in refused.value.hint
    assert not any(type(m).__name__.startswith("Narrow") for m in model.modules())


def test_a_copy_of_a_model_under_a_recipe_computes_with_its_own_weights():
    model, batch = _Blocks(), {"x": normal(128, 16)}
    undo = precision.find("int8").put_on(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert model(**batch) != other(**batch)
    undo()
