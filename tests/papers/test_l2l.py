"""L2L (arXiv 2002.05645): one layer at a time on the device; layer-major accumulation against the plain one."""

import copy
import random
from itertools import pairwise

import pytest
import torch
from torch import nn

import holdall
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.l2l import hiding, seconds
from holdall.planners.stronghold import Times
from holdall.testing.chaos import chaos
from holdall.testing.placed import (
    FAMILIES,
    adamw,
    check_fit,
    check_under,
    place_of,
    rolled,
    rows_of,
    trace_of,
)
from holdall.testing.stand_ins import planned_for
from holdall.testing.worlds import family, machine
from holdall.tracing.step import default_loss
from holdall.training.layer_major import LayerMajor


def planned(name, **options):
    return holdall.plan(trace_of(name), planner="l2l", hardware=machine(overlap=True), **options)


# the placement


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stash", ["device", "host"])
def test_steps_are_those_of_plain_training_with_the_predicted_bytes(name, stash):
    plan = planned(name, stash=stash)
    assert set(rows_of(plan).values()) <= {("streamed", "host"), ("resident", "host")}
    assert ("offload" in plan.count()) == (stash == "host")
    check_under(plan, name)


@pytest.mark.parametrize("name", ["tiny-llama", "convnet"])
def test_the_eager_server_updates_in_backward_where_the_loop_does_not_clip(name):
    assert place_of(planned(name, reads_gradients=False)).when == "backward"
    assert place_of(planned(name, reads_gradients=False, eager=False)).when == "step"
    check_under(planned(name, reads_gradients=False, stash="host"), name, clip=None, around=chaos(seed=5))


def test_late_copies_change_nothing():
    check_under(planned("tiny-gpt2", stash="host"), "tiny-gpt2", around=chaos(seed=4))


def test_every_layer_is_loaded_twice_and_two_are_there_at_once():
    trace, plan = trace_of("tiny-llama"), planned("tiny-llama", stash="device")
    size = {u.name: sum(trace.tensors[x].nbytes for x in u.weights) for u in trace.units}
    streamed = [size[unit] for unit, (weights, _) in rows_of(plan).items() if weights == "streamed"]
    assert len(streamed) >= 4
    assert plan.predicted.traffic["far->cpu"] == pytest.approx(2 * sum(streamed), rel=0.05)
    held = sum(h.nbytes for h in plan.predicted.at_peak if h.kind.value == "param")
    assert held <= max(a + b for a, b in pairwise([*streamed, 0])) * 1.05


def test_the_stash_goes_to_the_host_where_the_device_has_no_room_for_it():
    model, batch = deep(8)
    trace = holdall.trace(model, (batch,), optimizer=adamw(model))

    def planned_for_deep(**options):
        return holdall.plan(trace, planner="l2l", hardware=machine(overlap=True), **options)

    here, there = (planned_for_deep(stash=stash).predicted for stash in ("device", "host"))
    assert there.peak["cpu"] < here.peak["cpu"]
    assert "offload" in planned_for_deep(budget=there.peak["cpu"]).count()
    assert "offload" not in planned_for_deep(budget=here.peak["cpu"]).count()


def test_fit_takes_it_by_name():
    with planned_for(machine()):
        plan = check_fit("convnet", "1GiB", "l2l", stash="host")
    assert plan.count()["offload"] >= 4


def test_wrong_options_are_refused():
    with pytest.raises(InvalidInput, match="stash"):
        planned("convnet", stash="attic")
    with pytest.raises(InvalidInput, match="stash"):
        LayerMajor(*family("convnet"), stash="attic")
    several = planned("convnet", accumulate=4)
    assert any("LayerMajor" in line for line in several.why)
    assert place_of(planned("convnet")).share and not place_of(several).share  # a gradient cannot take the weights' place


# layer-major accumulation


def without_dropout(name, dtype=torch.float32):
    model, batch = family(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(dtype), batch


class Perceptron(nn.Module):
    """A block of a trace; of an `nn.Sequential` every member would be one, with the activation left between two of them."""

    def __init__(self, width, outside):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.outside = outside

    def forward(self, x):
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y if self.outside else x + y


class Deep(nn.Module):
    """So many equal layers; `outside`: with residuals around them, not in them."""

    def __init__(self, layers, width=32, outside=False):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.outside = outside
        self.layers = nn.ModuleList(Perceptron(width, outside) for _ in range(layers))
        self.head = nn.Linear(width, 40)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x) if self.outside else layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def deep(layers=6, **options):
    torch.manual_seed(0)
    return Deep(layers, **options), torch.randint(0, 40, (4, 24), generator=torch.Generator().manual_seed(2))


def accumulated(model, batches):
    losses = []
    for batch in batches:
        loss = default_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("name", [*FAMILIES, "outside"])
