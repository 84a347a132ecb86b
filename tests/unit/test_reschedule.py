"""Blocks run op by op in an order of their own: the same bits, the predicted bytes, nothing left behind."""

import copy
import dataclasses
import gc
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.cost.roofline import cost_trace
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for, run_both, traced, train
from holdall.testing.worlds import HUGGING_FACE, PLAIN, family, far_peak, machine
from holdall.types.program import Effect, fault, groups, lazily


def random_order(trace, block, rng, *, kept=0.5, lost=0.3):
    """Some results kept at first; after every op some are thrown away; what is missing is made again, as often as it takes."""
    ops, count = region(trace, block)
    does = effects(ops)
    together = groups(does[:count])
    owner = {x: g for g in together for n in g for x in does[n].writes}
    live = {x for x in owner if rng.random() < kept}
    order = []

    def make(x):
        if x in live or x not in owner:
            return
        group = owner[x]
        inside = {y for n in group for y in does[n].writes}
        for n in group:
            for y in (*does[n].reads, *does[n].mutates):
                if y not in inside:
                    make(y)
        order.extend(group)
        live.update(inside)

    for n in range(count, len(ops)):
        for x in does[n].reads:
            make(x)
        for x in does[n].reads:  # making one may have needed memory of another: not here, but it may have been remade
            make(x)
        order.append(n)
        live.difference_update([x for x in live if rng.random() < lost])
    return order


def able(trace):
    return [b for b in trace.blocks if b.saves and b.backward is not None and not obstacle(trace, b)]


FAMILIES = [n for n in (*PLAIN, *HUGGING_FACE) if n not in ("tiny-qwen2", "tiny-qwen3")]  # as tiny-llama


@pytest.mark.parametrize("name", FAMILIES)
def test_any_order_gives_the_same_bits_and_the_predicted_peak(name):
    """Dropout, batch norm and ops in place among them; ops run up to many times."""
    rng = random.Random(name)
    model, batch, _, trace = traced(name)
    if not able(trace):
        pytest.skip("no block of this family is run op by op")
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)
    weights = copy.deepcopy(model.state_dict())
    most = 0
    for _ in range(2):
        actions = [Reschedule.of(trace, b, random_order(trace, b, rng)) for b in able(trace) if rng.random() < 0.8]
        most = max([most, *(a.backward.count(n) for a in actions for n in set(a.backward))])
        plan = finish(Nop(), problem_for(trace), actions)
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with holdall.apply(plan, model, optimizer) as harness:
            got = train(model, batch, optimizer, 2)
        assert harness.notes == []  # what is planned op by op is run so
        assert got == expected
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert most > 1 or name in ("recurrent",)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_program_keeps_may_wait_elsewhere(name):
    """Any order, and what it keeps in another tier meanwhile: fetched at once, ahead, or after the whole forward."""
    rng = random.Random(name)
    model, batch, _, trace = traced(name)
    blocks = able(trace)
    if not blocks:
        pytest.skip("no block of this family is run op by op")
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)
    weights = copy.deepcopy(model.state_dict())
    saving = [b for b in trace.blocks if b.saves and b.backward is not None]
    for slow in (False, True):
        actions = []
        for b in blocks:
            away = Offload.of(trace, b, overlap=rng.random() < 0.5)
            if slow and b.id < saving[-1].id:
                away = dataclasses.replace(away, lag=True, until=saving[-1].name, fetch=saving[-1].name)
            actions += [Reschedule.of(trace, b, random_order(trace, b, rng, kept=0.7)), away]
        plan = finish(Nop(), problem_for(trace), actions)
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with holdall.apply(plan, model, optimizer) as harness:
            got = train(model, batch, optimizer, 2)
        assert harness.notes == []
        assert got == expected
        assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
        assert far_peak(harness) == plan.predicted.peak.get("far", 0)
        assert far_peak(harness) > 0 or name == "recurrent"  # whose only such block keeps nothing of its own


@pytest.mark.parametrize("when", ["step", "overlap_forward", "backward"])
@pytest.mark.parametrize("name", ["tiny-llama", "convnet"])
def test_programs_leave_while_weights_come_and_go(name, when):
    """What `auto` does in small budgets: op by op, what is kept elsewhere, weights streamed, updates on the host."""
    rng = random.Random(name + when)
    model, batch, _, trace = traced(name)
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 3)
    weights = copy.deepcopy(model.state_dict())
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in trace.units if u.numel}
    actions = [Place.of(trace, rows, when=when)]
    for b in able(trace):
        program = Reschedule.of(trace, b, random_order(trace, b, rng, kept=0.6))
        actions += [program, Offload.of(trace, b, overlap=rng.random() < 0.5)]
    plan = finish(Nop(), dataclasses.replace(problem_for(trace), reads_gradients=when != "backward"), actions)
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer, 3) == expected
    assert harness.notes == []
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


