"""A step that runs out of memory is made again under a tighter plan, with the same bits; or the reason why not is said."""

import copy
import gc
import random
import weakref

import pytest
import torch
from torch import nn

import holdall
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.errors import OverBudget
from holdall.optim import in_backward
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.programs import program
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import machine


class Layer(nn.Module):
    """Dropout, and buffers that forward changes."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.norm(self.down(self.drop(torch.relu(self.up(x)))))


class Net(nn.Module):
    """`inside`: returns its loss; else its outputs."""

    def __init__(self, *, inside=True):
        super().__init__()
        self.layers = nn.ModuleList([Layer(8) for _ in range(4)])
        self.head = nn.Linear(8, 4)
        self.inside = inside
        self.register_buffer("calls", torch.zeros(()), persistent=True)

    def forward(self, x, y):
        self.calls = self.calls + 1  # replaced, not written to
        x = x * random.random()
        for layer in self.layers:
            x = layer(x)
        out = self.head(x)
        return nn.functional.cross_entropy(out, y) if self.inside else out


def data(steps=4):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        yield torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)


def loss_of(model, x, y):
    out = model(x, y)
    if isinstance(out, tuple):
        return out[0]
    return out if model.inside else nn.functional.cross_entropy(out, y)


def train(model, optimizer, *, before=lambda step: None, micro=1, steps=4):
    losses = []
    torch.manual_seed(0)
    random.seed(0)
    for step, (x, y) in enumerate(data(steps)):
        for part in range(micro):
            before((step, part) if micro > 1 else step)
            loss = loss_of(model, x, y)
            loss.backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, torch.rand(3), random.random()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def make(**options):
    torch.manual_seed(1)
    model = Net(**options).train()
    return model, copy.deepcopy(model)


def same(model, reference):
    state, other = model.state_dict(), reference.state_dict()
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in other)


class Fails:
    """Raises as a full device does, once or so often, at the n-th matrix product that a phase makes after `arm`."""

    def __init__(self, monkeypatch, phase, *, at=3, times=1, error=torch.OutOfMemoryError):
        self.left, self.times, self.at, self.error = 0, times, at, error
        self.phase, self.seen = phase, 0
        own = self

        class Sometimes(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                own.count("forward")
                return x.view_as(x)

            @staticmethod
            def backward(ctx, grad):
                own.count("backward")
                return grad

        plain = nn.functional.linear
        monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: plain(Sometimes.apply(x), w, b))

    def arm(self):
        self.left, self.seen = self.times, 0

    def count(self, phase):
        if phase == self.phase and self.left:
            self.seen += 1
            if self.seen == self.at:
                self.left -= 1
                self.seen = 0
                raise self.error("no more memory")


def fit(model, optimizer, **options):
    batch = next(data())
    loss = None if model.inside else lambda m, b: nn.functional.cross_entropy(m(*b), b[1])
    given = {"budget": "1GiB", "hardware": machine(), "allow": ["recompute"], **options}
    return holdall.fit(model, optimizer, batch, loss=loss, **given)


@pytest.mark.parametrize(
    ("phase", "inside", "error"),
    [
        ("forward", True, OverBudget),
        ("forward", False, torch.OutOfMemoryError),
        ("backward", True, torch.OutOfMemoryError),
        ("backward", False, OverBudget),
    ],
)
def test_a_step_that_runs_out_is_repeated_with_the_same_bits(monkeypatch, phase, inside, error):
    model, reference = make(inside=inside)
    expected = train(reference, adam(reference))
    optimizer = adam(model)
    with fit(model, optimizer) as harness:
        fails = Fails(monkeypatch, phase, error=error)
        got = train(model, optimizer, before=lambda step: fails.arm() if step == 1 else None)
        assert harness.plan.actions == ()  # the next step is back under its own plan
    assert fails.left == 0
    assert got[0] == expected[0]
    assert torch.equal(got[1], expected[1])
    assert got[2] == expected[2]
    assert same(model, reference)
    assert len(harness.notes) == 1
    assert f"out of memory in {phase}: the step was retried" in harness.notes[0]


def train_in_backward(model, optimizer, *, before=lambda step: None, **options):
    torch.manual_seed(0)
    random.seed(0)
    losses = []
    with in_backward(optimizer, **options):
        for step, (x, y) in enumerate(data()):
            before(step)
            loss = loss_of(model, x, y)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_gradients_that_are_held_for_their_norm_are_dropped_and_come_again(monkeypatch):
    """Those of the first try must neither count in the norm nor be added to."""
    model, reference = make()
    expected = train_in_backward(reference, sgd(reference), max_norm=0.5)
    optimizer = sgd(model)
    with fit(model, optimizer) as harness:
        fails = Fails(monkeypatch, "backward")
        got = train_in_backward(model, optimizer, max_norm=0.5, before=lambda step: fails.arm() if step == 1 else None)
    assert fails.left == 0 and len(harness.notes) == 1
    assert got == expected
    assert same(model, reference)


def test_a_step_whose_updates_were_begun_in_backward_is_not_repeated(monkeypatch):
    model, _ = make()
    optimizer = sgd(model)
    with fit(model, optimizer):
        fails = Fails(monkeypatch, "backward")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train_in_backward(model, optimizer, before=lambda step: fails.arm() if step == 1 else None)
    assert "parameters were already updated in this backward" in caught.value.__notes__[0]


class Plain(nn.Module):
    """One graph, from the batch to the loss."""

    inside = True

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x, y):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return nn.functional.cross_entropy(x, y)


class Beside(Plain):
    """Its logits beside the loss. One node makes both if the model runs by one program, and the logits' gradient is None."""

    def forward(self, x, y):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return nn.functional.cross_entropy(x, y), x


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", [Plain, Beside])
def test_a_plan_for_the_whole_model_is_left_in_the_middle_of_its_call(monkeypatch, kind, phase):
    """Such a plan is the model's forward itself, in whose place the repetition stands."""
    pytest.importorskip("scipy")
    torch.manual_seed(1)
    model = kind()
    reference = copy.deepcopy(model)
    expected = train(reference, adam(reference))
    optimizer = adam(model)
    trace = holdall.trace(model, next(data()), optimizer=optimizer)
    most = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    options = {"planner": "checkmate", "method": "lp", "scope": "model", "budget": most - 400, "allow": None}
    with fit(model, optimizer, **options) as harness:
        assert [a.block for a in harness.plan.actions] == [""]
        plain, left = getattr(program._Call, phase), [1]

        def sometimes(call, *args):
            if left and len(harness.all_peaks) == 1:
                left.clear()
                raise torch.OutOfMemoryError("no more memory")
            return plain(call, *args)

        monkeypatch.setattr(program._Call, phase, sometimes)
        got = train(model, optimizer)
    assert not left
    assert got[0] == expected[0] and same(model, reference)
    assert "the step was retried" in harness.notes[0]
    assert "forward" not in vars(model)


