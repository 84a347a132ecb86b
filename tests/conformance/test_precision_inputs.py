"""`precision="bf16"` on models with floating inputs: cast where a module with bf16 weights gets them, and nowhere else."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import holdall
from holdall.casts import cast_inputs
from holdall.testing.families import FAMILIES
from holdall.testing.worlds import family, machine
from holdall.tracing.step import default_loss

BF16 = torch.bfloat16
TIMES = []  # dtypes of the timesteps that denoisers got; a trace takes back what a forward does to attributes


class Denoiser(nn.Module):
    """Images, float timesteps, integer labels; a batch norm, a float32 buffer in the residual stream."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.time, self.label = nn.Linear(8, 16), nn.Embedding(10, 16)
        self.middle = nn.ModuleList([nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(3)])
        self.last = nn.Conv2d(16, 3, 1)
        self.register_buffer("mask", torch.full((16, 1, 1), 0.5))

    def forward(self, x, t, labels):
        TIMES.append(t.dtype)
        angles = t[:, None] * torch.exp(-torch.arange(4, dtype=torch.float32))
        h = self.norm(self.first(x)) + self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        h = h + self.label(labels)[:, :, None, None]
        for block in self.middle:
            h = h + block(h * self.mask)
        return self.last(h)


class Top(nn.Module):
    """Computes with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.rest = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3)])

    def forward(self, x):
        x = functional.linear(x, self.weight)
        for block in self.rest:
            x = x + block(x)
        return x


class Attending(nn.Module):
    """Attention whose weights are its own, given float32 once and bf16 once."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2)])

    def forward(self, x):
        for layer in self.attention:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def images():
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 8, 8), torch.rand(4) * 1000, torch.randint(0, 10, (4,)), torch.randn(4, 3, 8, 8)
    return Denoiser(), batch, lambda m, b: functional.mse_loss(m(*b[:3]), b[3])


def vectors(model, shape):
    torch.manual_seed(0)
    return model(), (torch.randn(shape), torch.randn(shape)), lambda m, b: functional.mse_loss(m(b[0]), b[1])


MODELS = {
    "denoiser": images,
    "top": lambda: vectors(Top, (8, 16)),
    "attending": lambda: vectors(Attending, (2, 8, 16)),
    "convnet": lambda: (*family("convnet"), default_loss),
    "vit": lambda: (*family("tiny-vit"), default_loss),
    "branching": lambda: (*family("branching"), default_loss),
    "mixtral": lambda: (*family("tiny-mixtral"), default_loss),
}


class Whole(nn.Module):
    def __init__(self, model, loss):
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch):
        return self._loss(self.model, batch)


