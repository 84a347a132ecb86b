"""Blocks that run op by op have the ops that were traced; where they do not, that is known before the first step."""

import dataclasses

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.reschedule import obstacle, region
from holdall.fitting.captured import correct_blocks
from holdall.planning.menus import try_offered
from holdall.planning.to_programs import by_programs
from holdall.problem import make_problem
from holdall.runtime.programs.capture import capture
from holdall.testing.stand_ins import impossible
from holdall.testing.worlds import family, machine

WIDTH, ROWS = 32, 512


class ReturnsMore(nn.Module):
    """Returns weights that it has used and nobody else looks at, as attention does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weights = torch.softmax(self.a(x), -1)
        return x + self.b(weights * x), weights


class Gated(nn.Module):
    """Made to be added to what it reads: autograd's sum of the two gradients comes with its last op."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Constant(nn.Module):
    """Makes a tensor of a number in its forward."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.a(x)) * torch.tensor([0.5] * WIDTH)


class Odd(nn.Module):
    """A gradient in another layout than its parameter: autograd copies it when the block has handed it over."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(4, WIDTH // 4))

    def forward(self, x):
        shifted = torch.tanh(self.a(x)).view(-1, WIDTH // 4, 4) + self.bias.t()
        return x + shifted.reshape(-1, WIDTH)


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x) if isinstance(layer, Gated) else self.one(layer(x))
        return x.square().mean()

    def one(self, out):
        return out[0] if isinstance(out, tuple) else out


def setting(kind):
    torch.manual_seed(0)
    model = Stack(kind)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def sample():
    return (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)),)


def train(model, optimizer):
    seen = []
    for _ in range(3):
        loss = model(*sample())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen + [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def by_ops(model, optimizer):
    """A plan that runs every block op by op that can be, as the ops turn out to be when they are captured."""
    traced, given = holdall.api.trace_calls(model, sample(), optimizer=optimizer, loss=None)
    for _ in range(4):
        problem = make_problem(traced)
        made = by_programs(problem, holdall.plan(traced, planner="nop"))
        corrected = correct_blocks(traced, made, model, given, None)
        if corrected is None:
            return made, traced
        traced = corrected
    raise AssertionError("the trace is corrected over and over")


@pytest.mark.parametrize("kind", [ReturnsMore, Gated, Constant, Odd])
def test_a_captured_block_has_the_ops_that_were_traced(kind):
    model, optimizer = setting(kind)
    plan, traced = by_ops(model, optimizer)
    names = {a.block for a in plan.actions if a.name == "reschedule"}
    assert {"layers.0", "layers.1", "layers.2", "layers.3"} <= names
    expected = train(*setting(kind))
    with holdall.apply(plan, model, optimizer) as harness:
        assert same(train(model, optimizer), expected)
    report = harness.report()
    assert not report.notes  # nothing was recomputed whole instead
    assert abs(report.measured.peak["cpu"] - report.predicted.peak["cpu"]) <= 1024  # a few constants stay with the captures
    block = traced.block("layers.1")
    outside = set(traced.backward_of("layers.1")) - set(region(traced, block)[0])
    assert all(op.accumulates or op.id in block.beside for op in outside)


class Tempered(nn.Module):
    """Computes with a number that the loop changes."""

    def __init__(self):
        super().__init__()
        self.a, self.tau = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x):
        return x + torch.tanh(self.a(x) * self.tau)


def test_a_number_that_the_loop_changes_is_seen_by_a_captured_block():
    def cooled(model, optimizer):
        seen = []
        for step in range(3):
            for layer in model.layers:
                layer.tau = 1.0 / (1 + step)
            seen += train(model, optimizer)
        return seen

    model, optimizer = setting(Tempered)
    plan, _ = by_ops(model, optimizer)
    expected = cooled(*setting(Tempered))
    with holdall.apply(plan, model, optimizer, enforce=False):
        assert same(cooled(model, optimizer), expected)


class Undecided(nn.Module):
    """Takes another path when it is captured: nobody can run it by ops that were planned."""

    is_captured = False

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 4 * WIDTH)
        self.b = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        return x + self.b(torch.sin(y) if Undecided.is_captured else y)


