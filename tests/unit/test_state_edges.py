"""What loops do besides stepping, while model states are placed: each is done with and without a plan, and must be the same."""

import copy
import ctypes
import os
import pickle
import threading
import time
from collections import Counter
from functools import cache

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode

import holdall
from holdall.actions.place import Place, streamable
from holdall.errors import Infeasible, OverBudget, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.harness import Harness
from holdall.testing.contracts import problem_for
from holdall.testing.stand_ins import failing_updates
from holdall.testing.states import Layer, differences, place_of
from holdall.testing.worlds import family, far_used, machine
from holdall.tiers.far import Far
from holdall.types import Problem
from holdall.units import format_bytes

pytestmark = pytest.mark.usefixtures("no_modes_left")

PLACES = ["host step", "host overlap_forward", "via_device step", "streamed overlap_forward", "mixed overlap_forward"]
every_place = pytest.mark.parametrize("place", PLACES)


def known(reason):
    """A fault of today, to be repaired; the mark goes with it."""
    return pytest.mark.xfail(strict=True, reason=reason)


def cases(values, failing, reason):
    """Values for `parametrize`, those in `failing` marked."""
    marks = {False: (), True: known(reason)}
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks[v in failing]) for v in values]


class Net(torch.nn.Module):
    """Five units; `tied`: four, for the head is the embedding."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.head = torch.nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def net(tied=False):
    torch.manual_seed(0)
    return Net(tied)


def tied():
    return net(tied=True)


def frozen():
    """A wholly frozen block, and one of which a part is."""
    model = net()
    for p in (*model.embed.parameters(), *model.layers[1].parameters(), model.layers[2].up.weight):
        p.requires_grad_(False)
    return model


def adapted():
    """What is trained has its gradient before backward is through with the frozen weights beside it."""
    model = net().requires_grad_(False)
    for layer in model.layers:
        layer.down.requires_grad_(True)
    return model


def with_spare():
    """A parameter that no forward uses, inside of a block, and a module of such."""
    model = net()
    model.layers[1].spare = torch.nn.Parameter(torch.ones(5))
    model.unused = torch.nn.Linear(8, 8)
    return model


def ids(n=0, rows=2):
    return torch.randint(0, 16, (rows, 4), generator=torch.Generator().manual_seed(n))


def adamw(model):
    """Of all parameters, frozen ones too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def adamw_in_groups(model):
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


@cache
def traced(make):
    """(model, trace); the model is to be copied."""
    model = make()
    return model, holdall.trace(model, ids(), optimizer=adamw(model))


@cache
def planned(make, place):
    trace = traced(make)[1]
    return finish(Nop(), problem_for(trace), [place_of(trace, place)])


def applied(make, place, model, optimizer):
    return holdall.apply(planned(make, place), model, optimizer, enforce=False)


def fresh(make, optimize=adamw):
    model = copy.deepcopy(traced(make)[0])
    return model, optimize(model)


def states(model, optimizer):
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def backward(model, n=0):
    torch.manual_seed(n)
    loss = model(ids(n))
    loss.backward()
    return loss.item()


def step(model, optimizer, n):
    """One plain step, clipped."""
    seen = [backward(model, n), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
    optimizer.step()
    optimizer.zero_grad()
    return seen


def steps(model, optimizer, first=0, last=3):
    return [step(model, optimizer, n) for n in range(first, last)]


def assert_the_same(make, place, loop, optimize=adamw):
    """The loop with and without a plan: what it saw, and all states, from inside and after."""
    reference, plain = fresh(make, optimize)
    expected = loop(reference, plain), states(reference, plain)
    model, optimizer = fresh(make, optimize)
    with applied(make, place, model, optimizer):
        seen = loop(model, optimizer)
        inside = states(model, optimizer)
    assert differences((seen, inside), expected) == []
    assert differences(states(model, optimizer), expected[1]) == []


def assert_the_same_or_refused(make, place, loop):
    """What is not done as plain training does it is refused, with a hint."""
    try:
        assert_the_same(make, place, loop)
    except Unsupported as refused:
        assert refused.hint


# models


@every_place
def test_tied_weights_are_one_parameter_throughout(place):
    def loop(model, optimizer):
        seen = steps(model, optimizer)
        assert model.head.weight is model.embed.weight
        return seen

    assert_the_same(tied, place, loop)


@pytest.mark.parametrize(("make", "place"), [(make, place) for make in (frozen, adapted) for place in PLACES])
def test_frozen_weights_stay_and_the_others_train(make, place):
    def loop(model, optimizer):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        seen = steps(model, optimizer)
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert changed == {n for n, p in model.named_parameters() if p.requires_grad}
        return seen

    assert_the_same(make, place, loop)


@pytest.mark.parametrize(
    ("make", "place"),
    cases(
        [(make, place) for make in (frozen, adapted) for place in PLACES],
        [],
        "",
    ),
)
def test_frozen_weights_stay_where_gradients_are_summed(make, place):
    """Sums take memory that was given back in between."""

    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen += [backward(model, n), backward(model, n + 5)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(make, place, loop)


@cache
def lora():
    """(model, batch, trace) with adapters by PEFT, of which alone the optimizer knows."""
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    base, batch = family("tiny-llama")
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)).train()
    return model, batch, holdall.trace(model, batch, optimizer=of_trained(model))


