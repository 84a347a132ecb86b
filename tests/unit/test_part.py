"""Updating parameters in parts, or stand-ins for them, is updating them together: for every rule that torch.optim has."""

import copy
import inspect

import pytest
import torch

from holdall.runtime.budget.ledger import Ledger
from holdall.testing.stand_ins import pieces_of
from holdall.updates.parts import ELEMENTWISE, Part, clone_optimizer, is_separable, snapshot

RULES = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {},
    "Adam-amsgrad": {"amsgrad": True},
    "AdamW": {},
    "AdamW-maximize": {"maximize": True},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "RMSprop-centered": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {},
    "SGD-momentum": {"momentum": 0.9, "nesterov": True},
}
FORMS = {"default": {}, "single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SHAPES = [(40, 5), (37,), (1,), (3, 4, 9), (128,)]
STEPS = 4


def rule_class(rule):
    return getattr(torch.optim, rule.partition("-")[0])


def has_form(rule, form):
    return set(FORMS[form]) <= set(inspect.signature(rule_class(rule)).parameters)


CASES = [(rule, form) for rule in RULES for form in FORMS if has_form(rule, form)]


def make_params(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def make_optimizer(rule, form, params, **more):
    """Two groups that differ in more than one hyperparameter, so that a mistaken group shows."""
    groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "weight_decay": 0.0, "lr": 0.03}]
    if rule.startswith("Rprop"):
        groups = [{"params": params[::2], "etas": (0.4, 1.3)}, {"params": params[1::2], "lr": 0.03}]
    return rule_class(rule)(groups, lr=0.01, **RULES[rule], **FORMS[form], **more)


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def step_whole(optimizer, params, grads):
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.to(p.dtype, copy=True)  # some rules change their gradients
    optimizer.step()
    optimizer.zero_grad()


def states_of(optimizer, params):
    return [dict(optimizer.state.get(p, {})) for p in params]


def assert_same_states(mine, theirs):
    for own, other in zip(mine, theirs, strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            assert torch.is_tensor(own[key]) == torch.is_tensor(value), key
            if torch.is_tensor(value):
                assert own[key].shape == value.shape and own[key].dtype == value.dtype, key
                assert torch.equal(own[key], value), key
            else:
                assert own[key] == value, key


def assert_same(values, states, params, optimizer):
    assert all(torch.equal(v, p) for v, p in zip(values, params, strict=True))
    assert_same_states(states, states_of(optimizer, params))


# parts


def test_every_elementwise_rule_is_tried():
    assert {rule_class(rule) for rule in RULES} == ELEMENTWISE


@pytest.mark.parametrize(("rule", "form"), CASES)
def test_updating_in_parts_is_updating_the_whole(rule, form):
    params, mine = make_params(), make_params()
    whole, owner = make_optimizer(rule, form, params), make_optimizer(rule, form, mine)
    halves = [Part(owner, mine[:2]), Part(owner, mine[2:])]
    values, states = [p.detach() for p in mine], states_of(owner, mine)
    for n in range(STEPS):
        grads = gradients(n)
        step_whole(whole, params, grads)
        halves[1].step(values[2:], grads[2:], states[2:], snapshot(owner), [0, 1, 2])
        halves[0].step(values[:2], grads[:2], states[:2], snapshot(owner), [0, 1])
    assert_same(values, states, params, whole)


@pytest.mark.parametrize(("rule", "kwargs"), [("Adafactor", {}), ("Adafactor", {"maximize": True}), ("Muon", {})])
def test_rules_that_look_at_whole_matrices_can_be_taken_apart_by_parameter(rule, kwargs):
    def matrices():
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(8, 6)) for _ in range(3)]

    params, mine = matrices(), matrices()
    whole, owner = (getattr(torch.optim, rule)(p, lr=0.01, **kwargs) for p in (params, mine))
    parts = [Part(owner, [p]) for p in mine]
    values, states = [p.detach() for p in mine], [{} for _ in mine]
    for n in range(STEPS):
        torch.manual_seed(n)
        grads = [torch.randn(8, 6) for _ in params]
        step_whole(whole, params, grads)
        for part, value, grad, state in zip(parts, values, grads, states, strict=True):
            part.step([value], [grad], [state], snapshot(owner), [0])
    assert_same(values, states, params, whole)


@pytest.mark.parametrize("rule", ["AdamW", "SGD-momentum", "ASGD"])
def test_members_without_a_gradient_are_left_alone(rule):
    params, mine = make_params(), make_params()
    whole, owner = make_optimizer(rule, "default", params), make_optimizer(rule, "default", mine)
    part = Part(owner, mine)
    values, states = [p.detach() for p in mine], states_of(owner, mine)
    for n in range(STEPS):
        which = [i for i in range(len(mine)) if (i + n) % 3]
        grads = gradients(n)
        for i in which:
            params[i].grad = grads[i].clone()
        whole.step()
        whole.zero_grad()
        part.step([values[i] for i in which], [grads[i] for i in which], [states[i] for i in which], snapshot(owner), which)
    assert_same(values, states, params, whole)