def test_a_block_that_is_another_is_planned_without_a_program(monkeypatch):
    from holdall.fitting import captured

    def other(*args, **kwargs):
        Undecided.is_captured = True
        try:
            return capture(*args, **kwargs)
        finally:
            Undecided.is_captured = False

    monkeypatch.setattr(captured, "capture", other)
    model, optimizer = setting(Undecided)
    plan, traced = by_ops(model, optimizer)
    assert not any(a.name == "reschedule" and a.block.startswith("layers") for a in plan.actions)
    assert "other ops" in obstacle(traced, traced.block("layers.1"))
    expected = train(*setting(Undecided))
    with holdall.apply(plan, model, optimizer) as harness:
        assert same(train(model, optimizer), expected)
    assert harness.report().fits and not harness.notes


class Masked(nn.Module):
    """A stack whose first result is changed in place outside of its block, as SpecAugment does."""

    def __init__(self):
        super().__init__()
        self.project = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.fill = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList([Gated() for _ in range(3)])

    def forward(self, x):
        x = self.project(x.view(4, -1, WIDTH))
        x[:, :3] = self.fill
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def masked():
    torch.manual_seed(0)
    model = Masked()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_a_result_that_is_changed_in_place_does_not_hide_where_backward_begins():
    model, optimizer = masked()
    traced = holdall.trace(model, sample(), optimizer=optimizer)
    for block in traced.blocks:
        asked = [traced.saves[i].unpacked for i in block.saves if traced.saves[i].unpacked is not None]
        assert block.backward is not None and block.backward <= min(asked)
    last = traced.block("project.1")
    assert "changed in place" in obstacle(traced, last)
    peak = holdall.plan(traced, planner="nop").predicted.peak["cpu"]
    expected = train(*masked())
    with holdall.fit(model, optimizer, sample(), budget=int(0.6 * peak)) as harness:
        assert same(train(model, optimizer), expected)
    assert harness.report().fits


def test_a_candidate_that_cannot_be_carried_out_is_dropped():
    """With the reason among those of the plan; the search goes on."""
    model, optimizer = setting(Gated)
    traced = holdall.trace(model, sample(), optimizer=optimizer)
    peak = holdall.plan(traced, planner="nop").predicted.peak["cpu"]
    with impossible(lambda action: action.name == "place"):
        plan = holdall.plan(traced, budget=int(0.9 * peak))
    assert plan.actions and not any(a.name == "place" for a in plan.actions)
    assert any("cannot be carried out: place cannot" in reason for reason in plan.why)


def test_a_menu_leaves_out_what_cannot_be_carried_out():
    model, optimizer = setting(Gated)
    traced = holdall.trace(model, sample(), optimizer=optimizer)

    def labels():
        made = try_offered(make_problem(traced))
        return {line.choice.label for lines in made.found.values() for line in lines}

    assert any("offload" in label for label in labels())
    with impossible(lambda action: action.name == "offload"):
        found = labels()
    assert "recompute" in found and not any("offload" in label for label in found)


def test_what_is_known_of_blocks_is_saved_with_the_trace(tmp_path):
    model, optimizer = setting(ReturnsMore)
    traced = holdall.trace(model, sample(), optimizer=optimizer)
    changed = dataclasses.replace(traced.blocks[1], beside=(3,), apart="other ops")
    traced = dataclasses.replace(traced, blocks=(traced.blocks[0], changed, *traced.blocks[2:]))
    traced.save(tmp_path / "trace.json")
    assert holdall.Trace.load(tmp_path / "trace.json").blocks == traced.blocks
    assert traced.blocks[1].wanted == (0,)


def test_blocks_run_by_programs_under_a_recipe_too(recipe="fp8"):
    """They are captured with the recipe's layers: without those they have other ops, and no block would run by a program."""
    given = {"hardware": machine(), "allow": ["reschedule", "place"]}

    def trained(budget):
        torch.manual_seed(0)
        model, batch = family("tiny-llama")
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        with holdall.fit(model, optimizer, batch, budget={"cpu": budget}, precision=recipe, **given) as harness:
            for _ in range(3):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                del loss
        return losses, harness.plan

    model, batch = family("tiny-llama")
    traced = holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()), precision=recipe)
    budget = int(0.14 * holdall.plan(traced, planner="nop", hardware=machine()).predicted.peak["cpu"])
    planned = holdall.plan(traced, budget={"cpu": budget}, **given)
    assert "reschedule" in planned.count(), "nothing runs by a program: the test shows nothing"
    losses, plan = trained(budget)
    assert plan.count() == planned.count()
    assert losses == trained(10 * budget)[0]