def long_step(model, x, y, *, hold):
    """One step; `hold`: as a loop that keeps the model's output beside the loss."""
    out = model(x, y)
    loss = out if model.inside else nn.functional.cross_entropy(out, y)
    kept = (out, loss) if hold else ()
    loss.backward()
    return loss, kept


@pytest.mark.parametrize("inside", [True, False], ids=["own loss", "loss outside"])
def test_a_batch_too_large_for_the_plan_fits_when_repeated(inside):
    """A real budget, at several levels: the ledger runs out in forward, or in backward with the first graph still held."""
    rows = 60
    x, y = torch.randn(rows, 8), torch.randint(0, 4, (rows,))
    model, _ = make(inside=inside)
    trace = holdall.trace(model, (x, y), optimizer=adam(model), loss=lambda m, b: loss_of(m, *b))
    whole = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    phases = set()
    for share in (0.75, 0.97):
        model, reference = make(inside=inside)
        optimizer = adam(model)
        budget = int(share * whole)
        with fit(model, optimizer, budget=budget) as harness:
            train(model, optimizer, steps=1)
            torch.manual_seed(3)
            random.seed(3)
            got, kept = long_step(model, x, y, hold=True)
            optimizer.step()
            optimizer.zero_grad()
            peak = harness.all_peaks[-1]
        phases |= {phase for phase in ("forward", "backward") if f"out of memory in {phase}" in " ".join(harness.notes)}
        optimizer = adam(reference)
        train(reference, optimizer, steps=1)
        torch.manual_seed(3)
        random.seed(3)
        expected, _ = long_step(reference, x, y, hold=False)
        optimizer.step()
        assert torch.equal(got, expected)
        assert same(model, reference)
        assert peak <= budget
        assert len(kept) == 2
    assert phases == {"forward", "backward"}