def of_trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("place", PLACES)
def test_lora_trains_the_adapters_and_leaves_the_model(place):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    start, batch, trace = lora()
    model, reference = copy.deepcopy(start), copy.deepcopy(start)
    optimizer, plain = of_trained(model), of_trained(reference)
    with holdall.apply(finish(Nop(), problem_for(trace), [place_of(trace, place)]), model, optimizer):
        seen = loop(model, optimizer)
    assert seen == loop(reference, plain)
    assert len(set(seen)) == 3
    assert differences(states(model, optimizer), states(reference, plain)) == []


@every_place
def test_parameters_that_get_no_gradient_stay_as_they_are(place):
    def loop(model, optimizer):
        seen = steps(model, optimizer)
        assert torch.equal(model.layers[1].spare, torch.ones(5))
        assert model.layers[1].spare not in optimizer.state
        return seen

    assert_the_same(with_spare, place, loop)


# between steps


@pytest.mark.parametrize(
    "place", ["host overlap_forward", "streamed overlap_forward", "mixed overlap_forward", "host backward"]
)
def test_every_parameter_is_updated_by_its_own_group_whenever_its_update_runs(place, slow_host):
    """The hook holds the user's step back after it has begun, so that updates on the host run within it."""

    def loop(model, optimizer):
        handle = optimizer.register_step_pre_hook(lambda *_: time.sleep(0.08))
        seen = []
        for n in range(2):
            seen.append(backward(model, n))
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        return seen

    assert_the_same(net, place, loop, adamw_in_groups)


@every_place
def test_evaluation_between_steps_sees_the_new_weights(place, slow_host):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen.append(step(model, optimizer, n))
            model.eval()
            with torch.no_grad():
                seen.append(model(ids(9)).item())
            seen += [p.sum().item() for p in model.parameters()]
            model.train()
        with torch.inference_mode():
            seen.append(model.eval()(ids(9)).item())
        return seen

    assert_the_same(net, place, loop)


READS = {
    "clone": lambda p: p.detach().clone(),
    "sum": lambda p: p.sum().item(),
    "data": lambda p: p.data.abs().max().item(),
    "print": repr,
    "index": lambda p: p.flatten()[0].item(),
    "copy": lambda p: copy.deepcopy(p).detach(),
    "to": lambda p: p.detach().to(torch.float64),
    "numpy": lambda p: p.detach().numpy().copy().tolist(),
    "list": lambda p: p.tolist(),
    "data numpy": lambda p: p.data.numpy().copy().tolist(),
    "string": lambda p: f"{p} {p.data}",
    "float": lambda p: float(p.detach().flatten()[0]),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).detach(),
    "array": lambda p: numpy.array(p.detach()).tolist(),
    "address": lambda p: ctypes.cast(p.data_ptr(), ctypes.POINTER(ctypes.c_float))[0],
    "storage": lambda p: [p.untyped_storage()[p.storage_offset() * 4 + k] for k in range(min(64, p.nbytes))],
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "format": lambda p: f"{p.detach()!s:>9}",
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", ["host overlap_forward", "mixed overlap_forward"])
def test_a_parameter_read_right_after_the_step_is_the_new_one(place, read, slow_host):
    def loop(model, optimizer):
        seen = []
        for n in range(2):
            backward(model, n)
            optimizer.step()
            seen.append([READS[read](p) for p in reversed(list(model.parameters()))])
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


