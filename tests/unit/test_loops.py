"""Loops that do more than call the model once a step: each is carried out as it was traced, with the same bits."""

import pytest
import torch
from torch import nn

import holdall

WIDTH, ROWS = 32, 128


def layers(count=4):
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)])


def make_gan():
    return nn.ModuleDict({"G": layers(), "D": layers()})


def gan_loss(m, batch):
    return m["D"](m["G"](batch[0])).mean() + m["D"](batch[0]).square().mean()


class Coder(nn.Module):
    """Whose forward nobody calls, and whose own parameter is read outside of every forward."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers(), layers()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def encode(self, x):
        return self.encoder(x * self.scale)

    def decode(self, z):
        return self.decoder(z)


def coder_loss(m, batch):
    return m.decode(m.encode(batch[0])).square().mean()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(6)

    def forward(self, x):
        return self.layers(x)


def two_forwards(m, batch):
    return m(batch[0]).square().mean() + m(2 * batch[0]).mean()


def reference_first(m, batch):
    with torch.no_grad():
        reference = m(batch[0])
    return (m(1.5 * batch[0]) - reference).square().mean()


def reference_between(m, batch):
    first = m(1.5 * batch[0])
    with torch.no_grad():
        reference = m(batch[0])
    return (first - reference).square().mean() + m(batch[0]).mean()


class Repeated(nn.Module):
    """One layer, called over and over."""

    def __init__(self):
        super().__init__()
        self.layer = Residual()

    def forward(self, x):
        for _ in range(6):
            x = self.layer(x)
        return x


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def mean_square(m, batch):
    return m(batch[0]).square().mean()


LOOPS = {
    "gan": (make_gan, gan_loss),
    "encode and decode": (Coder, coder_loss),
    "two forwards": (Stack, two_forwards),
    "a reference first": (Stack, reference_first),
    "a reference between": (Stack, reference_between),
    "one layer called over and over": (Repeated, mean_square),
}


def sample():
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)),)


def setting(make):
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, loss, *, accumulate=1, steps=3):
    seen = []
    for _ in range(steps):
        for _ in range(accumulate):
            value = loss(model, sample())
            value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += [value.item(), norm.item()]
    return seen + [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def plain_peak(make, loss, **planning):
    model, optimizer = setting(make)
    traced = holdall.trace(model, sample(), optimizer=optimizer, loss=loss)
    return holdall.plan(traced, planner="nop", **planning).predicted.peak["cpu"]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_is_carried_out_as_it_was_traced(name, accumulate):
    make, loss = LOOPS[name]
    expected = train(*setting(make), loss, accumulate=accumulate)
    budget = int(0.75 * plain_peak(make, loss, accumulate=accumulate))
    model, optimizer = setting(make)
    with holdall.fit(model, optimizer, sample(), budget=budget, loss=loss, accumulate=accumulate) as harness:
        assert harness.plan.actions
        seen = train(model, optimizer, loss, accumulate=accumulate)
    report = harness.report()
    assert same(seen, expected)
    assert (report.fits, report.steps, report.notes) == (True, 3, ())
    off = report.measured.peak["cpu"] - report.predicted.peak["cpu"]
    assert -0.1 * budget <= off <= 0.01 * budget


def test_two_optimizers_over_one_module():
    """The plan was made for one of them; the other steps as ever."""

    def loop(model, first, second):
        seen = []
        for _ in range(3):
            with torch.no_grad():
                fake = model["G"](sample()[0])
            value = model["D"](fake).mean() + model["D"](sample()[0]).square().mean()
            value.backward()
            second.step()
            second.zero_grad()
            other = -model["D"](model["G"](sample()[0])).mean()
            other.backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
            seen += [value.item(), other.item()]
        return seen + [p.detach().clone() for p in model.parameters()]

    def make():
        torch.manual_seed(0)
        model = make_gan()
        return model, *(torch.optim.AdamW(model[k].parameters(), lr=1e-3) for k in "GD")

    expected = loop(*make())
    model, first, second = make()
    traced = holdall.trace(model, sample(), optimizer=first, loss=gan_loss)
    budget = int(0.8 * holdall.plan(traced, planner="nop").predicted.peak["cpu"])
    with holdall.fit(model, first, sample(), budget=budget, loss=gan_loss, enforce=False) as harness:
        assert same(loop(model, first, second), expected)
    assert harness.report().steps == 3


def test_parts_are_evaluated_with_the_latest_weights():
    make, loss = LOOPS["gan"]

    def loop(model, optimizer):
        seen = []
        for _ in range(2):
            loss(model, sample()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen += [model["G"](sample()[0]).sum().item(), model["D"][0](sample()[0]).sum().item()]
            assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
        return seen

    expected = loop(*setting(make))
    model, optimizer = setting(make)
    with holdall.fit(model, optimizer, sample(), budget=int(0.5 * plain_peak(make, loss)), loss=loss) as harness:
        assert any(a.name == "place" for a in harness.plan.actions)
        assert loop(model, optimizer) == expected


def test_a_report_of_no_step_does_not_say_that_it_fits():
    model, optimizer = setting(Stack)
    with holdall.fit(model, optimizer, sample(), budget="1MiB", loss=mean_square) as harness:
        pass
    report = harness.report()
    assert report.measured is None and report.fits is None
    assert "nothing was measured" in report.verdict


def test_every_call_of_a_layer_is_a_block():
    model, optimizer = setting(Repeated)
    traced = holdall.trace(model, sample(), optimizer=optimizer, loss=mean_square)
    assert [b.name for b in traced.blocks] == ["layer", *(f"layer#{n}" for n in range(1, 6))]


class Stash(torch.autograd.Function):
    """Keeps a tensor on its ctx without telling autograd, as much code does."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        s = torch.sigmoid(ctx.x)
        return grad * (s + ctx.x * s * (1 - s))


class Stashing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])

    def forward(self, x):
        for layer in self.layers:
            x = x + Stash.apply(layer(x))
        return x


@pytest.mark.parametrize("share", [1.0, 0.85])
def test_what_a_function_keeps_on_its_ctx_is_foreseen(share):
    expected = train(*setting(Stashing), mean_square)
    model, optimizer = setting(Stashing)
    budget = int(share * plain_peak(Stashing, mean_square)) + 64  # the loop keeps the norm of the step before
    with holdall.fit(model, optimizer, sample(), budget=budget, loss=mean_square) as harness:
        assert same(train(model, optimizer, mean_square), expected)
    report = harness.report()
    assert not report.notes
    assert abs(report.measured.peak["cpu"] - report.predicted.peak["cpu"]) <= 64