def refused(model, optimizer, monkeypatch, step, *, match, at=3, **options):
    """The run ends at the injected error, and the error says why it was not repeated."""
    with fit(model, optimizer, **options) as harness:
        fails = Fails(monkeypatch, "backward", at=at)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(fails)
    notes = " ".join(caught.value.__notes__)
    assert match in notes
    assert "In use: " in notes
    assert "Advice: " in notes
    assert not any("retried" in note for note in harness.notes)
    return caught.value


def test_gradients_that_were_added_to_are_not_repeated(monkeypatch):
    model, _ = make()
    optimizer = adam(model)

    def step(fails):
        train(model, optimizer, micro=2, before=lambda at: fails.arm() if at == (1, 1) else None)

    refused(model, optimizer, monkeypatch, step, match="added to gradients of an earlier one", accumulate=2)


def test_the_first_of_two_micro_batches_is_repeated(monkeypatch):
    model, reference = make()
    expected = train(reference, adam(reference), micro=2)
    optimizer = adam(model)
    with fit(model, optimizer, accumulate=2) as harness:
        fails = Fails(monkeypatch, "backward")
        got = train(model, optimizer, micro=2, before=lambda at: fails.arm() if at == (1, 0) else None)
    assert got[0] == expected[0]
    assert same(model, reference)
    assert len(harness.notes) == 1


def test_parameters_updated_in_backward_are_not_repeated(monkeypatch):
    model, _ = make()
    for p in model.parameters():

        def update(p):
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.01)
            p.grad = None

        p.register_post_accumulate_grad_hook(update)

    def step(fails):
        for x, y in data(2):
            fails.arm()
            model(x, y).backward()

    with fit(model, None) as harness:
        fails = Fails(monkeypatch, "backward")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            step(fails)
    assert "already updated in this backward" in caught.value.__notes__[0]
    assert harness.notes == []


def test_a_loss_that_reaches_parameters_past_the_outputs_is_not_repeated(monkeypatch):
    model, _ = make()

    def step(fails):
        x, y = next(data())
        loss = model(x, y) + 0.01 * model.head.weight.square().sum()
        fails.arm()
        loss.backward()

    refused(model, adam(model), monkeypatch, step, match="does not pass through the outputs")


def test_a_graph_that_is_kept_is_not_repeated(monkeypatch):
    model, _ = make()

    def step(fails):
        x, y = next(data())
        loss = model(x, y)
        fails.arm()
        loss.backward(retain_graph=True)

    refused(model, adam(model), monkeypatch, step, match="`retain_graph`")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_is_repeated_once(monkeypatch, phase):
    model, _ = make()
    optimizer = adam(model)
    with fit(model, optimizer):
        fails = Fails(monkeypatch, phase, times=2)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train(model, optimizer, before=lambda step: fails.arm() if step == 1 else None)
    assert "the tighter plan ran out of memory as well" in " ".join(caught.value.__notes__)


def test_a_plan_that_fails_twice_is_given_up(monkeypatch):
    model, reference = make()
    expected = train(reference, adam(reference))
    optimizer = adam(model)
    with fit(model, optimizer) as harness:
        fails = Fails(monkeypatch, "backward")
        got = train(model, optimizer, before=lambda step: fails.arm() if step in (0, 1) else None)
        assert harness.plan.actions != ()
    assert got[0] == expected[0]
    assert same(model, reference)
    assert "keep it" in harness.notes[-1]