@pytest.mark.parametrize("place", PLACES)
def test_states_of_the_optimizer_read_right_after_the_step_are_the_new_ones(place, slow_host):
    def loop(model, optimizer):
        seen = []
        for n in range(2):
            backward(model, n)
            optimizer.step()
            seen.append([optimizer.state[p]["exp_avg"].clone() for p in model.parameters()])
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


@pytest.mark.parametrize("place", PLACES)
def test_weights_changed_in_place_between_steps_are_used(place, slow_host):
    """Clamping, renormalising, averaging: the loop writes into its parameters."""

    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen.append(step(model, optimizer, n))
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.3, 0.3)
        return seen

    assert_the_same(net, place, loop)


@every_place
def test_a_forward_without_a_backward_is_forgotten(place):
    def loop(model, optimizer):
        seen = [step(model, optimizer, 0), model(ids(7)).item()]
        return seen + steps(model, optimizer, 1, 3)

    assert_the_same(net, place, loop)


@every_place
def test_two_forwards_may_share_one_backward(place):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            loss = model(ids(n)) + 2 * model(ids(n + 10))
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


@every_place
def test_a_batch_of_another_size_is_the_same(place):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            loss = model(ids(n, rows=n + 1))
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


@every_place
def test_autocast_is_the_same(place):
    def loop(model, optimizer):
        seen = []
        for n in range(2):
            torch.manual_seed(n)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(ids(n))
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


# gradients between backward and step


@every_place
def test_gradients_can_be_read_and_printed(place):
    def loop(model, optimizer):
        seen = []
        for n in range(2):
            backward(model, n)
            for p in model.parameters():
                seen += [p.grad.clone(), repr(p.grad), p.grad.norm().item(), p.grad.abs().max().item(), p.grad.shape]
                seen += [torch.isfinite(p.grad).all().item(), (p.grad * 2).sum().item(), p.grad.flatten()[0].item()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


def clip_twice(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def multiply_each(model):
    for n, p in enumerate(model.parameters()):
        p.grad.mul_(1 / (1 + n))


def replace_each(model):
    for p in model.parameters():
        p.grad = p.grad * 3


def drop_one(model):
    model.layers[0].up.weight.grad = None


def unscale(model):
    """As `torch.amp.GradScaler` does."""
    grads = [p.grad for p in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor(0.5))


def norm_in_two_calls(model):
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)


CHANGES = {
    "norm 2": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    "norm inf": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=float("inf")),
    "norm 1": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=1),
    "norm foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=True),
    "norm or an error": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5, error_if_nonfinite=True),
    "norm of one": lambda m: torch.nn.utils.clip_grad_norm_(m.head.weight, 0.01),
    "norm in two calls": norm_in_two_calls,
    "norm of some": lambda m: torch.nn.utils.clip_grad_norm_(m.layers[1].parameters(), 0.05),
    "value": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "clip twice": clip_twice,
    "multiply each": multiply_each,
    "add": lambda m: [p.grad.add_(0.01) for p in m.parameters()],
    "clamp data": lambda m: [p.grad.data.clamp_(-0.01, 0.01) for p in m.parameters()],
    "copy": lambda m: [p.grad.copy_(torch.full_like(p, 0.1)) for p in m.parameters()],
    "zero a row": lambda m: m.embed.weight.grad[3].zero_(),
    "set an item": lambda m: m.head.weight.grad.__setitem__(0, 0.5),
    "replace each": replace_each,
    "drop one": drop_one,
    "unscale": unscale,
}


@pytest.mark.parametrize(
    ("change", "place"),
    [(change, place) for change in CHANGES for place in ("host step", "via_device overlap_forward", "mixed overlap_forward")],
)
def test_changed_gradients_are_what_the_update_uses(change, place):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen.append(backward(model, n))
            with torch.no_grad():
                CHANGES[change](model)
            if n == 1:
                seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


