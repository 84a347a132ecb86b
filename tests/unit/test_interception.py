"""Calls of backward are seen by all who watch, each once, and torch has its own functions again, whoever leaves first."""

import copy
import gc
import itertools
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdall
from holdall.optim import in_backward
from holdall.optim._in_backward import clipping
from holdall.runtime.switching import backward_hook
from holdall.testing.worlds import machine
from holdall.updates.interception import Interception

METHOD, FUNCTION = torch.Tensor.backward, torch.autograd.backward


def is_restored():
    return torch.Tensor.backward is METHOD and torch.autograd.backward is FUNCTION


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    was_restored = is_restored()
    torch.Tensor.backward, torch.autograd.backward = METHOD, FUNCTION  # or one failure would be that of all
    assert was_restored


class Optimizer:
    """Watches the method as updates in backward do."""

    def __init__(self, heard, twice=()):
        self.heard, self.twice = heard, twice

    def begin(self):
        self.heard.append("begin")

    def end(self):
        self.heard.append("end")

    def wants_norm(self):
        return bool(self.twice)

    def gathering(self):
        return nullcontext()

    def params(self):
        return iter(self.twice)

    def watch(self):
        clipping.watch_backward(self)
        return lambda: clipping.unwatch_backward(self)


class Harness:
    """Watches the function as a harness does that repeats steps."""

    _latest, _is_inside = "a forward", False

    def __init__(self, heard):
        self.heard = heard

    def backward(self, original, tensors, grad_tensors, options):
        self.heard.append("function")
        original(tensors, grad_tensors, **options)

    def watch(self):
        return backward_hook.watch_backward(self)


def loss_of(weight):
    return (weight * weight).sum()


def leaf():
    return torch.ones(3, requires_grad=True)


ORDERS = list(itertools.permutations(range(2)))


@pytest.mark.parametrize("leaving", ORDERS)
@pytest.mark.parametrize("coming", ORDERS)
def test_both_at_once_hear_each_call_and_may_leave_in_any_order(coming, leaving):
    heard, weight = [], leaf()
    watchers = [Optimizer(heard), Harness(heard)]
    ends = {n: watchers[n].watch() for n in coming}
    assert torch.Tensor.backward is not METHOD and torch.autograd.backward is not FUNCTION
    loss_of(weight).backward()
    assert heard == ["begin", "function", "end"]
    torch.autograd.backward(loss_of(weight))  # past the method
    assert heard[3:] == ["function"]
    ends[leaving[0]]()
    assert (torch.Tensor.backward is METHOD, torch.autograd.backward is FUNCTION) == (leaving[0] == 0, leaving[0] == 1)
    loss_of(weight).backward()
    assert heard[4:] == (["function"] if leaving[0] == 0 else ["begin", "end"])
    ends[leaving[1]]()
    assert is_restored()
    loss_of(weight).backward()
    assert len(heard) == (5 if leaving[0] == 0 else 6)
    assert torch.equal(weight.grad, torch.full((3,), 8.0))


@pytest.mark.parametrize("kind", [Optimizer, Harness])
@pytest.mark.parametrize("leaving", ORDERS)
def test_two_of_a_kind_share_a_place(kind, leaving):
    watchers = [kind([]), kind([])]
    ends = [w.watch() for w in watchers]
    ends[leaving[0]]()
    ends[leaving[0]]()  # once more is no more
    assert not is_restored()
    heard = watchers[leaving[1]].heard
    loss_of(leaf()).backward()
    assert heard and not watchers[leaving[0]].heard
    ends[leaving[1]]()
    assert is_restored()


@pytest.mark.parametrize("kind", [Optimizer, Harness])
def test_who_is_collected_watches_no_more(kind):
    heard = []
    watcher = kind(heard)
    watcher.watch()
    del watcher
    gc.collect()
    loss_of(leaf()).backward()
    assert heard == []
    (backward_hook if kind is Harness else clipping).unwatch_backward()
    assert is_restored()


@pytest.mark.parametrize("leaving", ORDERS)
def test_an_error_goes_through_both_and_the_next_call_is_heard_as_before(leaving):
    heard, weight = [], leaf()
    watchers = [Optimizer(heard), Harness(heard)]
    ends = [w.watch() for w in watchers]
    error, loss = KeyError("mine"), loss_of(weight)

    def fail(grad):
        raise error

    loss.register_hook(fail)
    with pytest.raises(KeyError) as caught:
        loss.backward()
    assert caught.value is error
    assert heard == ["begin", "function"]
    loss_of(weight).backward()
    assert heard[2:] == ["begin", "function", "end"]
    for n in leaving:
        ends[n]()
    assert is_restored()


class Kind(torch.Tensor):
    """Handed around by torch: its default `__torch_function__` calls what it is given again."""


