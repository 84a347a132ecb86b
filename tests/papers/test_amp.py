"""Mixed precision (Micikevicius et al., ICLR 2018, arXiv 1710.03740) and the levels of apex.amp, on `holdall.precision`."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import holdall
from holdall import precision

HALF = {"bf16-autocast": torch.bfloat16, "O1": torch.float16}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.middle, self.head = nn.Linear(4 * 16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(torch.tanh(self.middle(x)))


def batch():
    torch.manual_seed(1)
    return torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])


def start(name, **options):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, precision.prepare(name, model, optimizer, **options)


def one_step(model, session, *, poison=False):
    x, y = batch()
    with session.autocast():
        loss = nn.functional.cross_entropy(model(x).float(), y)
    session.backward(loss)
    if poison:
        model.middle.weight.grad[0, 0] = float("inf")
    return session.step()


# loss scaling


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_halves_the_scale_and_leaves_the_parameters_alone(name, bad):
    """Works when: the parameters are the same bits, and the scale is half."""
    model, session = start(name)
    with session:
        one_step(model, session)
        before = {k: v.clone() for k, v in model.named_parameters()}
        masters = [m.clone() for m in session._masters.values()]
        assert session.scale == 2.0**16
        x, y = batch()
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        session.backward(loss)
        model.head.bias.grad[0] = bad
        assert not session.step()
        assert session.scale == 2.0**15 and session.skipped == 1
        assert all(torch.equal(v, before[k]) for k, v in model.named_parameters())
        assert all(torch.equal(a, b) for a, b in zip(session._masters.values(), masters, strict=True))
        assert all(p.grad is None for p in model.parameters())
        assert one_step(model, session)
        assert not torch.equal(model.head.weight, before["head.weight"])


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_the_scale_grows_after_exactly_the_interval_of_clean_steps(name):
    model, session = start(name, growth_interval=3)
    scales = []
    with session:
        for n in range(9):
            one_step(model, session, poison=n == 4)
            scales.append(session.scale / 2**16)
    assert scales == [1, 1, 2, 2, 1, 1, 1, 2, 2]  # the overflow at the fifth begins the count again


def test_the_trajectory_is_that_of_torchs_own_scaler():
    """O1 against autocast and GradScaler used by hand: the same bits and the same scales."""
    model, session = start("O1", growth_interval=2)
    reference = Net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    x, y = batch()
    with session:
        for _ in range(4):
            with session.autocast():
                loss = nn.functional.cross_entropy(model(x).float(), y)
            session.backward(loss)
            session.step()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(reference(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert session.scale == scaler.get_scale()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_clipping_is_of_the_unscaled_gradient():
    """A norm of c at most, whatever the scale: the update of plain SGD is then c times its rate."""
    for name in ("O0", "O1", "O2"):
        model, session = start(name)
        before = [p.detach().clone().float() for p in model.parameters()]
        x, y = batch()
        with session.autocast():
            loss = 3 * nn.functional.cross_entropy(model(x).float(), y)
        session.backward(loss)
        with session:
            assert session.step(clip=0.5)
        moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
        assert moved.norm().item() == pytest.approx(0.05 * 0.5, rel=2e-2), name


def test_gradients_that_float16_would_lose_survive_by_scaling():
    """The paper's reason for scaling: 1e-8 is zero in float16, and 1e-8 times 2^16 is not."""
    got = {}
    for name in ("O2", "O3"):
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        with precision.prepare(name, model, torch.optim.SGD(model.parameters(), lr=1.0)) as session:
            session.backward(model(torch.ones(1, 4)).sum() * 1e-8)
            got[name] = (
                (model.weight.grad / session.scale).abs().sum().item() if name == "O3" else model.weight.grad.abs().max().item()
            )
    assert got["O3"] == 0 and got["O2"] == pytest.approx(1e-8 * 2**16, rel=1e-2)


# levels


