"""What a forward leaves in Python attributes: traced, recomputed, retried and captured, it was left changed, changed twice, or
fixed, and losses differed without a word. An attribute that got a fake tensor while tracing crashed the loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdall
from holdall.actions.recompute import Recompute
from holdall.actions.recompute import obstacle as recompute_obstacle
from holdall.actions.reschedule import Reschedule
from holdall.actions.reschedule import obstacle as program_obstacle
from holdall.attributes import Attributes
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.problem import make_problem
from holdall.testing.worlds import machine

WIDTH, STEPS = 32, 5


class Meter:
    def __init__(self):
        self.calls = 0


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.kind, self.count, self.seen, self.meter, self.settings = kind, 0, [], Meter(), {"scale": 1.0}
        self.mean, self.late = torch.ones(WIDTH), None
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x):
        h = self.up(self.norm(x))
        now = x.detach().mean(0)
        if self.kind == "a count":
            self.count += 1
            h = h * min(1.0, self.count / 5)
        elif self.kind == "a list":
            self.seen.append(len(self.seen))
            h = h / len(self.seen)
        elif self.kind == "an object":
            self.meter.calls += 1
            h = h / self.meter.calls
        elif self.kind == "a tensor in place":
            self.mean.mul_(0.9).add_(now, alpha=0.1)
            h = h + F.linear(self.mean, self.up.weight)
        elif self.kind == "a new tensor":
            self.mean = 0.9 * self.mean + 0.1 * now
            h = h + F.linear(self.mean, self.up.weight)
        elif self.kind == "a new buffer":
            self.average = 0.9 * self.average + 0.1 * now
            h = h + F.linear(self.average, self.up.weight)
        elif self.kind == "a tensor from the first call on":
            self.late = now if self.late is None else 0.9 * self.late + 0.1 * now
            h = h + F.linear(self.late, self.up.weight)
        elif self.kind == "a loss":
            self.late = h.square().mean()
        elif self.kind == "a setting of the loop":
            h = h / self.settings["scale"]
        return x + self.down(F.gelu(h))


KINDS = [
    "a count",
    "a list",
    "an object",
    "a tensor in place",
    "a new tensor",
    "a new buffer",
    "a tensor from the first call on",
    "a loss",
    "a setting of the loop",
]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.out = nn.ModuleList([Layer(kind) for _ in range(3)]), nn.Linear(WIDTH, 4)

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.out(x), target)
        return {"loss": loss + 0.1 * sum(layer.late for layer in self.layers) if self.layers[0].kind == "a loss" else loss}


def batch(number=0):
    made = torch.Generator().manual_seed(number)
    return {"x": torch.randn(128, WIDTH, generator=made), "target": torch.randint(0, 4, (128,), generator=made)}


def left(model):
    """What steps leave in the model."""
    layer = model.layers[1]
    late = None if layer.late is None else layer.late.detach().clone()
    return layer.count, len(layer.seen), layer.meter.calls, layer.mean, layer.average, late, *model.state_dict().values()


def train(kind, put=None):
    model = Net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    harness = put(model, optimizer) if put is not None else None
    losses = []
    for number in range(STEPS):
        for layer in model.layers:
            layer.settings["scale"] = 1.0 + 0.3 * number
        loss = model(**batch(number))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if harness is not None:
        harness.close()
    return losses, left(model)


def is_equal(a, b):
    alike = (torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a[1], b[1], strict=True))
    return a[0] == b[0] and all(alike)


def forced(action):
    """Every layer under an action, where it may be."""

    def put(model, optimizer):
        trace = holdall.trace(model, batch(), optimizer=optimizer)
        layers = [b for b in trace.blocks if b.kind == "Layer"]
        if action is Recompute:
            actions = [Recompute.of(trace, [b]) for b in layers if not recompute_obstacle(trace, [b])]
        else:
            actions = [Reschedule.samples_of(trace, [b])[0] for b in layers if not program_obstacle(trace, b)]
        plan = finish(Nop(), make_problem(trace, budget="1GiB", hardware=machine()), tuple(actions))
        return holdall.apply(plan, model, optimizer)

    return put


@pytest.mark.parametrize("kind", KINDS)
def test_every_action_computes_what_plain_training_computes(kind):
    plain = train(kind)
    for action in (Recompute, Reschedule):
        assert is_equal(train(kind, forced(action)), plain), action
    for budget in ("1GiB", "700KiB"):
        assert is_equal(train(kind, lambda m, o, b=budget: holdall.fit(m, o, batch(), budget=b, hardware=machine())), plain), (
            budget
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_leaves_no_trace(kind):
    model = Net(kind)
    before, attributes = left(model), Attributes(model)
    holdall.trace(model, batch())
    assert not attributes.changed()
    assert is_equal(([], left(model)), ([], before))


def test_what_can_be_restored_is_still_recomputed():
    """All but a tensor in place: of that there is no copy."""
    for kind in KINDS:
        trace = holdall.trace(Net(kind), batch())
        can = [b for b in trace.blocks if b.kind == "Layer" and not recompute_obstacle(trace, [b])]
        assert len(can) == (0 if kind == "a tensor in place" else 3), kind


class Momentum(nn.Module):
    """A second encoder follows the first by an average that the forward takes; a value makes the trace a real step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = (nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(2))
        self.key.requires_grad_(False)
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        with torch.no_grad():
            for a, b in zip(self.query.parameters(), self.key.parameters(), strict=True):
                b.mul_(0.9).add_(a, alpha=0.1)
            other = self.key(x).roll(int(self.place))
            self.place.add_(1).remainder_(len(x))
        return {"loss": F.mse_loss(self.query(x), other)}


def test_a_recorded_step_leaves_parameters_as_they_were():
    model = Momentum()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    trace = holdall.trace(model, {"x": torch.randn(16, 8)})
    assert trace.about.source == "eager"
    assert "key.0.weight" in trace.about.once
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


class Grows(nn.Module):
    """Counts its calls, and passes the budget in the second: the step is tried again."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.calls = nn.ModuleList([Layer("a count") for _ in range(4)]), 0

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean() / self.calls}


def test_a_retried_step_counts_once():
    def run(budget):
        model = Grows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        said = []
        harness = (
            holdall.fit(model, optimizer, {"x": torch.ones(256, WIDTH)}, budget=budget, hardware=machine(), allow={"recompute"})
            if budget
            else None
        )
        losses, kept = [], None
        for number in range(4):
            if number == 2:
                kept = torch.ones(25_000)  # what the loop holds from now on
            loss = model(x=torch.full((256, WIDTH), 1.0 + number))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if harness is not None:
            said = list(harness.notes)
            harness.close()
        del kept
        return losses, model.calls, said

    trace = holdall.trace(Grows(), {"x": torch.ones(256, WIDTH)}, optimizer="sgd")
    peak = holdall.plan(trace, planner="nop", budget="1GiB", hardware=machine()).predicted.peak["cpu"]
    plain, held = run(None), run(peak + 20_000)
    assert any("retried" in line for line in held[2])
    assert plain[:2] == held[:2]
