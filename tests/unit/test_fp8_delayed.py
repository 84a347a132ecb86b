"""Delayed scales of FP8: from steps before alone, the same in every budget, in repeated forwards and after a restart."""

import copy

import pytest
import torch
from torch import nn

import holdall
from holdall import precision
from holdall.testing.worlds import machine

NAME = "fp8:scaling=delayed:history=2"
BUFFERS = ("fp8_scales", "fp8_seen", "fp8_seen_grad", "fp8_window")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])

    def forward(self, x):
        for block in self.block:
            x = x + block(x)
        return x.float().square().mean()


FACTORS = (1.0, 4.0, 0.125, 16.0, 0.25, 2.0)


def batch_of(step=0):
    return {"x": normal(128, 16) * float(torch.tensor(FACTORS[: step + 1]).prod())}


def train(model, optimizer, batch, first=0, last=6):
    """The batch grows and shrinks in its place, so that scales from before are too large for some steps."""
    losses = []
    for n in range(first, last):
        batch["x"].mul_(FACTORS[n] if n > first else 1.0)
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model):
    return {name: b.clone() for name, b in model.named_buffers() if name.rsplit(".")[-1] in BUFFERS}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture
def layer():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    undo = precision.find(NAME).put_on(model)
    yield model
    undo()
    assert type(model[0]) is nn.Linear and not list(model.buffers())


def test_the_scale_of_a_step_is_from_the_steps_before_alone(layer):
    largest = []
    for n, by in enumerate((1.0, 10.0, 0.1, 0.1, 0.1)):
        x = normal(16, 8, seed=n) * by
        out = layer(x)
        scale = layer[0].fp8_scales[0].item()
        window = largest[-2:]
        assert scale == pytest.approx(448 / max(window) if window else 0.0, rel=1e-6)
        by_now = torch.tensor(scale) if window else 448 / x.abs().max()  # the first step has the values at hand
        codes = (x * by_now).clamp(-448, 448).to(torch.float8_e4m3fn).float() / by_now
        weight = layer[0].weight.detach()
        grid = 448 / weight.abs().max()
        exact = codes @ ((weight * grid).to(torch.float8_e4m3fn).float() / grid).t()
        assert torch.allclose(out, exact, rtol=1e-5, atol=1e-5)
        out.sum().backward()
        largest.append(x.abs().max().item())
    assert scale == pytest.approx(448 / max(largest[-3:-1]), rel=1e-6)  # what is older than the window is forgotten


def test_what_is_seen_counts_once_however_often_a_forward_is_repeated(layer):
    x = normal(16, 8)
    layer(x), layer(x)
    before = state_of(layer)
    assert not before["0.fp8_window"].any() and before["0.fp8_seen"][0] == x.abs().max()
    layer(x).sum().backward()
    layer(x)
    assert (state_of(layer)["0.fp8_window"] > 0).sum() == 3  # one step, of three operands


def test_an_evaluation_changes_nothing(layer):
    layer(normal(16, 8)).sum().backward()
    before = state_of(layer)
    layer.eval()
    layer(normal(16, 8) * 100)
    layer.train()
    with torch.no_grad():
        layer(normal(16, 8) * 0.1)
    assert same(before, state_of(layer))


def test_a_tensor_that_is_not_finite_is_not_cut_to_one_that_is(layer):
    layer(normal(16, 8)).sum().backward()
    x = normal(16, 8)
    x[0, 0] = float("inf")
    assert not layer(x).isfinite().all()
    layer(normal(16, 8)).sum().backward()  # an infinite window is none
    assert layer(normal(16, 8)).isfinite().all()


def fitted(model, optimizer, batch, budget, **options):
    """In the budget, or in the smallest that the refusals name."""
    for _ in range(4):
        try:
            return holdall.fit(model, optimizer, batch, budget=budget, **options)
        except holdall.Infeasible as refused:
            budget = refused.smallest
    raise AssertionError("refusals name budgets that are refused")


@pytest.mark.parametrize("allow", [["recompute"], ["reschedule"], ["offload", "place"], None], ids=str)
def test_auto_gives_the_same_numbers_and_windows_in_a_wide_and_a_narrow_budget(allow):
    model, seen = _Blocks(), []
    for budget in (10**9, 1000):
        trained, batch = copy.deepcopy(model), batch_of()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
        options = {"hardware": machine(), "precision": NAME, "allow": None if budget > 1000 else allow}
        with fitted(trained, optimizer, batch, budget, **options) as harness:
            losses = train(trained, optimizer, batch)
            state = state_of(trained)
        assert harness.measured().peak["cpu"] <= harness.plan.budget["cpu"] and harness.notes == []
        assert budget > 1000 or harness.plan.actions
        seen.append((losses, state, [p.detach() for p in trained.parameters()]))
    (wide, state, weights), (narrow, other, theirs) = seen
    assert wide == narrow and same(state, other) and all(map(torch.equal, weights, theirs))
    assert len({tuple(w.flatten().tolist()) for n, w in state.items() if n.endswith("window")}) == 4


def test_a_run_that_is_saved_and_resumed_goes_on_with_its_windows(tmp_path):
    def run(first, last, *, load=None, save=None):
        model, batch = _Blocks(), batch_of(first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with holdall.fit(model, optimizer, batch, budget=10**9, hardware=machine(), precision=NAME):
            if load:
                holdall.load_checkpoint(load, model, optimizer)
            losses = train(model, optimizer, batch, first, last)
            if save:
                holdall.save_checkpoint(save, model, optimizer, step=last)
            return losses, state_of(model)

    whole, windows = run(0, 6)
    first, _ = run(0, 3, save=tmp_path / "half")
    second, restored = run(3, 6, load=tmp_path / "half")
    assert first + second == whole and same(windows, restored)


def test_weights_that_were_saved_without_windows_can_be_read():
    plain = _Blocks().state_dict()
    model = _Blocks()
    undo = precision.find(NAME).put_on(model)
    model.load_state_dict(plain)
    undo()


@pytest.mark.parametrize(
    "name", ["fp8:scaling=delayed:history=0", "fp8:scaling=delayed:saved=false", "layerwise:low=0:to=fp8:scaling=delayed"]
)
def test_what_has_no_meaning_is_refused(name):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(holdall.InvalidInput) as refused:
        precision.find(name).put_on(model)
    assert refused.value.hint and type(model[0]) is nn.Linear
