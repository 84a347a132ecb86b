"""Casts to 8-bit floats as ops of one pass: their bits, what a trace has of them, and products made of them."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdall
from holdall import precision
from holdall.cost.roofline import op_seconds
from holdall.machine.presets import gpu
from holdall.narrow import casts, kernels
from holdall.narrow.formats import Float8
from holdall.tracing.timing.op_inputs import InputLike
from holdall.types import Op, Phase, Site

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu/test_fp8_kernels.py asks more", allow_module_level=True)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 1), (3, 5), (64, 128), (65, 129), (200, 33)]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(t):
    return t.reshape(-1).view(torch.uint8)


def kernels_of_a_gpu():
    """Products and casts are those of a GPU; a CPU has the same product, more slowly."""
    return kernels.traced_for("cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [Float8(), Float8(dtype=E5M2), Float8(rows=True, powers=True)], ids=["e4m3", "e5m2", "row"])
def test_two_passes_give_the_codes_of_the_format(form, dtype, shape):
    values = normal(*shape, dtype=dtype)
    for given in (values, values.t().contiguous().t(), torch.zeros_like(values)):
        codes, unit = form.narrow(given)
        made, of_row = kernels.parts_of(form, given)
        assert torch.equal(bits(made), bits(codes.contiguous())) and torch.equal(of_row, unit) and made.is_contiguous()
        if not form.rows:
            straight, turned, scale, same = casts.narrow8_both(given, casts.largest(given), form.dtype)
            assert torch.equal(bits(straight), bits(made)) and torch.equal(same, unit)
            assert torch.equal(bits(turned), bits(made.t().contiguous())) and turned.is_contiguous()
            assert torch.equal(bits(casts.turn8(given, scale, form.dtype)), bits(turned))


def test_numbers_in_bfloat16_are_rounded_once():
    """1.0 and 0.5 + 1/256 + 1/512 by 448: by way of bfloat16 the second would become a tie, and another code."""
    values = torch.tensor([[1.0, 0.50390625 + 0.001953125]], dtype=torch.bfloat16)
    assert torch.equal(Float8().narrow(values)[0], (values.float() * 448).to(E4M3))
    many = normal(256, 256, dtype=torch.bfloat16)
    scale = Float8().scale_of(many)
    assert torch.equal(bits(Float8().narrow(many)[0]), bits((many.float() * scale).to(E4M3)))
    assert not torch.equal(bits(Float8().narrow(many)[0]), bits((many.float() * scale).bfloat16().to(E4M3)))


@pytest.mark.parametrize("form", [Float8(), Float8(rows=True, powers=True)], ids=["tensor", "row"])
def test_what_is_not_finite_stays_so(form):
    for bad in (float("inf"), float("nan")):
        values = normal(4, 16)
        values[1, 3] = bad
        codes, unit = kernels.parts_of(form, values)
        wide = form.widen((codes, unit), values.shape)
        assert not wide[1].isfinite().any()
        assert wide[[0, 2, 3]].isfinite().all() == form.rows  # with one scale for all, all are lost: a loss that says so


def test_a_scale_from_before_cuts_and_what_is_not_finite_has_its_own():
    values, held, seen = normal(70, 130), torch.tensor(448.0), torch.tensor(0.5)  # for values up to 1
    codes, turned, scale, unit = casts.held8_both(values, casts.largest(values), held, seen, E4M3, record=True)
    assert scale == held and unit == 1 / held and seen == values.abs().amax()
    assert torch.equal(bits(codes), bits((values * 448).clamp(-448, 448).to(E4M3))) and codes.float().abs().max() == 448
    assert torch.equal(bits(turned), bits(codes.t().contiguous()))
    casts.held8(values / 8, casts.largest(values / 8), held, seen, E4M3, record=True)
    assert seen == values.abs().amax()  # the largest stays
    for other, by in ((torch.tensor(0.0), 1.0), (held, float("inf"))):
        given = values * by
        made = casts.held8(given, casts.largest(given), other, seen, E4M3, record=False)
        assert all(map(torch.equal, map(bits, made), map(bits, casts.narrow8(given, casts.largest(given), E4M3))))


def layer_and_gradients(x, weight, grad, name):
    layer = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    undo = precision.find(name).put_on(nn.Sequential(layer))
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    undo()
    return y.detach(), x.grad, layer.weight.grad


NAMES = ["fp8", "fp8:saved=false", "fp8:scaling=row", "fp8:scaling=delayed"]


@pytest.mark.parametrize("name", NAMES)
def test_products_of_the_kernel_are_those_of_the_emulation_where_sums_are_exact(name):
    """Small whole numbers, with the largest a power of two, have exact codes, products and sums."""
    given = {"x": (32, 48), "weight": (16, 48), "grad": (32, 16)}
    numbers = [torch.randint(-4, 5, s, generator=torch.Generator().manual_seed(n)) for n, s in enumerate(given.values())]
    tensors = [n.to(torch.bfloat16) for n in numbers]
    for t in tensors:
        t[:, 0] = t[0, :] = 7.0  # 448 and 57344 are seven times a power of two: scales are exact
    emulated = layer_and_gradients(*tensors, name)
    with kernels_of_a_gpu():
        made = layer_and_gradients(*tensors, name)
    assert all(map(torch.equal, made, emulated))
    assert torch.equal(made[0].float(), (tensors[0].float() @ tensors[1].float().t()).bfloat16().float())


@pytest.mark.parametrize("name", NAMES)
def test_products_of_the_kernel_are_near_the_emulation(name):
    tensors = [normal(*s, dtype=torch.bfloat16, seed=n) for n, s in enumerate([(64, 96), (32, 96), (64, 32)])]
    emulated = layer_and_gradients(*tensors, name)
    with kernels_of_a_gpu():
        made = layer_and_gradients(*tensors, name)
    for a, b in zip(made, emulated, strict=True):
        assert (a.float() - b.float()).norm() <= 2**-8 * b.float().norm()  # both are rounded to bfloat16 at the end


class _Layer(nn.Module):
    def __init__(self, *, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        self.second.weight.requires_grad_(not frozen)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).float().square().mean()


def traced(**how):
    model = _Layer(**how)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return holdall.trace(model, {"x": normal(256, 64)}, optimizer=optimizer, precision="fp8", device="cuda")


def ops_of(trace, phase, name):
    return [op for op in trace.ops if op.site.phase is phase and op.site.op == f"holdall.{name}.default"]


def test_a_trace_for_a_gpu_has_one_pass_for_each_cast():
    trace = traced()
    x, weight = 256 * 64, 64 * 128
    (first, *_) = ops_of(trace, Phase.FORWARD, "narrow8_both")
    assert first.moved == 2 * x + x + x + 4 * 4 + 8  # read once, written twice; parts, scale and unit
    assert len(ops_of(trace, Phase.FORWARD, "largest")) == 4 and len(ops_of(trace, Phase.FORWARD, "narrow8_both")) == 2
    (turned, *_) = ops_of(trace, Phase.BACKWARD, "turn8")
    assert turned.moved == 2 * weight + weight + 4
    assert len(ops_of(trace, Phase.BACKWARD, "largest")) == 2  # of the gradients: the weights' scales are kept
    passes = [op for op in trace.ops if op.site.op.split(".")[1] in ("linalg_vector_norm", "mul", "clone", "_to_copy")]
    assert not [op for op in passes if op.site.module in ("first", "second") and "float8" in op.dtype]


def test_backward_keeps_one_byte_an_element_and_nothing_of_a_layer_that_is_frozen():
    def saved(trace):
        return sum(t.nbytes for t in (trace.tensors[s.tensor] for s in trace.saves) if t.dtype == "float8_e4m3fn")

    assert saved(traced()) == 256 * 64 + 256 * 128
    assert saved(traced(frozen=True)) == 256 * 64


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_products_of_eight_bits_are_priced_by_their_own_rate(dtype):
    site = Site(phase=Phase.FORWARD, module="", op="aten._scaled_mm.default", nth=0)
    op = Op(id=0, site=site, reads=(), writes=(), flops=10**15, moved=10**6, dtype=dtype)
    assert op_seconds(op, gpu("h200")) == pytest.approx(op_seconds(replace(op, dtype="bfloat16"), gpu("h200")) / 2)
    assert op_seconds(op, gpu("a100-80gb")) == op_seconds(replace(op, dtype="bfloat16"), gpu("a100-80gb"))


def test_a_tensor_of_eight_bits_can_be_made_to_measure_an_op():
    like = InputLike.of(normal(4, 8).to(E4M3).t())
    made = like.make(on_host=False)
    assert made.dtype == E4M3 and made.stride() == (1, 8) and made.float().abs().sum() > 0


def test_a_copied_model_multiplies_by_kernels_with_its_own_weights():
    model = _Layer()
    undo = precision.find("fp8").put_on(model)
    other = copy.deepcopy(model)
    with torch.no_grad(), kernels_of_a_gpu():
        other.first.weight.zero_()
        assert other(normal(32, 64)) == 0 != model(normal(32, 64))
    undo()
