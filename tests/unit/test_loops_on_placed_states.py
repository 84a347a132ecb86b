"""What loops do to parameters, gradients and optimizers while model states are placed: as in plain training, or refused."""

import copy
import io
import pickle
from functools import cache

import pytest
import torch

import holdall
from holdall.errors import Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for
from holdall.testing.states import Layer, differences, place_of

pytestmark = pytest.mark.usefixtures("no_modes_left", "slow_host")

PLACES = ["host step", "host overlap_forward", "via_device step", "streamed overlap_forward", "mixed overlap_forward"]
every_place = pytest.mark.parametrize("place", PLACES)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def net():
    torch.manual_seed(0)
    return Net()


def half_frozen():
    model = net()
    model.embed.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.layers[2].up.requires_grad_(False)
    return model


def ids(n=0):
    return torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(n))


def of_all(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def of_trained(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def of_matrices(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1], lr=1e-2, weight_decay=0.1)


def of_vectors(model):
    return torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1, momentum=0.9)


@cache
def planned(make, optimize, place):
    model = make()
    trace = holdall.trace(model, ids(), optimizer=optimize(model))
    return finish(Nop(), problem_for(trace), [place_of(trace, place)])


def states(model, optimizer):
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def run(loop, make, optimize, place=None):
    model = make()
    optimizer = optimize(model)
    if place is None:
        seen = loop(model, optimizer)
        return seen, states(model, optimizer), [p.requires_grad for p in model.parameters()]
    if place == "fit":
        harness = holdall.fit(model, optimizer, ids(), budget="1MiB", planner="zero_offload", overlap=True)
    else:
        harness = holdall.apply(planned(make, optimize, place), model, optimizer, enforce=False)
    with harness:
        seen = loop(model, optimizer)
        inside = states(model, optimizer)
    assert differences(states(model, optimizer), inside) == []
    return seen, inside, [p.requires_grad for p in model.parameters()]


def assert_the_same(loop, place, make=net, optimize=of_all):
    expected = run(loop, make, optimize)
    assert differences(run(loop, make, optimize, place), expected) == []


def backward(model, n=0):
    torch.manual_seed(n)
    loss = model(ids(n))
    loss.backward()
    return loss.item()


def steps(model, optimizer, first, last, **clear):
    seen = []
    for n in range(first, last):
        seen.append(backward(model, n))
        optimizer.step()
        optimizer.zero_grad(**clear)
    return seen


every_way = pytest.mark.parametrize("place", [*PLACES, "fit"])


# parameters of two optimizers


@every_way
@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_the_norm_is_that_of_all_parameters_whoever_updates_them(place, order):
    def loop(model, optimizer):
        other = of_vectors(model)
        seen = []
        for n in range(4):
            seen += [backward(model, n), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()]
            for each in (optimizer, other) if order == "ours first" else (other, optimizer):
                each.step()
                each.zero_grad()
        return [seen, copy.deepcopy(other.state_dict())]

    assert_the_same(loop, place, optimize=of_matrices)


@every_way
@pytest.mark.parametrize("clear", ["model", "optimizer", "nobody"])
def test_gradients_that_no_optimizer_knows_count_and_add_up(place, clear):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            seen += [backward(model, n), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=n == 1).item()]
            optimizer.step()
            optimizer.zero_grad()
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            if clear == "model":
                model.zero_grad()
            elif clear == "nobody" and n == 1:
                backward(model, 9)
        return seen

    assert_the_same(loop, place, optimize=of_matrices)


@every_place
def test_leaving_keeps_gradients_that_no_optimizer_knows(place):
    def loop(model, _):
        backward(model)

    seen = []
    for where in (None, place):
        model = net()
        optimizer = of_matrices(model)
        if where is None:
            loop(model, optimizer)
        else:
            with holdall.apply(planned(net, of_matrices, where), model, optimizer, enforce=False):
                loop(model, optimizer)
        seen.append([p.grad.clone() for p in model.parameters()])
    assert differences(seen[1], seen[0]) == []


# freezing and unfreezing


FREEZES = {
    "a layer": lambda m: m.layers[0].requires_grad_(False),
    "a parameter": lambda m: m.layers[1].up.weight.requires_grad_(False),
    "the embedding": lambda m: m.embed.requires_grad_(False),
    "all but the head": lambda m: [m.requires_grad_(False), m.head.requires_grad_(True)],
}


@every_way
@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("none", [True, False])
def test_what_is_frozen_in_mid_run_stays_and_may_be_trained_again(place, freeze, none):
    """With gradients that are zeroed instead of dropped, decay and momentum go on, as they do in plain training."""

    def loop(model, optimizer):
        seen = steps(model, optimizer, 0, 2, set_to_none=none)
        FREEZES[freeze](model)
        seen += steps(model, optimizer, 2, 4, set_to_none=none)
        model.requires_grad_(True)
        return seen + steps(model, optimizer, 4, 6, set_to_none=none)

    assert_the_same(loop, place)