@pytest.mark.parametrize("asked", ["mode", "subclass"])
def test_a_call_that_torch_hands_around_is_one_call(asked):
    """Modes (a default device is one) and subclasses are asked first, and call again by the name that is watched."""
    heard, weight = [], leaf()
    watchers = [Optimizer(heard), Harness(heard)]
    ends = [w.watch() for w in watchers]
    with torch.device("cpu") if asked == "mode" else nullcontext():
        loss = loss_of(weight)
        (loss if asked == "mode" else loss.as_subclass(Kind)).backward()
    assert heard == ["begin", "function", "end"]
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    for end in ends:
        end()


def test_a_walk_for_the_norm_is_one_walk_though_torch_hands_it_around():
    heard, weight = [], leaf()
    watchers = [Optimizer(heard, twice=(weight,)), Harness(heard)]
    ends = [w.watch() for w in watchers]
    with torch.device("cpu"):
        loss_of(weight).backward()
    assert heard == ["begin", "function", "function", "end"]
    for end in ends:
        end()


def test_a_backward_inside_a_backward_is_its_own_call_and_not_the_loops():
    heard, weight = [], leaf()
    watchers = [Optimizer(heard), Harness(heard)]
    ends = [w.watch() for w in watchers]
    checkpoint(loss_of, weight, use_reentrant=True).backward()
    assert heard == ["begin", "function", "function", "end"]
    for end in ends:
        end()


class Place:
    """Has a function, as torch has."""

    def __init__(self):
        self.calls = []
        self.function = self.own = lambda *args: self.calls.append(args)


class Hears:
    """Somebody who may be weakly known."""


def interception(place, heard, name):
    def through(original, watching, *args):
        heard.append(name)
        original(*args)

    return Interception(place, "function", through)


@pytest.mark.parametrize("leaving", list(itertools.permutations(range(3))))
def test_several_in_one_place_leave_in_any_order(leaving):
    place, heard, people = Place(), [], [Hears() for _ in range(3)]
    there = [interception(place, heard, n) for n in range(3)]
    for n in range(3):
        there[n].watch(people[n])
    place.function("a")
    assert heard == [2, 1, 0] and place.calls == [("a",)]
    left = [2, 1, 0]
    for n in leaving:
        there[n].unwatch(people[n])
        left.remove(n)
        heard.clear()
        place.function("b")
        assert heard == left
    assert place.function is place.own and len(place.calls) == 4


def stranger(place, heard):
    before = place.function

    def function(*args):
        heard.append("stranger")
        before(*args)

    place.function = function
    return before


def test_somebody_elses_function_in_front_is_left_alone():
    place, heard, one = Place(), [], Hears()
    ours = interception(place, heard, "ours")
    ours.watch(one)
    before = stranger(place, heard)
    his = place.function
    place.function()
    ours.unwatch(one)
    assert place.function is his
    place.function()
    assert heard == ["stranger", "ours", "stranger"]  # ours, below, only hands on
    ours.watch(one)
    place.function()
    assert heard[3:] == ["ours", "stranger"]  # not twice
    ours.unwatch(one)
    assert place.function is his
    place.function = before  # he leaves last, and puts back what he found
    ours.watch(one)
    ours.unwatch(one)
    assert place.function is place.own


def test_somebody_elses_function_below_is_what_comes_back():
    place, heard, one = Place(), [], Hears()
    stranger(place, heard)
    his = place.function
    ours = interception(place, heard, "ours")
    ours.watch(one)
    place.function()
    assert heard == ["ours", "stranger"]
    ours.unwatch(one)
    assert place.function is his


def test_who_watches_after_ours_was_overwritten_is_heard():
    place, heard, one = Place(), [], Hears()
    ours = interception(place, heard, "ours")
    ours.watch(one)
    place.function = place.own  # by somebody who put back what he had found earlier
    ours.unwatch(one)
    ours.watch(one)
    place.function()
    assert heard == ["ours"]
    ours.unwatch(one)
    assert place.function is place.own


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def train(model, optimizer):
    """Two backwards per step."""
    torch.manual_seed(1)
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("around", [nullcontext, lambda: torch.device("cpu")], ids=["plain", "mode"])
@pytest.mark.parametrize("first", ["harness", "updates"])
def test_a_harness_and_updates_in_backward_together_keep_the_bits_and_leave_in_any_order(first, around):
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    with in_backward(other, max_norm=0.01, accumulate=2):
        train(reference, other)
    trace = holdall.trace(model, torch.randn(4, 8), optimizer=optimizer)
    plan = holdall.plan(trace, planner="nop", hardware=machine())
    with around():
        harness, updates = holdall.apply(plan, model, optimizer, enforce=False, tighten=lambda *_: None), ExitStack()
        updates.enter_context(in_backward(optimizer, max_norm=0.01, accumulate=2))
        train(model, optimizer)
        ends = [harness.close, updates.close]
        for end in ends if first == "harness" else ends[::-1]:
            assert not is_restored()
            end()
    assert is_restored()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
