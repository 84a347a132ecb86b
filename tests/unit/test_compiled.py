"""Programs of blocks through a back end of `torch.compile`: the bits of single ops by eager kernels, and no bytes more."""

import copy
import importlib.util
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.cost.roofline import cost_trace
from holdall.planners.auto import Auto
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.planning.to_programs import by_programs
from holdall.runtime.programs import compiled
from holdall.runtime.programs.capture import capture, tensors_of
from holdall.runtime.programs.compiled import Compiler
from holdall.runtime.programs.fx_function import Half
from holdall.runtime.programs.program import Program
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import family, machine
from holdall.types.program import lazily


def programs(trace, keep=0.0):
    """Every block that can be, with some results kept and the others made again."""
    found, rng = [], random.Random(0)
    for block in trace.blocks:
        if block.saves and block.backward is not None and not obstacle(trace, block):
            ops, count = region(trace, block)
            kept = frozenset(x for op in ops[:count] for x in op.writes if rng.random() < keep)
            found.append(Reschedule.of(trace, block, lazily(effects(ops), count, kept)))
    return found


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def without_dropout(name):
    """A model of a family, its batch and its trace."""
    model, batch = family(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if name not in _TRACES:
        _TRACES[name] = cost_trace(holdall.trace(model, batch, optimizer=adamw(model)), machine())
    return model, batch, _TRACES[name]


_TRACES = {}


def layers_of(trace):
    return [a for a in programs(trace) if "layers." in a.block]


def run_both(model, batch, plan, *, backend, steps=2):
    """Losses and weights without a plan and under the compiled one."""
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference), steps)
    optimizer = adamw(model)
    with holdall.apply(plan, model, optimizer, compile=backend or False) as harness:
        got = train(model, batch, optimizer, steps)
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    return got == expected and same, harness, (got, expected)


# whole models


@pytest.mark.parametrize(("name", "keep"), [("tiny-llama", 0.6), ("tiny-gpt2", 0.0)])
def test_compiled_programs_on_eager_kernels_give_the_same_bits_and_the_predicted_peak(name, keep):
    pytest.importorskip("transformers")
    model, batch, trace = without_dropout(name)
    layers = [a for a in programs(trace, keep) if a.block.rpartition(".")[2].isdigit()]
    plan = finish(Nop(), problem_for(trace), layers[:2])
    same, harness, _ = run_both(model, batch, plan, backend="aot_eager")
    assert same and len(layers) > 1
    assert harness.notes == ["blocks are compiled by `aot_eager`; predicted times and peaks are those of eager kernels"]
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]  # what is kept is freed as it is used


def test_equal_blocks_are_compiled_once():
    model, batch, trace = without_dropout("tied")
    layers = layers_of(trace)
    same, harness, _ = run_both(model, batch, finish(Nop(), problem_for(trace), layers), backend="aot_eager", steps=1)
    assert same and len(layers) > 2
    assert harness.compiler.count == 2  # a forward and a backward
    other = [*layers[:-1], Reschedule.of(trace, trace.block(layers[-1].block), layer_order(trace, layers[-1].block))]
    same, harness, _ = run_both(model, batch, finish(Nop(), problem_for(trace), other), backend="aot_eager", steps=1)
    assert same and harness.compiler.count == 4  # another order is another function


def layer_order(trace, block):
    """Nothing made again."""
    ops, count = region(trace, trace.block(block))
    return range(count, len(ops))


@pytest.mark.parametrize(("name", "why"), [("tied", "random ops"), ("convnet", "change buffers")])
def test_what_cannot_be_compiled_runs_op_by_op_and_it_is_said_once(name, why):
    model, batch, _, trace = traced(name)
    actions = programs(trace)
    assert len(actions) > 2
    plan = finish(Nop(), problem_for(trace), actions)
    same, harness, _ = run_both(model, batch, plan, backend="aot_eager")
    assert same and harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert sum(why in note for note in harness.notes) == 1


def test_a_back_end_that_fails_is_asked_once_and_named(monkeypatch):
    asked = []

    def fail(module, inputs):
        asked.append(module.code)
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: fail)
    model, batch, trace = without_dropout("tied")
    layers = layers_of(trace)
    same, harness, _ = run_both(model, batch, finish(Nop(), problem_for(trace), layers), backend="aot_eager")
    assert same and len(asked) == 1
    assert [note for note in harness.notes if "no such kernel)" in note and "op by op" in note] == harness.notes