@every_way
@pytest.mark.parametrize("optimize", [of_all, of_trained])
def test_what_is_unfrozen_in_mid_run_is_trained(place, optimize):
    """An optimizer that did not know it is told by `add_param_group`."""

    def loop(model, optimizer):
        seen = steps(model, optimizer, 0, 2)
        model.layers[1].requires_grad_(True)
        model.embed.requires_grad_(True)
        if optimize is of_trained:
            new = [*model.layers[1].parameters(), *model.embed.parameters()]
            optimizer.add_param_group({"params": new, "lr": 1e-3})
        for n in range(2, 5):
            seen += [backward(model, n), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(loop, place, make=half_frozen, optimize=optimize)


@every_place
def test_freezing_between_forward_and_backward_holds(place):
    def loop(model, optimizer):
        seen = steps(model, optimizer, 0, 2)
        torch.manual_seed(5)
        loss = model(ids(5))
        model.layers[0].requires_grad_(False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return seen + steps(model, optimizer, 6, 8)

    assert_the_same(loop, place)


# optimizers and gradients


def drop_gradients(model, optimizer):
    for p in model.layers[0].parameters():
        p.grad = None


def no_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.0


def other_rate(model, optimizer):
    optimizer.param_groups[0].update(lr=5e-3, weight_decay=0.0, betas=(0.8, 0.9))


def surgery(model, optimizer):
    """As for several tasks: gradients are made into one vector, changed, and written back."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    flat -= flat.mean()
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p).clone()
        at += p.numel()


def no_gradients(model, optimizer):
    for p in model.parameters():
        p.grad = None


def noise(model, optimizer):
    for p in model.parameters():
        p.grad += 0.01 * torch.randn_like(p.grad)


BETWEEN = {f.__name__: f for f in (drop_gradients, no_rate, other_rate, surgery, no_gradients, noise)}


@every_way
@pytest.mark.parametrize("between", BETWEEN)
def test_what_is_done_between_backward_and_step_counts(place, between):
    def loop(model, optimizer):
        seen = []
        for n in range(4):
            seen.append(backward(model, n))
            if n in (1, 2):
                BETWEEN[between](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(loop, place)


def by_hand(model, optimizer):
    """Parameters are listed before any forward, as for a meta-learner."""
    params = list(model.parameters())

    def take(loss):
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g

    return take


def by_hand_later(model, optimizer):
    def take(loss):
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g

    return take


@every_way
@pytest.mark.parametrize("how", [by_hand, by_hand_later])
def test_gradients_asked_for_by_hand_are_used(place, how):
    def loop(model, optimizer):
        take = how(model, optimizer)
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            loss = model(ids(n))
            take(loss)
            seen += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(loop, place)


@every_way
@pytest.mark.parametrize("none", [True, False])
def test_gradients_may_be_cleared_between_forward_and_backward(place, none):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            loss = model(ids(n))
            model.zero_grad(set_to_none=none)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    assert_the_same(loop, place)


@every_way
def test_a_penalty_on_parameters_that_the_loop_holds_adds_to_their_gradients(place):
    def loop(model, optimizer):
        params = list(model.parameters())
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            penalty = sum(p.square().sum() for p in params)
            loss = model(ids(n)) + 0.1 * penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    assert_the_same(loop, place)


# parameters written into


def clamp_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def other_data(model):
    for p in model.parameters():
        p.data = p.data * 0.9


def by_numpy(model):
    for p in model.parameters():
        p.detach().numpy()[...] *= 0.9


def from_vector(model):
    params = list(model.parameters())
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(params).detach() * 0.9, params)


def anew(model):
    torch.manual_seed(7)
    model.layers[1].up.reset_parameters()


def loaded(model):
    model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})


WRITES = {f.__name__: f for f in (clamp_data, other_data, by_numpy, from_vector, anew, loaded)}


@every_way
@pytest.mark.parametrize("when", ["after the step", "before the step", "after an evaluation", "after a copy"])
@pytest.mark.parametrize("write", WRITES)
def test_what_the_loop_writes_into_parameters_is_used(place, write, when):
    def loop(model, optimizer):
        seen = []
        for n in range(4):
            seen.append(backward(model, n))
            if when == "before the step":
                WRITES[write](model)
            optimizer.step()
            optimizer.zero_grad()
            if when == "after an evaluation":
                with torch.no_grad():
                    seen.append(model.eval()(ids(9)).item())
                model.train()
            if when == "after a copy":
                seen.append(copy.deepcopy(model.state_dict()))
            if when != "before the step":
                WRITES[write](model)
        return seen

    assert_the_same(loop, place)


@every_place
def test_averages_by_hand_and_back(place):
    """An exponential average is kept, put in for an evaluation, and taken out again."""

    def loop(model, optimizer):
        shadow = {n: p.data.clone() for n, p in model.named_parameters()}
        seen = []
        for n in range(4):
            seen += steps(model, optimizer, n, n + 1)
            for name, p in model.named_parameters():
                shadow[name] = 0.5 * shadow[name] + 0.5 * p.data
            backup = {name: p.data.clone() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.data = shadow[name]
            with torch.no_grad():
                seen.append(model.eval()(ids(9)).item())
            model.train()
            for name, p in model.named_parameters():
                p.data = backup[name]
        return [seen, shadow]

    assert_the_same(loop, place)


@every_place
def test_a_parameter_that_is_replaced_is_refused(place):
    model = net()
    optimizer = of_all(model)
    with holdall.apply(planned(net, of_all, place), model, optimizer, enforce=False) as harness:
        steps(model, optimizer, 0, 1)
        unit = next(u for u in harness.engine.units if any(m.is_swapped for m in u.members))
        slots, name = next(m for m in unit.members if m.is_swapped).slots[0]
        old, slots[name] = slots[name], torch.nn.Parameter(slots[name].detach().clone())
        with pytest.raises(Unsupported, match="another parameter") as refused:
            model(ids())
        slots[name] = old
        steps(model, optimizer, 1, 2)
    assert "fit" in refused.value.hint


@every_place
def test_a_parameter_of_another_type_is_refused(place):
    model = net()
    optimizer = of_all(model)
    with holdall.apply(planned(net, of_all, place), model, optimizer, enforce=False):
        steps(model, optimizer, 0, 1)
        with pytest.raises(Unsupported, match="cannot become") as refused:
            model.double()
    assert refused.value.hint


# copies


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
    "averaged": lambda m: torch.optim.swa_utils.AveragedModel(m).module,
    "a part": lambda m: copy.deepcopy(torch.nn.Sequential(m)),
}


def clean(model):
    """What modules have besides their own: nothing."""
    for module in model.modules():
        assert not [k for k, v in vars(module).items() if callable(v) and not isinstance(v, (torch.nn.Module, type))]
        assert not [k for k, v in vars(module).items() if "hooks" in k and v]
    return all(type(p) is torch.nn.Parameter and p.is_leaf for p in model.parameters())


@every_way
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("when", ["after the step", "after the forward", "after the backward"])
def test_copies_are_ordinary_models_with_the_weights_of_now(place, how, when):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            loss = model(ids(n))
            if when == "after the forward":
                new = COPIES[how](model)
            loss.backward()
            if when == "after the backward":
                new = COPIES[how](model)
            optimizer.step()
            optimizer.zero_grad()
            if when == "after the step":
                new = COPIES[how](model)
            assert clean(new)
            with torch.no_grad():
                seen += [loss.item(), new.eval()(ids(9)).item(), dict(new.state_dict())]
            new.train()
            new(ids(9)).backward()
            seen.append([p.grad for p in new.parameters()])
        return seen

    assert_the_same(loop, place)


@every_place
def test_an_averaged_model_follows(place):
    def loop(model, optimizer):
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        seen = []
        for n in range(4):
            seen += steps(model, optimizer, n, n + 1)
            average.update_parameters(model)
            with torch.no_grad():
                seen.append(average(ids(9)).item())
        return [seen, dict(average.state_dict())]

    assert_the_same(loop, place)


# graphs


@every_way
def test_a_graph_may_be_kept_for_a_second_backward(place):
    def loop(model, optimizer):
        seen = []
        for n in range(3):
            torch.manual_seed(n)
            loss = model(ids(n))
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
            seen += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_the_same(loop, place)


@every_way
def test_closing_between_forward_and_backward_says_so_and_loses_nothing(place):
    model = net()
    optimizer = of_all(model)
    reference = net()
    plain = of_all(reference)
    if place == "fit":
        harness = holdall.fit(model, optimizer, ids(), budget="1MiB", planner="zero_offload", overlap=True)
    else:
        harness = holdall.apply(planned(net, of_all, place), model, optimizer, enforce=False)
    seen = steps(model, optimizer, 0, 2)
    loss = model(ids(7))
    harness.close()
    with pytest.raises(Unsupported, match="closed between") as refused:
        loss.backward()
    assert refused.value.hint
    assert seen + steps(model, optimizer, 2, 4) == steps(reference, plain, 0, 4)
    assert differences(states(model, optimizer), states(reference, plain)) == []