def test_a_step_leaves_nothing_on_the_stand_ins_or_in_the_part():
    mine = make_params()
    part = Part(make_optimizer("AdamW", "default", mine), mine)
    values, states = [p.detach() for p in mine], [{} for _ in mine]
    part.step(values, gradients(0), states, snapshot(make_optimizer("AdamW", "default", mine)), range(len(mine)))
    assert all(v.grad is None for v in values)
    assert not part._clone.state and not part._clone.param_groups


def test_a_step_that_fails_leaves_nothing_either():
    mine = make_params()
    owner = make_optimizer("AdamW", "default", mine)
    part = Part(owner, mine)
    values, states = [p.detach() for p in mine], [{} for _ in mine]
    groups = snapshot(owner)
    groups[0]["betas"] = "not numbers"
    with pytest.raises(ValueError):
        part.step(values, gradients(0), states, groups, range(len(mine)))
    assert all(v.grad is None for v in values)
    assert not part._clone.state and not part._clone.param_groups


def test_parameters_of_nobody_are_known_as_untrained():
    mine = make_params()
    part = Part(torch.optim.SGD(mine[:3], lr=0.1), mine)
    assert part.trained == [True, True, True, False, False]


def test_positions_are_told_apart_by_group():
    mine = make_params()  # groups: even, odd
    part = Part(make_optimizer("AdamW", "default", mine), mine)
    assert part.by_group([0, 1, 3, 4]) == {0: [0, 3], 1: [1, 2]}


# gradients that are narrower, scaled, or taken a stretch at a time


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(("rule", "form"), CASES)
@pieces_of(64)
def test_narrow_gradients_by_the_stretch_give_what_wide_ones_give(rule, form, sliced):
    """In pieces of 64, one parameter is cut in four, others come in batches; counters advance once."""
    params, mine = make_params(), make_params()
    whole, owner = make_optimizer(rule, form, params), make_optimizer(rule, form, mine)
    part, states = Part(owner, mine), states_of(owner, mine)
    values, narrow = [p.detach() for p in mine], [p.detach().bfloat16() for p in mine]
    for n in range(STEPS):
        grads = gradients(n, torch.bfloat16)
        step_whole(whole, params, [g.float() * 0.5 for g in grads])
        part.update(
            values, grads, states, snapshot(owner), range(len(mine)), scale=torch.tensor(0.5), narrow=narrow, sliced=sliced
        )
    assert_same(values, states, params, whole)
    assert all(torch.equal(n, p.bfloat16()) for n, p in zip(narrow, params, strict=True))


@pieces_of(64)
def test_a_parameter_that_is_laid_out_in_another_order_can_be_sliced():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 40).t())]
    mine = [torch.nn.Parameter(params[0].detach().clone())]
    assert not mine[0].is_contiguous()
    whole, owner = (torch.optim.AdamW(p) for p in (params, mine))
    part, values, states = Part(owner, mine), [mine[0].detach()], [{}]
    for _ in range(STEPS):
        grad = torch.randn(40, 5).bfloat16()
        step_whole(whole, params, [grad])
        part.update(values, [grad], states, snapshot(owner), [0], sliced=True)
    assert_same(values, states, params, whole)


def test_slicing_bounds_the_wide_gradients():
    def above(elements):
        torch.manual_seed(0)
        mine = [torch.nn.Parameter(torch.randn(4096))]
        owner = torch.optim.SGD(mine, lr=0.1, foreach=False)
        grads, values = [torch.randn(4096).bfloat16()], [mine[0].detach()]
        with pieces_of(elements), Ledger(seed=[*mine, *grads]) as counted:
            before = counted.live
            Part(owner, mine).update(values, grads, [{}], snapshot(owner), [0], sliced=True)
            return counted.peak - before

    assert above(4096) >= 4 * 4096
    assert above(64) <= 3 * 4 * 64


@pytest.mark.parametrize("rule", ["Adafactor"])
@pieces_of(16)
def test_rules_that_are_not_elementwise_are_never_sliced(rule):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8, 6)) for _ in range(2)]
    mine = copy.deepcopy(params)
    whole, owner = (getattr(torch.optim, rule)(p, lr=0.01) for p in (params, mine))
    part, values, states = Part(owner, mine), [p.detach() for p in mine], [{} for _ in mine]
    for n in range(STEPS):
        torch.manual_seed(n)
        grads = [torch.randn(8, 6).bfloat16() for _ in params]
        step_whole(whole, params, grads)
        part.update(values, grads, states, snapshot(owner), [0, 1], sliced=True)
    assert_same(values, states, params, whole)


