"""Casts to 8-bit floats by Triton against torch's ops, bit for bit; products against their emulation; a training with both."""

import copy

import pytest
import torch
from torch import nn

import holdall
from holdall import precision
from holdall.narrow import casts, kernels
from holdall.narrow.formats import Float8

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")
if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("the kernels are for Hopper and later", allow_module_level=True)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 300), (300, 1), (3, 5), (64, 128), (1000, 777), (4096, 2048)]
FORMS = {
    "e4m3": Float8(),
    "e5m2": Float8(dtype=E5M2),
    "powers": Float8(powers=True),
    "row": Float8(rows=True),
    "row of powers": Float8(rows=True, powers=True),
}


@pytest.fixture(autouse=True)
def with_kernels():
    casts.switch(on=True)
    yield
    casts.switch(on=True)


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def by_ops(call, *args, **options):
    casts.switch(on=False)
    try:
        return call(*args, **options)
    finally:
        casts.switch(on=True)


def same(made, expected):
    """The same bits; a NaN is one whatever its sign."""
    assert made.shape == expected.shape and made.dtype == expected.dtype and made.is_contiguous()
    lost = expected.float().isnan()
    assert torch.equal(made.float().isnan(), lost)
    kind = {1: torch.uint8, 4: torch.int32}[made.element_size()]
    assert torch.equal(made.view(kind)[~lost], expected.contiguous().view(kind)[~lost])


def inputs(shape, dtype):
    """By what they are for."""
    plain = normal(*shape, dtype=dtype)
    found = {"plain": plain, "zeros": torch.zeros_like(plain), "tiny": plain * 1e-30, "huge": plain * 1e30}
    found["wide"] = plain * torch.logspace(-12, 4, shape[1], device="cuda").to(dtype)  # many become subnormal codes, and zero
    found["transposed"] = normal(shape[1], shape[0], dtype=dtype).t()
    found["strided"] = normal(2 * shape[0], 3 * shape[1], dtype=dtype)[::2, ::3]
    for name, bad in (("inf", float("inf")), ("nan", float("nan"))):
        found[name] = plain.clone()
        found[name][shape[0] // 2, shape[1] // 2] = bad
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_kernels_give_the_bits_of_torchs_ops(form, shape):
    for values in inputs(shape, torch.bfloat16).values():
        assert casts.work_on(values)
        most = casts.largest(values, rows=form.rows)
        expected = by_ops(casts.largest, values, rows=form.rows)
        if form.rows:
            same(most, expected)
        else:
            same(most.amax(), expected.amax())
        options = {"rows": form.rows, "powers": form.powers}
        made = casts.narrow8(values, most, form.dtype, **options)
        for one, other in zip(made, by_ops(casts.narrow8, values, expected, form.dtype, **options), strict=True):
            same(one, other)
        codes, unit = form.narrow(values)  # what a CPU would do
        same(made[0], codes)
        same(made[2], unit)
        if not form.rows:
            both = casts.narrow8_both(values, most, form.dtype, powers=form.powers)
            for one, other in zip(both, (made[0], made[0].t().contiguous(), *made[1:]), strict=True):
                same(one, other)
            same(casts.turn8(values, both[2], form.dtype), by_ops(casts.turn8, values, both[2], form.dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_casts_with_a_scale_from_before_cut_as_torchs_ops_do(shape):
    for values in inputs(shape, torch.bfloat16).values():
        for number in (448.0, 3.7e-2, 0.0):
            held, most = torch.tensor(number, device="cuda"), casts.largest(values)
            seen, other = torch.tensor(0.5, device="cuda"), torch.tensor(0.5, device="cuda")
            expected = by_ops(casts.held8_both, values, most, held, other, E4M3, record=True)
            for one, by in zip(casts.held8_both(values, most, held, seen, E4M3, record=True), expected, strict=True):
                same(one, by)
            assert torch.equal(seen, other)
            same(casts.held8(values, most, held, seen, E4M3, record=False)[0], expected[0])
            assert torch.equal(seen, other)


def test_casts_of_every_number_of_16_bits():
    """All bfloat16 numbers that are finite, by a scale of 1, in both formats."""
    values = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()][:65280].reshape(-1, 128)
    one = torch.tensor(1.0, device="cuda")
    for dtype in (E4M3, E5M2):
        most = torch.finfo(dtype).max
        same(casts.turn8(values.t(), one, dtype), values.float().clamp(-most, most).to(dtype))


# products


def layer_and_gradients(x, weight, grad, name):
    layer = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype, device=x.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    undo = precision.find(name).put_on(nn.Sequential(layer))
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    undo()
    return [t.cpu() for t in (y.detach(), x.grad, layer.weight.grad)]


NAMES = ["fp8", "fp8:saved=false", "fp8:scaling=row", "fp8:scaling=delayed"]


@pytest.mark.parametrize("name", NAMES)
def test_products_of_small_whole_numbers_are_those_of_the_cpu(name):
    """Codes, products and sums are exact, in 14 bits too, so the order of a sum does not matter."""
    sizes = [(64, 96), (32, 96), (64, 32)]
    tensors = [torch.randint(-2, 3, s, generator=torch.Generator().manual_seed(n)).bfloat16() for n, s in enumerate(sizes)]
    for t in tensors:
        t[:, 0] = t[0, :] = 7.0  # 448 and 57344 are seven times a power of two: scales are exact
    made = layer_and_gradients(*(t.cuda() for t in tensors), name)
    assert kernels.can_scale(tensors[0].cuda(), tensors[1].cuda(), Float8(), Float8())
    for one, other in zip(made, layer_and_gradients(*tensors, name), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_near_those_of_the_cpu(name):
    """Within a hundredth of their norm: forward sums in 14 bits for a while, and all are rounded to bfloat16."""
    tensors = [normal(*s, seed=n) for n, s in enumerate([(256, 512), (384, 512), (256, 384)])]
    emulated = layer_and_gradients(*(t.cpu() for t in tensors), name)
    for one, other in zip(layer_and_gradients(*tensors, name), emulated, strict=True):
        assert (one.float() - other.float()).norm() <= 0.01 * other.float().norm()


# training


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
        self.block = nn.ModuleList(parts)

    def forward(self, x):
        for block in self.block:
            x = x + block(x)
        return x.float().square().mean()


def losses_of(model, batch, name, budget, hardware):
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with holdall.fit(model, optimizer, batch, budget=budget, precision=name, hardware=hardware) as harness:
        losses = []
        for _ in range(5):
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], harness


@pytest.mark.parametrize("name", ["fp8", "fp8:scaling=row", "fp8:scaling=delayed"])
def test_training_by_kernels_is_training_without(name):
    hardware = holdall.probe("cuda", quick=True)
    model, batch = _Blocks().cuda(), {"x": normal(4096, 256, dtype=torch.float32)}
    fused, weights, harness = losses_of(model, batch, name, "8GiB", hardware)
    casts.switch(on=False)
    plain, others, _ = losses_of(model, batch, name, "8GiB", hardware)
    assert fused == plain and all(map(torch.equal, weights, others))
    assert fused[-1] < fused[0]
    assert not harness.notes, harness.notes


def test_two_passes_take_less_time_than_torchs_ops():
    """6 bytes an element are read and written instead of 15; a fifth less time is asked for."""
    values = normal(8192, 4096)

    def seconds():
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for n in range(12):
            if n == 2:
                marks[0].record()
            casts.narrow8_both(values, casts.largest(values), E4M3)
        marks[1].record()
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[1]) / 10

    assert seconds() < 0.8 * by_ops(seconds)