@pytest.mark.parametrize("half", [0, 1], ids=["forward", "backward"])
def test_a_function_that_fails_at_its_first_call_costs_speed_and_not_the_run(monkeypatch, half):
    """For all blocks that share it, and although it has let go of what it was given."""
    honest, made, called = torch._dynamo.lookup_backend("aot_eager"), [], []

    def fail(boxed):
        boxed.clear()
        called.append(half)
        raise RuntimeError("no such kernel\nand more")

    def compile_once(*args):
        made.append(honest(*args))
        return fail if len(made) == half + 1 else made[-1]

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: compile_once)
    model, batch, trace = without_dropout("tied")
    plan = finish(Nop(), problem_for(trace), layers_of(trace))
    same, harness, _ = run_both(model, batch, plan, backend="aot_eager")
    assert same and called == [half] and harness.compiler.count == 1
    assert harness.step_peaks[-1] <= plan.predicted.peak["cpu"]
    (note,) = [note for note in harness.notes if "(RuntimeError: no such kernel): such blocks run op by op" in note]
    (fault,) = harness.compiler.faults
    assert "first call" in note and "in fail" in fault


def test_an_embedding_whose_gradient_is_added_to_that_of_a_head_in_pieces_is_no_program():
    """The head makes its part in forward, and autograd adds the other outside of the block."""
    pytest.importorskip("transformers")
    model, batch = family("tiny-gpt2")
    trace = cost_trace(holdall.trace(model, batch, optimizer=adamw(model), head=8), machine())
    problem = problem_for(trace)
    plan = by_programs(problem, holdall.plan(trace, planner="nop", budget=problem.budget, hardware=machine()))
    programmed = {a.block for a in plan.actions if isinstance(a, Reschedule)}
    assert {"transformer.h.0", "transformer.ln_f"} < programmed and "transformer.wte" not in programmed
    optimizer = adamw(model)
    with holdall.apply(plan, model, optimizer) as harness:
        train(model, batch, optimizer, 1)
    assert not [note for note in harness.notes if "as a whole" in note]


def test_streamed_weights_are_given_at_every_call():
    """They lie elsewhere at every call, and are updated in backward as their gradients come."""
    model, batch, trace = without_dropout("tied")
    layers = layers_of(trace)
    streamed = dict.fromkeys((a.block for a in layers), ("streamed", "host"))
    place = Place.of(trace, streamed, when="backward")
    plan = finish(Nop(), replace(problem_for(trace), reads_gradients=False), [place, *layers])
    same, harness, _ = run_both(model, batch, plan, backend="aot_eager", steps=3)
    assert same and harness.compiler.count == 2
    _, plain, _ = run_both(without_dropout("tied")[0], batch, plan, backend=None, steps=3)
    assert harness.step_peaks == plain.step_peaks


def test_fit_compiles_and_names_what_it_cannot():
    model, batch = family("tied")
    with pytest.raises(holdall.InvalidInput, match="did you mean `inductor`"):
        holdall.fit(model, adamw(model), batch, hardware=machine(), compile="indutor")
    with holdall.fit(model, adamw(model), batch, hardware=machine(), compile="aot_eager", allow=["offload"]) as harness:
        assert harness.notes == ["nothing is compiled: the plan runs no block op by op"]
    with holdall.fit(model, adamw(model), batch, hardware=machine()) as harness:
        assert harness.compiler is None and harness.notes == []


def test_fit_compiles_blocks_that_are_kept_too():
    model, batch, _ = without_dropout("tiny-llama")
    reference = copy.deepcopy(model)
    expected = train(reference, batch, adamw(reference), 2)
    optimizer = adamw(model)
    with holdall.fit(model, optimizer, batch, hardware=machine(), compile="aot_eager") as harness:
        assert train(model, batch, optimizer, 2) == expected
    kinds = 4  # embedding, layer, norm, head
    assert sum(a.name == "reschedule" for a in harness.plan.actions) == 7 and harness.compiler.count == 2 * kinds