@pytest.mark.parametrize(("name", "plainly"), [("tiny-llama", True), ("tiny-gpt2", False)])
def test_halves_run_as_one_function_where_no_op_is_random(name, plainly):
    """Without dropout nothing is looked up op by op, and the bits and bytes are those of the tests above."""
    model, batch, optimizer, trace = traced(name)
    layer = next(b for b in able(trace) if b.same_as is None and len(region(trace, b)[0]) > 20)
    ops, count = region(trace, layer)
    plan = finish(Nop(), problem_for(trace), [Reschedule.of(trace, layer, lazily(effects(ops), count))])
    with holdall.apply(plan, model, optimizer) as harness:
        train(model, batch, optimizer, 1)
        made = list(harness.policy(layer.name).runner._programs.values())
    assert [p.halves is not None and not p.is_compiled for p in made] == [plainly]


def test_a_part_that_is_replaced_is_noticed():
    """What a block consists of is looked at once; another child, or a frozen weight, makes it another block."""
    model, batch, _, trace = traced("tiny-llama")
    layer = next(b for b in able(trace) if len(region(trace, b)[0]) > 20)
    ops, count = region(trace, layer)
    plan = finish(Nop(), problem_for(trace), [Reschedule.of(trace, layer, lazily(effects(ops), count))])
    reference = copy.deepcopy(model)

    def change(model):
        block = model.get_submodule(layer.name)
        torch.manual_seed(5)
        other = torch.nn.Linear(block.mlp.down_proj.in_features, block.mlp.down_proj.out_features, bias=False)
        block.mlp.down_proj = other
        block.self_attn.q_proj.weight.requires_grad_(False)

    def gradients(model):
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        return {n: p.grad for n, p in model.named_parameters()}

    with holdall.apply(plan, model, None):
        gradients(model)
        change(model)
        got = gradients(model)
    change(reference)
    expected = gradients(reference)
    for name, grad in expected.items():
        assert grad is got[name] is None or torch.equal(grad, got[name]), name


def test_running_ops_again_and_again_holds_less():
    """Kept: the blocks' inputs alone. Made again once, a block is there whole; made again whenever it is needed, it is not."""
    model, batch = family("convnet")
    trace = cost_trace(holdall.trace(model, tuple(t.repeat(8, *[1] * (t.dim() - 1)) for t in batch)), machine())
    problem = problem_for(trace)
    once, often = [], []
    for b in able(trace):
        ops, count = region(trace, b)
        once.append(Reschedule.of(trace, b, lazily(effects(ops), count)))
        often.append(Reschedule.of(trace, b, random_order(trace, b, random.Random(0), kept=0.0, lost=1.0)))
    plain, first, second = (finish(Nop(), problem, actions).predicted for actions in ([], once, often))
    assert second.peak["cpu"] < first.peak["cpu"] < plain.peak["cpu"]
    assert second.recompute_seconds > first.recompute_seconds > 0


def test_nothing_is_held_when_backward_is_over():
    model, batch, _, trace = traced("tiny-gpt2")
    actions = []
    for b in able(trace):
        ops, count = region(trace, b)
        actions.append(Reschedule.of(trace, b, lazily(effects(ops), count)))
    plan = finish(Nop(), problem_for(trace), actions)
    with holdall.apply(plan, model, None) as harness:
        gc.disable()
        try:
            sizes = []
            for _ in range(3):
                model(**batch).loss.backward()
                model.zero_grad(set_to_none=True)
                sizes.append(harness.ledger.live)
        finally:
            gc.enable()
    assert sizes[1] == sizes[2]