def plain(model, batch, loss, casts, steps=3):
    """bf16 copies of float32 parameters, by hand."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    end = cast_inputs(model, BF16, casts)  # those that were traced
    losses = []
    torch.manual_seed(1)
    for _ in range(steps):
        copies = {id(p): nn.Parameter(p.detach().to(BF16)) for p in model.parameters()}
        named = {f"model.{name}": copies[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        value = torch.func.functional_call(Whole(model, loss), named, (batch,))
        value.backward()
        for p in model.parameters():
            if copies[id(p)].grad is not None:
                p.grad = copies[id(p)].grad.float()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    end()
    return model, losses


@pytest.mark.parametrize("share", [1.0, 0.85])
@pytest.mark.parametrize("name", MODELS)
def test_bits_and_peak_in_bf16(name, share):
    model, batch, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = None if loss is default_loss else loss
    traced = holdall.trace(model, batch, optimizer=optimizer, loss=own, precision="bf16")
    reference, expected = plain(model, batch, loss, traced.about.casts)
    whole = holdall.plan(traced, hardware=machine()).predicted.peak["cpu"]
    budget = int(whole * share * 1.02)  # updates by torch's own ops are known to a few hundred bytes
    with holdall.fit(model, optimizer, batch, loss=own, precision="bf16", budget=budget, hardware=machine()) as harness:
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        report = harness.report()
    assert losses == expected
    for (key, ours), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key
    assert report.fits
    assert "forward" not in model.__dict__ and all("forward" not in m.__dict__ for m in model.modules())
    assert abs(report.measured.peak["cpu"] / report.predicted.peak["cpu"] - 1) < 0.03  # 2.1 % for the denoiser at 85 %


def test_only_modules_with_weights_cast_and_inputs_of_the_model_stay():
    TIMES.clear()
    model, batch, loss = images()
    traced = holdall.trace(model, batch, loss=loss, precision="bf16")
    assert set(TIMES) == {torch.float32}
    assert "" not in traced.about.casts
    assert {"first", "time", "norm"} <= set(traced.about.casts)
    model, batch, loss = vectors(Top, (8, 16))
    assert holdall.trace(model, batch, loss=loss, precision="bf16").about.casts == ("",)


def test_a_model_without_floating_inputs_casts_nothing():
    model, batch = family("tiny-llama")
    assert holdall.trace(model, batch, precision="bf16").about.casts == ()


def test_running_statistics_stay_float32():
    model, batch, loss = images()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    before = model.norm.running_mean.clone()
    with holdall.fit(model, optimizer, batch, loss=loss, precision="bf16"):
        loss(model, batch).backward()
        optimizer.step()
        assert model.norm.weight.dtype == torch.float32
        model.eval()
        with torch.no_grad():
            assert model(*batch[:3]).dtype == BF16
    assert model.norm.running_mean.dtype == torch.float32 and not torch.equal(model.norm.running_mean, before)


def test_routing_weights_are_not_rounded():
    model, batch = family("tiny-mixtral")
    assert holdall.trace(model, batch, precision="bf16").about.casts == ()


def test_a_product_of_two_dtypes_is_named():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("matrix", torch.randn(4, 4))

        def forward(self, x):
            return (self.layer(x) @ self.matrix).sum()

    with pytest.raises(holdall.InvalidInput, match=r"Spectrum.*bfloat16 and float32") as refused:
        holdall.trace(Spectrum(), (torch.randn(2, 4),), precision="bf16")
    assert "autocast" in refused.value.hint


def test_the_hint_where_an_op_has_no_narrow_kernel():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.fft.fft(self.layer(x)).real.sum()

    with pytest.raises(holdall.InvalidInput, match="BFloat16") as refused:
        holdall.trace(Spectrum(), (torch.randn(2, 4),), precision="bf16", device="cuda")
    assert "autocast" in refused.value.hint


@pytest.mark.parametrize("name", ["linear-attention"])
def test_a_model_that_mixes_dtypes_runs_under_autocast(name):
    """Its products would get bfloat16 and float32."""
    of = FAMILIES[name]

    def trained(**given):
        torch.manual_seed(0)
        model, batch = of.build()
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        fitted = holdall.fit(model, optimizer, batch, loss=of.loss, **given) if given else nullcontext()
        with fitted as harness:
            torch.manual_seed(1)
            for _ in range(3):
                with nullcontext() if given else torch.autocast("cpu", BF16):
                    loss = of.loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                del loss
        return losses, harness

    with pytest.raises(holdall.HoldallError) as refused:
        trained(budget="1GiB", precision="bf16")
    assert 'precision="bf16-under-autocast"' in refused.value.hint
    wide, harness = trained(budget="1GiB", precision="bf16-under-autocast")
    narrow, tighter = trained(budget=int(0.8 * harness.plan.predicted.peak["cpu"]), precision="bf16-under-autocast")
    assert tighter.report().fits
    assert narrow == wide
    assert wide == pytest.approx(trained()[0], rel=0.02)


def test_a_norm_that_would_mix_dtypes_is_refused_before_the_first_step():
    """On a CPU a layer norm of a float32 input takes no bfloat16 weights, under autocast too."""
    model, batch = FAMILIES["fnet"].build()
    with pytest.raises(holdall.HoldallError, match="rejected the batch"):
        holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()), precision="bf16-under-autocast")