@pytest.mark.parametrize("planner", ["auto", "chen"])
def test_a_whole_plan_can_be_had_as_programs(planner):
    """Blocks that it keeps make nothing again, those that it recomputes whole make everything again."""
    model, batch, trace = without_dropout("tied")
    problem = problem_for(trace)
    planned = holdall.plan(trace, planner=planner, budget=problem.budget, hardware=machine())
    plan = by_programs(problem, planned)
    assert plan.count()["reschedule"] >= 3 and plan.planner == planner
    assert plan.predicted.peak["cpu"] <= planned.predicted.peak["cpu"]
    assert plan.predicted.seconds == pytest.approx(planned.predicted.seconds)
    same, harness, _ = run_both(model, batch, plan, backend="aot_eager", steps=1)
    assert same and harness.compiler.count


@pytest.mark.parametrize("can", [True, False])
def test_no_block_is_sent_away_where_that_can_be_done_without(can):
    model, batch, trace = without_dropout("tiny-llama")
    problem = problem_for(trace)
    away = [Offload.of(trace, block, overlap=False) for block in trace.blocks if block.saves][:2]
    planned = finish(Auto(), problem, away)
    assert planned.count()["offload"] == 2
    plan = by_programs(problem if can else replace(problem, budget={**problem.budget, "cpu": 1}), planned)
    assert ("offload" in plan.count()) != can
    if can:
        assert plan.count()["reschedule"] == 7
        same, harness, _ = run_both(model, batch, plan, backend="aot_eager", steps=1)
        assert same and harness.compiler.count


# single blocks