@pytest.mark.parametrize(
    ("phase", "weights", "when"),
    [("forward", "streamed", "overlap_forward"), ("backward", "resident", "overlap_forward"), ("backward", "streamed", "step")],
)
def test_states_on_the_host_are_no_obstacle(monkeypatch, phase, weights, when):
    model, reference = make()
    expected = train(reference, adam(reference))
    optimizer = adam(model)
    trace = holdall.trace(model, next(data()), optimizer=optimizer)
    rows = {u.name: (weights if "layers" in u.name else "resident", "host") for u in trace.units}
    place = Place.of(trace, rows, when=when)
    layers = [b for b in trace.blocks if "layers" in b.name]
    plan = finish(Nop(), problem_for(trace), [place])
    tight = finish(Nop(), problem_for(trace), [*(Recompute.of(trace, [b]) for b in layers), place])
    with holdall.apply(plan, model, optimizer, enforce=False, tighten=lambda *_: tight) as harness:
        fails = Fails(monkeypatch, phase, at=4)
        got = train(model, optimizer, before=lambda step: fails.arm() if step == 2 else None)
    assert fails.left == 0
    assert len(harness.notes) == 1
    assert got[0] == expected[0]
    assert same(model, reference)


def left_behind(model):
    hooks = (
        model._forward_pre_hooks
        or model._forward_hooks
        or any({"forward", "_call_impl"} & m.__dict__.keys() for m in model.modules())
    )
    modes = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    return bool(hooks) or modes or torch.autograd.backward is not PLAIN


PLAIN = torch.autograd.backward


def test_nothing_is_left_behind_however_the_harness_is_left(monkeypatch):
    model, _ = make()
    optimizer = adam(model)
    harness = fit(model, optimizer)
    assert torch.autograd.backward is not PLAIN
    train(model, optimizer, steps=1)
    harness.close()
    assert not left_behind(model)

    with pytest.raises(KeyError), fit(model, optimizer):
        train(model, optimizer, steps=1)
        raise KeyError
    assert not left_behind(model)

    with fit(model, optimizer):
        fails = Fails(monkeypatch, "backward")
        train(model, optimizer, before=lambda step: fails.arm() if step == 1 else None)
    assert not left_behind(model)


def test_an_unclosed_harness_goes_with_its_model():
    model, _ = make()
    optimizer = adam(model)
    harness = fit(model, optimizer)
    train(model, optimizer, steps=1)
    gone = weakref.ref(harness)
    del harness, model, optimizer
    gc.collect()
    assert gone() is None
    assert torch.autograd.backward is PLAIN
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_two_harnesses_take_turns():
    (one, _), (two, _) = make(), make()
    first, second = fit(one, adam(one)), fit(two, adam(two))
    x, y = next(data())
    (one(x, y) + two(x, y)).backward()
    second.close()
    assert torch.autograd.backward is not PLAIN
    one(x, y).backward()
    first.close()
    assert torch.autograd.backward is PLAIN


def many(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(256, 8, generator=generator), torch.randint(0, 4, (256,), generator=generator)


def train_with_average(model, optimizer, steps=5):
    """A loop that keeps a moving average of the weights, which no trace knows of."""
    average = [p.detach().clone() for p in model.parameters()]
    random.seed(0)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(*many(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        losses.append(float(loss.detach()))
    return losses, average


@pytest.mark.parametrize(("planner", "share"), [("auto", 0.6), ("auto", 0.8), ("rotor", 0.7)])
def test_the_plan_after_a_retry_leaves_the_loop_what_it_holds_and_uses_the_rest(planner, share):
    model, reference = make()
    expected, means = train_with_average(reference, adam(reference))
    optimizer = adam(model)
    given = {"hardware": machine(), "allow": ["recompute", "offload"]}
    trace = holdall.trace(model, many(), optimizer=optimizer)
    whole = holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]
    wanted = holdall.plan(trace, planner=planner, budget=int(share * whole), **given)
    budget = wanted.predicted.peak["cpu"] + 64  # less than the average needs
    with holdall.fit(model, optimizer, many(), budget=budget, planner=planner, **given) as harness:
        got, averages = train_with_average(model, optimizer)
        measured = harness.report().measured.peak["cpu"]
    assert sum("retried" in note for note in harness.notes) == 1
    assert harness.plan.planner == planner
    assert got == expected
    assert all(map(torch.equal, averages, means))
    assert same(model, reference)
    assert max(harness.all_peaks) <= budget
    assert measured == pytest.approx(harness.plan.predicted.peak["cpu"], abs=64)
    assert measured >= (0.85 if planner == "auto" else 0.65) * budget  # rotor's next smaller plan is this much smaller