def test_wide_gradients_go_into_the_scratch_that_is_given():
    mine = make_params()
    owner = make_optimizer("SGD", "default", mine)
    part, values = Part(owner, mine), [p.detach() for p in mine]
    grads = gradients(0, torch.bfloat16)
    scratch = torch.full((sum(g.numel() for g in grads),), float("nan"))
    part.update(values, grads, [{} for _ in mine], snapshot(owner), range(len(mine)), scratch=scratch)
    assert torch.equal(scratch, torch.cat([g.float().flatten() for g in grads]))


def test_a_scale_multiplies_gradients_of_the_same_width():
    params, mine = make_params(), make_params()
    whole, owner = make_optimizer("AdamW", "fused", params), make_optimizer("AdamW", "fused", mine)
    part, values, states = Part(owner, mine), [p.detach() for p in mine], [{} for _ in mine]
    for n in range(STEPS):
        step_whole(whole, params, [g * 0.25 for g in gradients(n)])
        part.update(values, gradients(n), states, snapshot(owner), range(len(mine)), scale=torch.tensor(0.25))
    assert_same(values, states, params, whole)


# snapshots


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_a_scheduler_does_not_change_a_snapshot(lr):
    params, mine = make_params(), make_params()
    whole, owner = torch.optim.AdamW(params, lr=copy.deepcopy(lr)), torch.optim.AdamW(mine, lr=copy.deepcopy(lr))
    scheduler = torch.optim.lr_scheduler.LambdaLR(owner, lambda k: 0.1**k)
    taken = snapshot(owner)
    owner.step()
    scheduler.step()
    assert float(owner.param_groups[0]["lr"]) == pytest.approx(0.001)
    step_whole(whole, params, gradients(0))
    values, states = [p.detach() for p in mine], [{} for _ in mine]
    Part(owner, mine).step(values, gradients(0), states, taken, range(len(mine)))
    assert_same(values, states, params, whole)


def test_a_snapshot_names_no_parameters():
    mine = make_params()
    taken = snapshot(make_optimizer("AdamW", "default", mine))
    assert len(taken) == 2
    assert all("params" not in group for group in taken)


# clones


def test_a_clone_has_the_rule_and_none_of_the_state_or_hooks():
    calls = []
    mine = make_params()
    owner = make_optimizer("AdamW", "default", mine)
    owner.register_step_pre_hook(lambda *_: calls.append("before"))
    owner.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(owner, 1)  # wraps `owner.step`
    step_whole(owner, mine, gradients(0))
    calls.clear()
    before, state = [p.detach().clone() for p in mine], copy.deepcopy(owner.state_dict())
    stand_ins = [torch.zeros_like(p) for p in mine]
    clone = clone_optimizer(owner, {id(p): s for p, s in zip(mine, stand_ins, strict=True)}, foreach=False)
    assert not clone.state
    for s, grad in zip(stand_ins, gradients(1), strict=True):
        s.grad = grad
    clone.step()
    assert calls == []
    assert all(s.abs().sum() > 0 for s in stand_ins)
    assert all(torch.equal(p, b) for p, b in zip(mine, before, strict=True))
    after = owner.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert_same_states(list(after["state"].values()), list(state["state"].values()))
    assert scheduler.optimizer is owner


def test_a_clone_holds_only_what_is_replaced_in_the_groups_of_the_original():
    mine = make_params()
    owner = make_optimizer("AdamW", "default", mine)
    stand_in = torch.zeros_like(mine[1])
    clone = clone_optimizer(owner, {id(mine[1]): stand_in}, foreach=False)
    assert [len(g["params"]) for g in clone.param_groups] == [0, 1]
    assert clone.param_groups[1]["params"][0] is stand_in
    assert [len(g["params"]) for g in owner.param_groups] == [3, 2]


@pytest.mark.parametrize(
    ("kwargs", "chosen"), [({}, True), ({"foreach": False}, False), ({"foreach": True}, True), ({"fused": True}, None)]
)
def test_a_clone_for_a_gpu_takes_the_multi_tensor_form_where_the_user_left_it_open(kwargs, chosen):
    owner = torch.optim.AdamW(make_params(), **kwargs)
    clone = clone_optimizer(owner, {}, foreach=True)
    assert clone.param_groups[0]["foreach"] is chosen
    assert owner.param_groups[0]["foreach"] is kwargs.get("foreach")


def test_only_rules_that_look_at_everything_at_once_cannot_be_taken_apart():
    params = make_params()
    assert not is_separable(torch.optim.LBFGS(params))
    assert all(is_separable(make_optimizer(rule, "default", params)) for rule in RULES)