class Block(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.a, self.b, self.work = nn.Linear(8, 8), nn.Linear(8, 8), work

    def forward(self, *args):
        return self.work(self, *args)


def mlp(self, x):
    return x + self.b(nn.functional.gelu(self.a(x)))


def in_place(self, x):
    y = self.a(x)
    y[..., :2] *= 2
    return self.b(y.tanh_()).add_(1)


def in_place_through_a_view(self, x):
    """Without bias, the product's result is first seen through a view that does not own to be one."""
    y = nn.functional.linear(x, self.a.weight)
    y.mul_(3)
    return self.b(y.view(-1, 8).sin()) + y.view(-1, 8)


def views(self, x):
    q, k = self.a(x).chunk(2, -1)
    return (q @ k.transpose(1, 2)).softmax(-1) @ self.b(x).view(x.shape[0], -1, 8), k.permute(2, 0, 1)


class Spoils(torch.autograd.Function):
    """Its backward changes what it has saved."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y + 1

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0].mul_(ctx.saved_tensors[0]).neg_().add_(1) * g


def spoils(self, x):
    return self.b(Spoils.apply(self.a(x)))


def pair(self, q, k):
    return self.a(q) * k.sigmoid() + self.b(k)


def given(*shape):
    return torch.randn(*shape).requires_grad_()


def halves_of_one(seed=0, start=0):
    """Two inputs in one storage."""
    torch.manual_seed(seed)
    both = torch.randn(2 + start, 3, 16)[start:].requires_grad_()
    return (both[..., :8], both[..., 8:]), both


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else list(out)


def grads(run, args, leaves, end):
    found = flat(run(*args))
    end(found).backward()
    taken = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    return [*(o.detach() for o in found), *(g for g in taken if g is not None)]


def total(outputs):
    return sum((o * torch.arange(float(o.numel())).view(o.shape)).sum() for o in outputs)


def program_of(block, args, *, lazy=True, backend="aot_eager", notes=None):
    graph = capture(block, block.forward, args, {})
    does = [compiled_effect(op) for op in graph.ops]
    order = lazily(does, graph.forward) if lazy else range(graph.forward, len(graph.ops))
    compiler = None if backend is None else Compiler(backend, (notes if notes is not None else []).append)
    return Program(graph, range(graph.forward), order, compiler)


def compiled_effect(op):
    from holdall.types.program import Effect

    return Effect(op.reads, tuple(s for _, s in op.makes), op.mutates)


def runs(program, block):
    return lambda *args: program([*args, *(t for _, t in tensors_of(block))])


@pytest.mark.parametrize(
    ("work", "lazy"), [(mlp, True), (in_place, True), (in_place_through_a_view, True), (views, False), (spoils, False)]
)
def test_a_block_gives_the_same_bits(work, lazy):
    torch.manual_seed(0)
    block, x = Block(work), given(2, 3, 8)
    leaves = [x, *block.parameters()]
    program = program_of(block, (x,), lazy=lazy)
    assert program.halves is not None
    expected = grads(block, (x,), leaves, total)
    for _ in range(2):
        got = grads(runs(program, block), (x,), leaves, total)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(expected, got, strict=True))


def test_inputs_in_one_storage_that_begins_elsewhere():
    torch.manual_seed(0)
    block = Block(pair)
    program = program_of(block, halves_of_one()[0])
    for start in (0, 5):
        args, both = halves_of_one(start, start)
        leaves = [both, *block.parameters()]
        both.retain_grad()
        expected = grads(block, args, leaves, total)
        args, both = halves_of_one(start, start)
        leaves[0] = both
        both.retain_grad()
        got = grads(runs(program, block), args, leaves, total)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


ENDS = {
    "expanded": lambda outputs: outputs[0].sum(),
    "a piece": lambda outputs: total([torch.cat([torch.ones(1, 3, 8), outputs[0]])]),
    "turned": lambda outputs: total([outputs[0].transpose(1, 2).contiguous()]),
}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("end", ENDS)
def test_gradients_may_lie_in_memory_otherwise(end, backend):
    """Looked at by the strides of the captured ones, they gave other numbers."""
    torch.manual_seed(0)
    block, x = Block(mlp), given(2, 3, 8)
    leaves = [x, *block.parameters()]
    program = program_of(block, (x,), backend=backend)
    expected = grads(block, (x,), leaves, ENDS[end])
    got = grads(runs(program, block), (x,), leaves, ENDS[end])
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_forward_without_backward_leaves_nothing(backend):
    block, x = Block(lambda self, x: self.a(x).tanh()), given(2, 3, 8)
    out = runs(program_of(block, (x,), backend=backend), block)(x)
    storage = StorageWeakRef(out.untyped_storage())
    del out
    assert storage.expired()  # without the garbage collector


def test_results_that_lie_otherwise_are_put_right():
    def odd(boxed):
        (x,) = boxed
        boxed.clear()
        return [x, (x * 2).t(), (x.repeat(2, 1) * 3)[2:], x * 4]

    x = torch.randn(2, 2)
    function = compiled.Function(odd, [compiled.StorageLayout.of(x)] * 4, pytest.fail)
    for _ in range(2):
        found = function([x])
        assert all(compiled.StorageLayout.of(t) == compiled.StorageLayout.of(x) and not t.storage_offset() for t in found)
        assert len({t.untyped_storage()._cdata for t in (x, *found)}) == 5
        assert torch.equal(found[1], (x * 2).t()) and torch.equal(found[2], x * 3)


def scaled(self, x):
    """The gradients of its biases are sums that keep their dimensions, seen through views."""
    return x * self.a.bias + self.b(x)[:, :2].sum(1, keepdim=True) * self.b.bias


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "squeezed"])
def test_sums_that_come_without_their_dimensions_are_put_right(monkeypatch, flat):
    """As from inductor of torch 2.11 on a GPU, where rows and columns of the same tensor are added up by one kernel."""
    honest, seen = torch._dynamo.lookup_backend("aot_eager"), []

    def without_ones(module, inputs):
        run = honest(module, inputs)

        def lossy(boxed):
            found = run(boxed)
            seen.extend(t.shape for t in found if t.dim() == 3 and t.shape[:2] == (1, 1))
            return [(t.flatten() if flat else t.squeeze()) if 1 in t.shape else t for t in found]

        return lossy

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: without_ones)
    torch.manual_seed(0)
    block, x, notes = Block(scaled), given(2, 3, 8), []
    leaves = [x, *block.parameters()]
    program = program_of(block, (x,), notes=notes)
    expected = grads(block, (x,), leaves, total)
    for _ in range(2):
        got = grads(runs(program, block), (x,), leaves, total)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(expected, got, strict=True))
    assert seen and not [note for note in notes if "op by op" in note]


def half_of(run, notes):
    """Of one function that takes storage 0, which nobody wants afterwards, and gives storage 1."""
    layout = compiled.StorageLayout.of(torch.empty(2, 3))
    function = compiled.Function(run, [layout], notes.append)
    return Half(function=function, takes=(compiled.Ref(0),), gives=(1,), lets_go=(0,))


def look(ref, values):
    return values[ref.slot]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, holdall.OverBudget])
def test_where_there_is_no_room_a_first_call_does_not_hold_what_it_is_given(error):
    expired = []

    def greedy(boxed):
        storage = StorageWeakRef(boxed[0].untyped_storage())
        boxed.clear()
        expired.append(storage.expired())
        if not expired[-1]:
            raise error("too much")
        return [torch.ones(2, 3)]

    values, notes = {0: torch.zeros(2, 3)}, []
    half = half_of(greedy, notes)
    assert half.run(values, look) and list(values) == [1] and not notes
    values[0] = torch.zeros(2, 3)
    assert half.run(values, look)
    assert expired == [False, True, True]  # from the second call on it is as it was meant


def test_results_of_another_shape_are_refused():
    values, errors = {0: torch.zeros(2, 3)}, []
    half = half_of(lambda boxed: [torch.ones(3, 2)], errors)
    assert not half.run(values, look) and list(values) == [0]
    assert "[3, 2] instead of [2, 3]" in str(errors[0])
    assert not half.run(values, look) and len(errors) == 1


def test_without_the_registry_of_back_ends_the_frontend_is_used(monkeypatch):
    monkeypatch.delattr(torch._dynamo, "lookup_backend")
    torch.manual_seed(0)
    block, x = Block(mlp), given(2, 3, 8)
    leaves = [x, *block.parameters()]
    program = program_of(block, (x,))
    expected = grads(block, (x,), leaves, total)
    got = grads(runs(program, block), (x,), leaves, total)
    assert program.halves is not None
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="inductor needs a C++ compiler on a CPU")
def test_fused_kernels_are_close_and_nothing_is_left_behind(tmp_path, monkeypatch):
    """The tolerance is the documented one."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where inductor puts its caches
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)  # else it tries what vectors the compiler knows
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False)  # longer than four small kernels
    configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
    before = [c.shallow_copy_dict() for c in configs], dict(os.environ), torch.get_rng_state()
    torch.manual_seed(0)
    block, x = Block(mlp), given(2, 3, 8)
    leaves = [x, *block.parameters()]
    state, notes = torch.get_rng_state(), []
    program = program_of(block, (x,), backend="inductor", notes=notes)
    expected = grads(block, (x,), leaves, total)
    got = grads(runs(program, block), (x,), leaves, total)
    assert program.halves is not None and "inductor" in notes[0]
    for a, b in zip(expected, got, strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()
        assert a.stride() == b.stride()
    assert torch.equal(torch.get_rng_state(), state)
    assert ([c.shallow_copy_dict() for c in configs], dict(os.environ)) == before[:2]


def test_the_benchmark_holds_compiled_beside_compiled_and_says_where_it_failed(capsys):
    path = Path(__file__).parents[2] / "benchmarks" / "recompute_on_gpu.py"
    spec = importlib.util.spec_from_file_location("recompute_on_gpu", path)
    bench = sys.modules["recompute_on_gpu"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(bench)
        peers = [
            {"kind": "peer", "name": "compile", "overhead_over": f"compile, ratio 1{of}", "share": 0.5, "overhead": 0.1}
            for of in ("", ", aot_eager")
        ]
        ours = {"name": "auto", "setting": "50%", "share": 0.5, "overhead": 0.05, "measured_peak": 40}
        rows = [
            *({**peer, "measured_peak": 40} for peer in peers),
            {**ours, "kind": "planner", "overhead_over": "eager, plain"},
            {**ours, "kind": bench.PROGRAMS, "overhead_over": "auto, 100%, compiled programs"},
            {**ours, "kind": "planner", "overhead_over": "eager, plain, whole head"},
        ]
        eager, also, compiled_row = bench.verdict(rows)
        assert "aot_eager" not in eager and "aot_eager" in also
        assert "compiled programs" in compiled_row and "aot_eager" not in compiled_row
        assert bench._label({**rows[3], "setting": "100%"}) == rows[3]["overhead_over"]
        assert bench.failed(holdall.Unsupported("not so")) == {"status": "failed", "why": "not so"}
        assert not capsys.readouterr().err
        try:
            torch.empty_strided((2,), (4, 2, 1))
        except RuntimeError as error:
            assert "dimensionality" in bench.failed(error)["why"]
        assert "torch.empty_strided((2,), (4, 2, 1))" in capsys.readouterr().err
    finally:
        del sys.modules["recompute_on_gpu"]