def test_autocast_and_accumulation():
    """Casts are part of what is run again."""

    def loop(model, batch, optimizer):
        torch.manual_seed(1)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*batch) if isinstance(batch, tuple) else model(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    model, batch = family("tied")
    reference = copy.deepcopy(model)

    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(*batch) if isinstance(batch, tuple) else model(batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = holdall.trace(model, batch, optimizer=optimizer, loss=loss)
    actions = []
    for b in able(trace):
        ops, count = region(trace, b)
        actions.append(Reschedule.of(trace, b, lazily(effects(ops), count)))
    plan = finish(Nop(), problem_for(trace), actions)
    loop(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    with holdall.apply(plan, model, optimizer):
        loop(model, batch, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_block_that_has_changed_is_recomputed_whole_and_it_is_said():
    """An inner hook wants to be called."""

    def choose(trace):
        b = able(trace)[0]
        ops, count = region(trace, b)
        return [dataclasses.replace(Reschedule.of(trace, b, lazily(effects(ops), count)), ops="another")]

    model, batch, optimizer, trace = traced("tied")
    action = choose(trace)[0]
    with pytest.raises(holdall.errors.InvalidInput, match="other ops"):
        finish(Nop(), problem_for(trace), [action])
    right = dataclasses.replace(action, ops=Reschedule.of(trace, trace.block(action.block), action.backward).ops)
    plan = finish(Nop(), problem_for(trace), [right])
    reference = copy.deepcopy(model)
    calls = []
    inner = next(m for m in model.get_submodule(action.block).children())
    inner.register_forward_hook(lambda *_: calls.append(1))
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3), 2)
    with holdall.apply(plan, model, optimizer) as harness:
        got = train(model, batch, optimizer, 2)
    assert got == expected and calls
    assert any("recomputed as a whole" in n for n in harness.notes)


def test_another_batch_is_captured_anew():
    model, batch, optimizer, trace = traced("tiny-gpt2")
    b = able(trace)[0]
    ops, count = region(trace, b)
    plan = finish(Nop(), problem_for(trace), [Reschedule.of(trace, b, lazily(effects(ops), count))])
    reference = copy.deepcopy(model)
    short = {k: v[:, : v.shape[1] // 2] for k, v in batch.items()}
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    expected = [train(reference, b, other, 1) for b in (batch, short, batch)]
    with holdall.apply(plan, model, optimizer):
        got = [train(model, b, optimizer, 1) for b in (batch, short, batch)]
    assert got == expected


def test_retained_graphs_and_changed_inputs_are_refused():
    model, batch, _, trace = traced("tied")
    b = able(trace)[0]
    ops, count = region(trace, b)
    plan = finish(Nop(), problem_for(trace), [Reschedule.of(trace, b, lazily(effects(ops), count))])
    with holdall.apply(plan, model, None):
        loss = model(*batch) if isinstance(batch, tuple) else model(batch)
        loss.backward(retain_graph=True)
        with pytest.raises(holdall.Unsupported, match="second backward"):
            loss.backward()


# orders


IN_PLACE = [
    Effect((0,), (1,)),  # make
    Effect((1,), (2,)),  # read before the change
    Effect((1,), (), (1,)),  # change
    Effect((1, 2), (3,)),
    Effect((9, 3, 1), (10,)),  # backward
    Effect((10, 2), (11,)),
]


def test_ops_in_place_stay_together():
    assert groups(IN_PLACE[:4]) == [[0, 1, 2], [3]]
    assert lazily(IN_PLACE, 4) == [0, 1, 2, 3, 4, 5]
    assert not fault(IN_PLACE, 4, range(4), lazily(IN_PLACE, 4))


@pytest.mark.parametrize(
    ("forward", "backward", "why"),
    [
        ((0, 1, 2), (4, 5), "every op of the forward"),
        ((0, 1, 2, 3), (4,), "every op of the backward"),
        ((0, 1, 2, 3), (5, 4), "in order"),
        ((0, 1, 2, 3), (4, 5, 3), "end with"),
        ((0, 1, 2, 3), (0, 4, 5), "would not find"),
        ((0, 1, 2, 3), (1, 4, 5), "would not find"),
        ((1, 0, 2, 3), (4, 5), "would not find"),
        ((0, 1, 2, 3), (2, 4, 5), "would not find"),
    ],
)
def test_orders_that_would_compute_something_else_are_named(forward, backward, why):
    assert why in fault(IN_PLACE, 4, forward, backward)


def test_random_bits_of_a_family_are_the_same_through_run_both():
    def choose(trace):
        rng = random.Random(3)
        return [Reschedule.of(trace, b, random_order(trace, b, rng)) for b in able(trace)]

    same, _, harness, _, _ = run_both("convnet", choose)
    assert same and harness.notes == []


def test_a_block_that_is_given_a_cache_is_not_run_op_by_op():
    """Hugging Face models hand one to their layers where the call asks for it; training by default does without."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (4, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = {"input_ids": ids, "labels": ids, "use_cache": True}
    trace = cost_trace(holdall.trace(model, batch, optimizer=optimizer), machine())
    layers = [b for b in trace.blocks if b.kind == "LlamaDecoderLayer"]
    assert layers and all("Cache" in obstacle(trace, b) for b in layers)
    assert not any(a.name == "reschedule" and a.block in {b.name for b in layers} for a in smallest(trace).actions)


def smallest(trace):
    with pytest.raises(holdall.Infeasible) as refusal:
        holdall.plan(trace, budget=1, hardware=machine())
    return holdall.plan(trace, budget=refusal.value.smallest, hardware=machine())


class Positions(torch.nn.Module):
    """A convolution over time that returns a transposed view, as wav2vec2's."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(8, 8, 4, padding=2, groups=2)

    def forward(self, x):
        return torch.nn.functional.gelu(self.conv(x.transpose(1, 2))[:, :, :-1]).transpose(1, 2)


class Listening(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.positions, self.last = torch.nn.Linear(8, 8), Positions(), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.positions(self.first(x))).square().mean()


class Strides(TorchDispatchMode):
    """The strides of the gradients that reach `gelu_backward`: kernels may round otherwise for others."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "gelu_backward" in str(func):
            self.seen.append(args[0].stride())
        return func(*args, **(kwargs or {}))


def test_a_gradient_keeps_its_strides_where_a_block_returns_a_view():
    torch.manual_seed(0)
    model, x = Listening().train(), torch.randn(2, 15, 8)
    trace = holdall.trace(model, x, loss=lambda m, b: m(b))
    block = next(b for b in trace.blocks if b.name == "positions")
    ops, count = region(trace, block)
    plan = finish(Nop(), problem_for(trace), [Reschedule.of(trace, block, [count - 1, *range(count, len(ops))])])
    plain = copy.deepcopy(model)
    with Strides() as expected:
        plain(x).backward()
    with holdall.apply(plan, model, enforce=False) as harness, Strides() as found:
        model(x).backward()
    assert harness.notes == [] and found.seen == expected.seen == [(120, 1, 8)]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Framed(torch.nn.Module):
    """A convolution over time and a norm over channels, as in wav2vec2's feature extractor: its gradient comes transposed."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv1d(6, 6, 3, stride=2), torch.nn.LayerNorm(6)

    def forward(self, x):
        return torch.nn.functional.gelu(self.norm(self.conv(x).transpose(-2, -1)).transpose(-2, -1))


def by_ops(trace, blocks):
    """Blocks as programs whose backward first repeats the op before the last."""
    actions = []
    for block in blocks:
        ops, count = region(trace, block)
        actions.append(Reschedule.of(trace, block, [count - 2, *range(count, len(ops))]))
    return finish(Nop(), problem_for(trace), actions)


def check_gradients(model, x, plan, steps=3, *, tolerance=0.0):
    """Those of plain training, in every step: the first call of a program runs otherwise than later ones."""
    plain = copy.deepcopy(model)
    with holdall.apply(plan, model, enforce=False) as harness:
        for _ in range(steps):
            for each in (plain, model):
                each(x).square().mean().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)
    assert harness.notes == []


def test_what_is_made_of_a_gradient_with_other_strides_is_read_by_its_own_strides():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Framed(), Framed(), Framed()), torch.randn(2, 6, 63)
    trace = holdall.trace(model, x, loss=lambda m, b: m(b).square().mean())
    check_gradients(model, x, by_ops(trace, trace.blocks))


@torch.library.custom_op("holdall_tests::by_columns", mutates_args=())
def by_columns(x: torch.Tensor) -> torch.Tensor:
    """Twice the matrix, laid out by columns; its fake says by rows."""
    return (2 * x).t().contiguous().t()


by_columns.register_fake(torch.empty_like)
by_columns.register_autograd(lambda _, gradient: 2 * gradient)


class Columns(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 5)

    def forward(self, x):
        return self.inner(by_columns(x).t()).tanh().t()


def test_a_kernel_that_returns_other_strides_than_its_fake_is_found_out():
    """Views by the strides of the fake would read other elements. autograd chooses the form of a product by the strides, so the
    last bits may differ.
    """
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(5, 5), Columns(), Columns(), torch.nn.Linear(5, 5)), torch.randn(5, 5)
    trace = holdall.trace(model, x, loss=lambda m, b: m(b).square().mean())
    blocks = [b for b in trace.blocks if b.name in ("1", "2")]
    check_gradients(model, x, by_ops(trace, blocks), tolerance=1e-6)
