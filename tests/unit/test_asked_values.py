"""Values that a step asks for while it is traced: drawn numbers, masks, counts."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import holdall
from holdall.actions.reschedule import obstacle
from holdall.tracing.values.known import KnownValues


class Dropping(nn.Module):
    """Skips a layer now and then, as OPT and Whisper do."""

    def __init__(self, often, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.often, self.draw = often, draw

    def forward(self, x):
        for layer in self.layers:
            if self.draw() < self.often:
                continue
            x = layer(x).relu()
        return x.square().mean()


DRAWS = {
    "rand": lambda: torch.rand([]),
    "one of a list": lambda: torch.rand(1),
    "uniform": lambda: torch.empty(()).uniform_(0, 1),
    "item": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_that_are_dropped_at_random_are_all_in_the_trace(draw, device):
    model = Dropping(0.9, DRAWS[draw])
    batch, before = torch.randn(2, 8), torch.get_rng_state()
    trace = holdall.trace(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device=device)
    assert torch.equal(before, torch.get_rng_state())
    assert trace.about.source == "fake"
    assert [b.module for b in trace.blocks] == [f"layers.{n}" for n in range(4)]
    assert not any(
        "reads a tensor's value" in obstacle(trace, block) for block in trace.blocks
    )  # the model does, its layers do not


def test_also_where_a_real_step_is_watched():
    class Watched(Dropping):
        def forward(self, x):
            loss = super().forward(x)
            return loss * 2 if loss > 0 else loss

    trace = holdall.trace(Watched(0.9, DRAWS["rand"]), torch.randn(2, 8))
    assert trace.about.source == "eager"
    assert [b.module for b in trace.blocks] == [f"layers.{n}" for n in range(4)]


def test_a_layer_that_asks_is_not_run_op_by_op():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(8, 8)

        def forward(self, x):
            return self.inside(x) if torch.rand([]) >= 0.0 else x

    model = nn.Sequential(Asking(), Asking(), nn.Linear(8, 1))
    trace = holdall.trace(model, torch.randn(2, 8), loss=lambda m, b: m(b).mean())
    assert ["reads a tensor's value" in obstacle(trace, block) for block in trace.blocks] == [True, True, False]


class Choosing(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.choose, self.inner, self.outer = choose, nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, mask):
        return self.outer(self.choose(self.inner(x), mask)).square().mean()


CHOICES = {
    "index": lambda x, mask: x[mask],
    "index of some": lambda x, mask: x[:, mask.any(0)],
    "select": lambda x, mask: x.masked_select(mask[..., None]).view(-1, 8),
    "gather": lambda x, mask: x.flatten(0, 1).gather(0, mask.flatten().nonzero().expand(-1, 8)),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_what_a_mask_of_the_batch_chooses_is_as_large_as_in_the_run(choice):
    torch.manual_seed(0)
    model = Choosing(CHOICES[choice])
    mask = torch.rand(3, 5) < 0.3
    x = torch.randn(3, 5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = holdall.trace(model, (x, mask), optimizer=optimizer)
    assert trace.about.source == "fake"
    assert 1 in trace.about.looked_at
    rows = CHOICES[choice](torch.zeros(3, 5, 8), mask).shape
    assert any(t.shape == rows for t in trace.tensors.values())
    plan = holdall.plan(trace, planner="nop")
    with holdall.apply(plan, model, optimizer) as harness:
        for _ in range(2):
            model(x, mask).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


def test_what_is_chosen_is_on_the_device_of_what_it_is_chosen_from():
    """DeBERTa's loss gathers the rows that have a label."""
    labels = torch.tensor([1, -1, 0])
    with FakeTensorMode() as mode:
        fake = torch.empty(3, dtype=torch.long, device="cuda")
        known = KnownValues(mode)
        known.tell(fake, labels, 0)
        has_label = known.run(torch.ops.aten.ge.Scalar, (fake, 0), {})
        rows = known.run(torch.ops.aten.nonzero.default, (has_label,), {})
    assert rows.device.type == "cuda" and rows.shape == (2, 1) and known.looked_at == {0}


def test_counts_of_numbers_below_a_given_one_have_its_length():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(4, 6)

        def forward(self, x):
            scores = self.router(x)
            share = torch.bincount(scores.argmax(-1), minlength=6) / len(x)
            return (scores.softmax(-1).mean(0) * share).sum()

    trace = holdall.trace(Counting(), torch.randn(5, 4))
    assert trace.about.source == "fake"
    made = [t for t in trace.tensors.values() if "bincount" in t.name]
    assert [t.shape for t in made] == [(6,)]


def test_random_integers_that_a_step_asks_for():
    class Cropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            first = int(torch.randint(0, 3, ()))
            return self.inner(x[:, first : first + 2]).mean()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = Cropping()
    torch.set_rng_state(before)
    trace = holdall.trace(model, torch.ones(2, 5, 4))
    assert trace.about.source == "fake"
    assert torch.equal(before, torch.get_rng_state())