class Calls(TorchFunctionMode):
    """Counts calls of torch by name."""

    def __init__(self):
        super().__init__()
        self.made = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.made[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_clipping_takes_all_gradients_in_one_call():
    """One by one they cost 45 us each on a GPU's host, during which the GPU waits."""
    from torch.nn.utils import clip_grad

    halves = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    model, optimizer = fresh(net, adamw)
    with applied(net, "mixed overlap_forward", model, optimizer):
        backward(model, 0)
        with Calls() as calls:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert calls.made["__get__"] >= len(list(model.parameters())), "`.grad` of each is looked at"
        assert not {"mul_", "linalg_vector_norm", "to"} & set(calls.made), calls.made
        optimizer.step()
    assert (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_) == halves


@every_place
def test_gradients_read_after_the_step_are_still_the_gradients(place):
    """Logging their norms there is common."""

    def loop(model, optimizer):
        seen = []
        for n in range(2):
            backward(model, n)
            optimizer.step()
            seen.append([p.grad.norm().item() for p in model.parameters()])
            optimizer.zero_grad()
        return seen

    assert_the_same_or_refused(net, place, loop)


@every_place
def test_summed_gradients_read_after_the_step_are_still_the_gradients(place):
    def loop(model, optimizer):
        seen = []
        for n in range(2):
            backward(model, n)
            backward(model, n + 5)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            seen.append([p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
        return seen

    assert_the_same_or_refused(net, place, loop)


@every_place
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_step_may_be_skipped(place, clear):
    """As loops do when a gradient is not finite."""

    def loop(model, optimizer):
        seen = []
        for n in range(4):
            seen.append(backward(model, n))
            if n % 2 == 0:
                optimizer.step()
            (optimizer if clear == "optimizer" else model).zero_grad()
        return seen

    assert_the_same(net, place, loop)


@every_place
def test_gradients_may_be_zeroed_after_a_step(place):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen.append(backward(model, n))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert all(not p.grad.any() for p in model.parameters())
        return seen

    assert_the_same(net, place, loop)


@every_place
def test_sums_of_gradients_that_are_not_used_are_given_back(place):
    model, optimizer = fresh(net)
    with applied(net, place, model, optimizer) as harness:
        steps(model, optimizer, 0, 2)
        before = far_used(harness)
        for n in range(3):
            backward(model, n)
            backward(model, n)
            optimizer.zero_grad()
        steps(model, optimizer, 2, 3)
        model.state_dict()  # waits for the updates
        assert far_used(harness) == before


@every_place
def test_gradients_may_be_zeroed_in_place_of_a_step(place):
    def loop(model, optimizer):
        seen = []
        for n in range(4):
            seen.append(backward(model, n))
            if n % 2 == 0:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return seen

    assert_the_same_or_refused(net, place, loop)


@every_place
def test_gradients_that_are_never_cleared_add_up_over_steps(place):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen.append(backward(model, n))
            optimizer.step()
        return seen

    assert_the_same_or_refused(net, place, loop)


@every_place
def test_a_second_step_without_a_backward_uses_the_gradients_again(place):
    def loop(model, optimizer):
        seen = []
        for n in range(2):
            seen.append(backward(model, n))
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same_or_refused(net, place, loop)


class FailOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


@every_place
def test_a_backward_that_fails_can_be_followed_by_another(place):
    """Who catches an error in backward, clears the gradients and goes on, goes on as without us."""

    def loop(model, optimizer):
        seen = []
        for n in range(4):
            torch.manual_seed(n)
            handle = model.layers[1].register_forward_hook(lambda _, __, out: FailOnce.apply(out)) if n == 1 else None
            loss = model(ids(n))
            seen.append(loss.item())
            if handle is not None:
                handle.remove()
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


@every_place
def test_a_forward_that_fails_can_be_followed_by_another(place):
    def loop(model, optimizer):
        seen = [step(model, optimizer, 0)]
        with pytest.raises(IndexError):
            model(torch.full((2, 4), 99))  # no such token
        return seen + steps(model, optimizer, 1, 3)

    assert_the_same(net, place, loop)


# loading and saving


@every_place
def test_states_loaded_in_the_middle_are_used(place, slow_host):
    def loop(model, optimizer):
        start = states(model, optimizer)
        seen = steps(model, optimizer, 0, 2)
        middle = states(model, optimizer)
        seen += steps(model, optimizer, 2, 4)
        model.load_state_dict(middle["model"])
        optimizer.load_state_dict(middle["optimizer"])
        again = steps(model, optimizer, 2, 4)
        assert again == seen[2:]
        model.load_state_dict(start["model"])
        return [*seen, again, steps(model, optimizer, 0, 2)]

    assert_the_same(net, place, loop)


@every_place
def test_an_optimizer_that_is_given_no_states_begins_anew(place):
    def loop(model, optimizer):
        start = states(model, optimizer)
        seen = steps(model, optimizer, 0, 3)
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
        assert steps(model, optimizer, 0, 3) == seen
        return [*seen, *steps(model, optimizer, 3, 5)]

    assert_the_same(net, place, loop)


@every_place
def test_states_loaded_right_after_applying_are_used(place):
    reference, plain = fresh(net)
    steps(reference, plain, 0, 2)
    saved = states(reference, plain)
    model, optimizer = fresh(net)
    with applied(net, place, model, optimizer):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert steps(model, optimizer, 2, 4) == steps(reference, plain, 2, 4)
    assert differences(states(model, optimizer), states(reference, plain)) == []


@every_place
def test_states_are_those_of_plain_training_and_load_there_and_back(place, tmp_path, slow_host):
    model, optimizer = fresh(net)
    reference, plain = fresh(net)
    with applied(net, place, model, optimizer):
        steps(model, optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "inside.pt")
    steps(reference, plain)
    saved = torch.load(tmp_path / "inside.pt")
    assert differences(saved, states(reference, plain)) == []
    other, its = fresh(net)
    other.load_state_dict(saved["model"])
    its.load_state_dict(saved["optimizer"])
    assert steps(other, its, 3, 5) == steps(reference, plain, 3, 5)
    model, optimizer = fresh(net)
    with applied(net, place, model, optimizer):
        step(model, optimizer, 8)  # so that there is something to be replaced
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(its.state_dict())
        assert steps(model, optimizer, 5, 7) == steps(reference, plain, 5, 7)
    assert differences(states(model, optimizer), states(reference, plain)) == []


@pytest.mark.parametrize(("before", "after"), zip(PLACES, [*PLACES[2:], *PLACES[:2]], strict=True))
def test_a_killed_run_resumes_under_another_placement(before, after, tmp_path):
    reference, plain = fresh(net)
    expected = steps(reference, plain, 0, 6)
    model, optimizer = fresh(net)
    harness = applied(net, before, model, optimizer)
    seen = steps(model, optimizer, 0, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    step(model, optimizer, 7)  # lost with the process
    harness.close()
    saved = torch.load(tmp_path / "checkpoint.pt")
    model = Net()
    optimizer = adamw(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with applied(net, after, model, optimizer):
        seen += steps(model, optimizer, 3, 6)
    assert seen == expected
    assert differences(states(model, optimizer), states(reference, plain)) == []


@every_place
def test_leaving_in_the_middle_and_going_on_without_is_the_same(place):
    reference, plain = fresh(net)
    expected = steps(reference, plain, 0, 6)
    model, optimizer = fresh(net)
    with applied(net, place, model, optimizer):
        seen = steps(model, optimizer, 0, 2)
    seen += steps(model, optimizer, 2, 4)
    with applied(net, place, model, optimizer):
        seen += steps(model, optimizer, 4, 6)
    assert seen == expected
    assert differences(states(model, optimizer), states(reference, plain)) == []


@every_place
def test_leaving_between_backward_and_step_keeps_the_gradients(place):
    reference, plain = fresh(net)
    model, optimizer = fresh(net)
    with applied(net, place, model, optimizer):
        backward(model)
    backward(reference)
    assert [type(p.grad) for p in model.parameters()] == [type(p.grad) for p in reference.parameters()]
    optimizer.step()
    plain.step()
    assert differences(states(model, optimizer), states(reference, plain)) == []


# what is left behind


def footprint(model, optimizer):
    """Everything that could be left on the model, the optimizer, this thread or the process."""

    def hooks(owner):
        return {k: len(v) for k, v in vars(owner).items() if k.endswith("_hooks") and v is not None}

    return {
        "modules": [(name, type(m), sorted(vars(m)), hooks(m)) for name, m in model.named_modules()],
        "parameters": [(n, id(p), type(p), sorted(vars(p)), p.requires_grad, p.device) for n, p in model.named_parameters()],
        "tensor hooks": [
            [len(h or ()) for h in (p._backward_hooks, p._post_accumulate_grad_hooks)] for p in model.parameters()
        ],
        "gradients": [type(p.grad) for p in model.parameters()],
        "optimizer": (type(optimizer), sorted(vars(optimizer)), hooks(optimizer)),
        "groups": [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "threads": sorted(t.name for t in threading.enumerate()),
        "environment": dict(os.environ),
    }


def owns_its_memory(t):
    """Ordinary memory, by itself: no view into something larger, none of a store's mappings."""
    storage = t.untyped_storage()
    return storage.resizable() and storage.nbytes() == t.nbytes and t.storage_offset() == 0


def assert_nothing_left(model, optimizer, before):
    after = footprint(model, optimizer)
    assert {k: v for k, v in after.items() if v != before[k]} == {}
    assert [n for n, p in model.named_parameters() if not owns_its_memory(p)] == []
    held = {(n, k): v for n, p in model.named_parameters() for k, v in optimizer.state.get(p, {}).items() if torch.is_tensor(v)}
    assert [name for name, v in held.items() if not owns_its_memory(v)] == []


def fail(*_):
    raise ZeroDivisionError


def leave_by_an_error(model):
    raise ZeroDivisionError


def leave_in_a_forward(model):
    handle = model.layers[1].register_forward_pre_hook(fail)
    try:
        model(ids())
    finally:
        handle.remove()


def leave_in_a_backward(model):
    handle = model.layers[1].register_forward_hook(lambda _, __, out: FailOnce.apply(out))
    try:
        model(ids()).backward()
    finally:
        handle.remove()


ENDS = {
    "after steps": lambda m: None,
    "by an error": leave_by_an_error,
    "in a forward": leave_in_a_forward,
    "in a backward": leave_in_a_backward,
    "after backward": backward,
}


@pytest.mark.parametrize(("ends", "place"), [(ends, place) for ends in ENDS for place in PLACES])
def test_nothing_is_left_behind(ends, place):
    model, optimizer = fresh(net)
    steps(model, optimizer, 0, 1)
    before = footprint(model, optimizer)
    try:
        with applied(net, place, model, optimizer):
            steps(model, optimizer, 1, 3)
            ENDS[ends](model)
    except ZeroDivisionError:
        assert ends in ("by an error", "in a forward", "in a backward")
    optimizer.zero_grad()
    assert_nothing_left(model, optimizer, before)
    steps(model, optimizer, 3, 4)


@every_place
def test_entering_and_leaving_changes_nothing(place):
    model, optimizer = fresh(net)
    steps(model, optimizer, 0, 1)
    before, values = footprint(model, optimizer), states(model, optimizer)
    with applied(net, place, model, optimizer):
        pass
    assert_nothing_left(model, optimizer, before)
    assert differences(states(model, optimizer), values) == []


@pytest.mark.parametrize("place", ["host overlap_forward", "streamed overlap_forward", "host backward"])
def test_an_error_in_an_update_on_the_host_reaches_the_loop_and_leaves_nothing(place):
    model, optimizer = fresh(net)
    before = footprint(model, optimizer)
    with failing_updates(ZeroDivisionError()), pytest.raises(ZeroDivisionError), applied(net, place, model, optimizer):
        for n in range(2):
            backward(model, n)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()
    assert_nothing_left(model, optimizer, before)


def test_a_harness_may_be_closed_twice():
    model, optimizer = fresh(net)
    before = footprint(model, optimizer)
    harness = applied(net, "mixed overlap_forward", model, optimizer)
    steps(model, optimizer)
    harness.close()
    harness.close()
    assert_nothing_left(model, optimizer, before)


# updates in backward


BACKWARD = ["host backward", "via_device backward", "streamed backward"]


@pytest.mark.parametrize("place", [*BACKWARD, "mixed backward"])
def test_updates_in_backward_are_those_of_the_step(place, slow_host):
    def loop(model, optimizer):
        seen = []
        for n in range(4):
            seen.append(backward(model, n))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(net, place, loop)


TOUCHES = {
    "read": lambda m: m.embed.weight.grad.norm(),
    "print": lambda m: repr(m.embed.weight.grad),
    "clip": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "multiply": lambda m: m.embed.weight.grad.mul_(0.5),
    "copy": lambda m: m.embed.weight.grad.clone(),
}


@pytest.mark.parametrize("place", BACKWARD)
@pytest.mark.parametrize("touch", TOUCHES)
def test_gradients_that_were_used_up_in_backward_say_so(place, touch):
    model, optimizer = fresh(net)
    with applied(net, place, model, optimizer):
        backward(model)
        with pytest.raises(Unsupported, match="its update was made in backward") as refused:
            TOUCHES[touch](model)
    assert "reads_gradients=True" in refused.value.hint


# what is refused


@every_place
def test_a_closure_is_refused_and_the_loop_may_go_on(place):
    model, optimizer = fresh(net)
    reference, plain = fresh(net)
    with applied(net, place, model, optimizer):
        with pytest.raises(Unsupported, match="closure") as refused:
            optimizer.step(lambda: model(ids()))
        seen = steps(model, optimizer)
    assert refused.value.hint
    assert seen == steps(reference, plain)


def assert_refused(plan, model, optimizer, error, match, store=None):
    """The plan is not applied, and the model is as it was."""
    before, values = footprint(model, optimizer), states(model, optimizer)
    at = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error, match=match) as refused:
        Harness(plan, model, optimizer, stores=[store or Far()])
    assert refused.value.hint
    assert_nothing_left(model, optimizer, before)
    assert differences(states(model, optimizer), values) == []
    assert [p.data_ptr() for p in model.parameters()] == at


@every_place
def test_an_optimizer_that_looks_at_everything_at_once_is_refused(place):
    model = copy.deepcopy(traced(net)[0])
    assert_refused(planned(net, place), model, torch.optim.LBFGS(model.parameters()), Unsupported, "LBFGS")


@every_place
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_hooks_of_its_own_is_refused(place, hook):
    model, optimizer = fresh(net)
    calls = []
    getattr(model.layers[1].up.weight, hook)(lambda _: calls.append(1))
    assert_refused(planned(net, place), model, optimizer, Unsupported, r"layers\.1\.up\.weight")
    backward(model)
    assert calls == [1]


@pytest.mark.parametrize("update", ["device", "via_device"])
def test_streamed_weights_are_updated_as_the_plan_says_or_the_plan_is_refused(update):
    model, optimizer = fresh(net)
    reference, plain = fresh(net)
    trace = traced(net)[1]
    rows = dict.fromkeys(streamable(trace), ("streamed", update))
    try:
        plan = finish(Nop(), problem_for(trace), [Place.of(trace, rows)])
    except holdall.HoldallError as refused:
        assert refused.hint
        return
    with holdall.apply(plan, model, optimizer):
        seen = steps(model, optimizer)
    assert seen == steps(reference, plain)


@every_place
def test_a_far_tier_that_is_too_small_is_refused_when_planning(place):
    trace = traced(net)[1]
    needed = planned(net, place).predicted.peak["far"]

    def plan(far):
        problem = Problem(trace=trace, hardware=machine(), budget={"cpu": 2**40, "far": far})
        return finish(Nop(), problem, [place_of(trace, place)])

    assert plan(needed).predicted.peak["far"] == needed
    with pytest.raises(Infeasible, match="of far") as refused:
        plan(needed - 1)
    assert f"needs {format_bytes(needed)} ({needed:,} bytes) there" in str(refused.value)
    assert refused.value.smallest is None  # the device's bytes, and those were not too few
    assert '"far": "1MiB"' in refused.value.hint


def test_a_planner_is_told_that_the_far_tier_is_too_small():
    trace = traced(net)[1]
    with pytest.raises(Infeasible) as refused:
        holdall.plan(trace, budget={"cpu": 1, "far": 2**40}, hardware=machine())
    least = refused.value.smallest
    assert holdall.plan(trace, budget={"cpu": least, "far": 2**40}, hardware=machine()).predicted.peak["cpu"] <= least
    with pytest.raises(Infeasible):
        holdall.plan(trace, budget={"cpu": least, "far": 1}, hardware=machine())


@pytest.mark.parametrize(("share", "place"), [(share, place) for share in (0.1, 0.5, 0.9) for place in PLACES])
def test_a_store_that_is_too_small_is_noticed_before_anything_has_moved(share, place):
    model, optimizer = fresh(net)
    steps(model, optimizer, 0, 1)
    with applied(net, place, copy.deepcopy(model), None) as harness:
        at_once = far_used(harness)
    assert_refused(planned(net, place), model, optimizer, OverBudget, "far", store=Far(capacity=int(share * at_once)))


@every_place
def test_the_predicted_far_tier_is_enough(place):
    model, optimizer = fresh(net)
    plan = planned(net, place)
    with Harness(plan, model, optimizer, stores=[Far(capacity=plan.predicted.peak["far"])]):
        steps(model, optimizer)