def test_levels_have_the_dtypes_of_apex():
    """O0 float32; O1 float32 weights, half products; O2 half weights, float32 norms and masters; O3 half throughout."""
    x, _ = batch()
    seen = {}
    for level in ("O0", "O1", "O2", "O3"):
        model, session = start(level)
        with session, session.autocast():
            product = []
            hook = model.conv.register_forward_hook(lambda _, __, out, product=product: product.append(out.dtype))
            if level != "O3":  # a CPU has no batch norm in half
                model(x)
            hook.remove()
            seen[level] = (model.conv.weight.dtype, model.norm.weight.dtype, *product, len(session._masters))
    half, full = torch.float16, torch.float32
    assert seen["O0"] == (full, full, full, 0)
    assert seen["O1"] == (full, full, half, 0)
    assert seen["O2"] == (half, full, half, 6)  # batch norm's two are float32 themselves
    assert seen["O3"][:2] == (half, half) and seen["O3"][-1] == 0


def test_bfloat16_needs_no_scaling():
    for name in ("bf16-autocast", "bf16-master", "bf16-weights", "bf16-stochastic"):
        assert precision.find(name).scale is None
        assert str(precision.find(name)) == name


@pytest.mark.parametrize("name", HALF)
def test_ops_run_in_the_width_of_autocasts_table(name):
    """Works when: products are narrow; what is not on a list follows its input; mixed inputs widen; sums of losses are wide."""
    half = HALF[name]
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    weight = torch.randn(2, 1, 3, 3)
    narrow = {
        "matmul": lambda: a @ b,
        "bmm": lambda: torch.bmm(a[None], b[None]),
        "linear": lambda: nn.functional.linear(a, b),
        "conv2d": lambda: nn.functional.conv2d(torch.randn(1, 1, 6, 6), weight),
    }
    wide = {
        "mse_loss": lambda: nn.functional.mse_loss(a.to(half), b.to(half)),
        "cross_entropy": lambda: nn.functional.cross_entropy(a, torch.tensor([0, 1, 2, 3])),
        "promotion": lambda: torch.cat([a, b.to(half)]),
    }
    session = start(name)[1]
    with session, session.autocast():
        assert {k: f().dtype for k, f in narrow.items()} == dict.fromkeys(narrow, half)
        assert {k: f().dtype for k, f in wide.items()} == dict.fromkeys(wide, torch.float32)
        assert torch.relu(a).dtype == torch.float32 and torch.relu(a.to(half)).dtype == half


class Widths(TorchDispatchMode):
    """Every op that computes, with the dtypes of what it makes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            self.seen.append((str(func), [str(t.dtype).removeprefix("torch.") for t in tree_iter(out)]))
        return out


def test_a_traced_step_has_the_widths_of_a_real_one():
    """Works when: the per-op table of dtypes is autocast's. What plans are made from, op by op, against a real forward."""
    model, (x, y) = Net(), batch()
    trace = holdall.trace(model, (x, y), loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), autocast="bf16")
    forward = [op for op in trace.ops if op.site.phase.value == "forward"]
    with torch.autocast("cpu", torch.bfloat16), Widths() as real:
        nn.functional.cross_entropy(model(x), y)
    traced, made = {}, {}
    for op in forward:
        traced.setdefault(op.site.op, []).extend(trace.tensors[t].dtype for t in op.writes)
    for name, widths in real.seen:
        made.setdefault(name, []).extend(widths)
    assert traced["aten._to_copy.default"] and traced["aten.addmm.default"] == ["bfloat16"] * 2
    for name, widths in traced.items():
        assert not widths or widths == made[name], name


class Copies(TorchDispatchMode):
    """Counts bytes of copies in another width that are made of parameters and still live at the end."""

    def __init__(self, parameters):
        super().__init__()
        self.own = {p.untyped_storage()._cdata for p in parameters}
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.own:
            self.made += [t.untyped_storage().nbytes() for t in tree_iter(out)]
        return out


@pytest.mark.parametrize("name", HALF)
def test_predicted_weight_copies_of_autocast_are_those_that_are_made(name):
    """Works when: predicted bytes equal measured, each weight copied once though used twice."""
    model, session = start(name)
    x, _ = batch()
    with session, session.autocast(), Copies(model.parameters()) as copies:
        model(x).sum() + model(x).sum()
    assert sum(copies.made) == precision.autocast_copy_bytes(model, session.recipe)
    assert precision.autocast_copy_bytes(model, "fp32") == 0


def test_weights_and_states_are_not_reduced_by_mixed_precision():
    """Headline: O1 and O2 take the 16 bytes per parameter of float32 AdamW."""
    for level in ("O0", "O1", "O2"):
        assert precision.bytes_per_parameter(level, torch.optim.AdamW).total == 16