def test_gradients_are_those_of_plain_accumulation(name, stash):
    """Check (1): losses, gradients and buffers bit for bit; of a weight that is used before and after the layers, to 1e-6."""
    model, batch = deep(outside=True) if name == "outside" else without_dropout(name)
    batches = rolled((batch,) if name == "outside" else batch, 4)
    plain = copy.deepcopy(model)
    expected = accumulated(plain, batches)
    with LayerMajor(model, batches[0], stash=stash) as run:
        assert [loss.item() for loss in run(batches)] == expected
    grads = {n: p.grad for n, p in model.named_parameters()}  # which stay when it is closed
    tied = {"transformer.wte.weight"}
    for n, p in plain.named_parameters():
        assert torch.equal(grads[n], p.grad) or (n in tied and (grads[n] - p.grad).abs().max() <= 1e-6), n
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_in_float64_too_and_a_second_call_adds_to_the_gradients():
    model, batch = deep()
    model, batches = model.double(), rolled((batch,), 4)
    plain = copy.deepcopy(model)
    expected = accumulated(plain, batches)
    with LayerMajor(model, batches[0]) as run:
        assert [loss.item() for loss in [*run(batches[:2]), *run(batches[2:])]] == expected
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_layers_are_loaded_twice_in_a_step_whatever_the_number_of_micro_batches(count):
    """Check (2): 2N loads, less the one of the last layer, which is there when backward begins; gradients leave once."""
    model, batch = deep()
    own = sum(p.nbytes for layer in model.layers for p in layer.parameters())
    with LayerMajor(model, (batch,)) as run:
        run(rolled((batch,), count))
        layers = len(run.layers)
        assert run.loads == 2 * layers - 1 and layers >= 6
        loaded, sent = run.store.fetched, run.store.sent
        run(rolled((batch,), count))
        assert run.loads == 2 * (2 * layers - 1)
        assert run.store.fetched == 2 * loaded and run.store.sent == 2 * sent
        assert own <= sent <= 1.2 * own + sum(p.nbytes for p in (*model.embed.parameters(), *model.head.parameters()))


def test_memory_does_not_grow_with_depth_where_inputs_wait_on_the_host():
    """Check (3): 8 against 32 layers within 5 %; with inputs on the device it grows."""
    peaks = {}
    for stash in ("host", "device"):
        for layers in (8, 32):
            model, batch = deep(layers)
            with LayerMajor(model, (batch,), stash=stash, measure=True) as run:
                run(rolled((batch,), 2))
            peaks[stash, layers] = run.peaks[-1]
    assert peaks["host", 32] < 1.05 * peaks["host", 8]
    assert peaks["device", 32] > 1.5 * peaks["device", 8]


@pytest.mark.parametrize("around", [None, 3], ids=["calm", "chaos"])
def test_the_eager_server_trains_to_the_same_bits(around):
    """Each layer is updated beside the backward of the one before: losses and weights are those of `step` after backward."""
    model, batch = without_dropout("tiny-llama")
    batches = rolled(batch, 3)
    plain = copy.deepcopy(model)
    theirs, mine = adamw(plain), adamw(model)
    expected = []
    for _ in range(3):
        expected.append(accumulated(plain, batches))
        theirs.step()
        theirs.zero_grad()
    with chaos(seed=around or 0) if around else torch.enable_grad(), LayerMajor(model, batch, optimizer=mine) as run:
        assert [[loss.item() for loss in run(batches)] for _ in range(3)] == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_layers_dropout_is_the_same_when_it_is_run_again():
    """The gradient is that of the losses it comes with: a step along it changes their sum as it says."""
    model, batch = family("tied")
    model.double()
    batches = rolled(batch, 3)
    with LayerMajor(model, batch, stash="host") as run:
        torch.manual_seed(5)
        before = sum(run(batches))
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.sub_(g, alpha=1e-6)
        torch.manual_seed(5)
        after = sum(run(batches))
    assert (before - after).item() == pytest.approx(1e-6 * sum(g.square().sum().item() for g in grads), rel=1e-3)


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        return (self.third(self.second(y)) + y).sum()


def test_what_is_not_a_sequence_of_layers_is_refused_and_everything_is_put_back():
    model = Skips()
    before = [p.detach().clone() for p in model.parameters()]
    with LayerMajor(model, (torch.ones(2, 8),)) as run, pytest.raises(Unsupported, match="not a sequence"):
        run([(torch.ones(2, 8),)] * 2)
    assert run.store.used == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert "forward" not in model.first.__dict__ and not run.is_ending
    model(torch.ones(2, 8)).backward()


@pytest.mark.parametrize("seed", range(3))
def test_layer_major_order_is_never_slower_and_as_fast_on_an_endless_link(seed):
    """Check (4), for random layers and every bandwidth; with as many micro-batches as `hiding` says, only the first load
    is waited for.
    """
    rng = random.Random(seed)
    for _ in range(50):
        count, micro = rng.randint(1, 8), rng.randint(1, 8)
        forward = tuple(rng.uniform(0.1, 1) for _ in range(count))
        backward, size = tuple(3 * f for f in forward), [rng.uniform(0.1, 1) for _ in range(count)]
        compute = micro * (sum(forward) + sum(backward))
        for rate in (0.01, 0.1, 1.0, 10.0, 1e12):
            times = Times(forward=forward, backward=backward, load=tuple(s / rate for s in size), unload=(0.0,) * count)
            ours, theirs = (seconds(times, micro, layer_major=way) for way in (True, False))
            assert compute <= ours <= theirs * (1 + 1e-9)
            if rate == 1e12:
                assert ours == pytest.approx(theirs, rel=1e-9)
            least = hiding(times)
            if count >= 2 and least < 10_000:
                hidden = least * (sum(forward) + sum(backward)) + times.load[0]
                assert seconds(times, least, layer_major=True) == pytest.approx(hidden, rel=1e-9)


def test_two_slots_hold_a_load_back_and_the_first_load_hides_behind_nothing():
    """By hand: the third layer's load waits until the first layer's slot is free, at 11; it is there at 16."""
    times = Times(forward=(10.0, 1.0, 1.0), backward=(0.0, 0.0, 0.0), load=(1.0, 1.0, 5.0), unload=(0.0,) * 3)
    assert seconds(times, 1, layer_major=True) == seconds(times, 1, layer_major=False) == 23.0
    times = Times(forward=(1.0, 2.0), backward=(2.0, 4.0), load=(100.0, 1.0), unload=(0.0, 0.0))
    assert hiding(times) == 25  # 100 s of load behind 4 s of the second layer's backward
