"""Rockmate (Zhao et al., ICML 2023, PMLR 202:42018): menus of programs inside blocks, rotor's search along the chain.

Claims reproduced: with nothing but "keep everything" on the menus it is rotor; with menus the search is optimal, lines being
taken at every depth; menus reach from running little again to nearly all, and no line beats another; its time lies between that
of the model solved as one graph and rotor's; less memory is never faster; identical blocks are solved once; real runs keep the
bits and the predicted peak.
"""

import copy
import random

import pytest
import torch

import holdall
from holdall.actions.reschedule import region
from holdall.cost.roofline import cost_trace
from holdall.planners.rockmate import Rockmate, worthwhile
from holdall.planners.rotor.table import Dropped, Form, Stage, Table, Taken
from holdall.planning.menus import kind_of
from holdall.simulator import simulate
from holdall.testing.contracts import problem_for, train
from holdall.testing.worlds import machine
from holdall.types import Choice

pytest.importorskip("scipy")


def gpt2(layers=6):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=layers, n_head=4, n_positions=32)
    config.loss_type = "ForCausalLM"
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 64, (8, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = {"input_ids": ids, "labels": ids}
    return model, batch, optimizer, cost_trace(holdall.trace(model, batch, optimizer=optimizer), machine())


def range_of(trace):
    plain = simulate(problem_for(trace), [])
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    return fixed, plain.peak["cpu"]


@pytest.fixture(scope="module")
def traced_gpt2():
    return gpt2()


# the search along the chain, against all schedules there are


def menu(*lines):
    """Forms of (held without the input and with the output, backward time, bytes that come and go in it)."""
    return lambda n: [Form(Taken(n, Choice(label=f"line {k}")), kept, ub, 0, ob) for k, (kept, ub, ob) in enumerate(lines)]


def schedules(chain, menus, s, t):
    """Every schedule of stages s..t, as the paper's two branches make them, with (least memory, time); nothing is pruned."""
    a = [*(stage.a for stage in chain), 0]
    stage = chain[s]
    whole = (stage.abar - a[s] + a[s + 1], stage.ub, stage.of, stage.ob)
    forms = [whole, *((f.kept, f.ub, f.of, f.ob) for f in menus[s])]
    for kept, ub, of, ob in forms:
        own = max(a[s + 1] + kept + of, a[s] + kept + ob)
        if s == t:
            yield own, stage.uf + ub
        else:
            for memory, seconds in schedules(chain, menus, s + 1, t):
                yield max(own, kept + memory, floor(chain, a, s, t)), stage.uf + ub + seconds
    for j in range(s + 1, t + 1):
        sweep = sum(chain[i].uf for i in range(s, j))
        inside = list(schedules(chain, menus, s, j - 1))
        for memory, seconds in schedules(chain, menus, j, t):
            for again, more in inside:
                yield max(floor(chain, a, s, t), a[j] + memory, again), sweep + seconds + more


def floor(chain, a, s, t):
    return a[t + 1] + max([a[s + 1] + chain[s].of, *(a[j] + a[j + 1] + chain[j].of for j in range(s + 1, t))])


@pytest.mark.parametrize("seed", range(12))
def test_the_search_equals_all_schedules_with_lines_of_menus_at_every_depth(seed):
    """Claim: the recurrence takes the least over the options of a block wherever it is run for its backward."""
    rng = random.Random(seed)
    chain = []
    for _ in range(3):
        a = rng.randint(1, 3)
        abar, of, ob = a + rng.randint(2, 9), rng.randint(0, 1), rng.randint(0, 3)
        chain.append(Stage(uf=float(rng.randint(1, 9)), ub=float(rng.randint(1, 9)), a=a, abar=abar, of=of, ob=ob))
    chain.append(Stage(uf=0.0, ub=0.0, a=1, abar=1))
    menus = [
        menu(*((rng.randint(1, 5), chain[n].ub + rng.randint(1, 6), rng.randint(0, 5)) for _ in range(2)))(n) for n in range(3)
    ]
    every = list(schedules(chain, [*menus, []], 0, 3))
    table = Table(chain, 30, menus=menus)
    taken = set()
    for m in range(31):
        best = min((seconds for memory, seconds in every if memory <= m), default=float("inf"))
        assert table.seconds(0, 3, m) == best
        if best < float("inf"):
            items = table.items(0, 3, m)
            taken |= {(isinstance(i, Taken), depth) for i, depth in walked(items)}
    assert (True, 0) in taken  # a line outside of dropped stretches


def walked(items, depth=0):
    for item in items:
        if isinstance(item, Dropped):
            yield from walked(item.items, depth + 1)
        else:
            yield item, depth


def test_lines_are_taken_inside_of_dropped_stretches_too():
    """Eight equal stages that hold 9 units, with one line that holds 2 and needs 3 more in backward."""
    chain = [Stage(uf=4.0, ub=4.0, a=1, abar=9) for _ in range(8)] + [Stage(uf=0.0, ub=0.0, a=1, abar=1)]
    plain, menued = Table(chain, 40), Table(chain, 40, menus=[menu((2, 8.0, 3))(n) for n in range(8)])
    assert (plain.stairs(0, 8)[0][0], menued.stairs(0, 8)[0][0]) == (11, 7)
    assert menued.seconds(0, 8, 11) < plain.seconds(0, 8, 11) < float("inf")
    items = menued.items(0, 8, 7)
    assert {depth for item, depth in walked(items) if isinstance(item, Taken)} > {0}


def test_without_menus_it_has_rotors_numbers():
    """Reference values of the published recurrence for eight equal stages, with an empty menu and with one that is no use."""
    chain = [Stage(uf=1.0, ub=1.0, a=1, abar=2) for _ in range(8)] + [Stage(uf=0.0, ub=0.0, a=1, abar=1)]
    for menus in ([], [menu((2, 1.0, 0))(n) for n in range(8)], [menu((9, 9.0, 9))(n) for n in range(8)]):
        table = Table(chain, 20, menus=menus)
        assert [table.seconds(0, 8, m) for m in range(3, 18)] == [
            float("inf"),
            44,
            29,
            25,
            23,
            22,
            21,
            20,
            20,
            19,
            19,
            18,
            18,
            17,
            16,
        ]


def test_menus_have_no_line_that_another_beats():
    forms = [
        Form(Taken(0, Choice(label="small")), 2, 9.0, 0, 3),
        Form(Taken(0, Choice(label="fast")), 4, 5.0, 0, 1),
        Form(Taken(0, Choice(label="beaten")), 4, 6.0, 1, 1),
        Form(Taken(0, Choice(label="the same")), 4, 5.0, 0, 1),
        Form(Taken(0, Choice(label="low")), 3, 9.0, 0, 0),
    ]
    assert [form.item.choice.label for form in worthwhile(forms)] == ["small", "low", "fast"]


class Equal(torch.nn.Module):
    """Results that are all worth the same per byte: minimum cuts keep all or none of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(16, 64) for _ in range(3))

    def forward(self, x):
        return x + sum(part(x).pow(2).sum(-1, keepdim=True) for part in (self.a, self.b, self.c))


def test_the_integer_program_finds_lines_that_cuts_do_not():
    """Claim: a menu reaches from keeping all to running all again in even steps, by Checkmate's program for each bound."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Equal(), Equal(), Equal())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(64, 16, requires_grad=True)
    trace = cost_trace(holdall.trace(model, x, optimizer=optimizer, loss=lambda m, b: m(b).sum()), machine())
    block = next(b for b in trace.blocks if b.kind == "Equal")

    def kept(choice):
        (order,) = choice.given
        ops, count = region(trace, block)
        again = {x for n in order if n < count for x in ops[n].writes}
        held = {x for op in ops[count:] for x in op.reads if block.first <= trace.tensors[x].born <= block.last} - again
        return sum(trace.tensors[x].nbytes for x in held)

    def bytes_held(menus):
        (lines,) = Rockmate(menus=menus, options=3).make_menus(problem_for(trace), [block]).values()
        return {kept(choice) for choice in lines}

    one = 64 * 64 * 4
    assert not {one, 2 * one} & bytes_held("cut")
    assert {one, 2 * one} <= bytes_held("checkmate")


def test_identical_blocks_are_solved_once_and_menus_trade_bytes_for_seconds(traced_gpt2):
    _, _, _, trace = traced_gpt2
    problem = problem_for(trace)
    blocks = [b for b in trace.blocks if b.saves and b.backward is not None]
    menus = Rockmate().make_menus(problem, blocks)
    layers = [b for b in blocks if b.kind == "GPT2Block"]
    kinds = {kind_of(b) for b in layers}
    assert len(layers) == 6 and len(kinds & set(menus)) == 1
    assert len(menus) <= len({kind_of(b) for b in blocks}) < len(blocks)
    lines = menus[kinds.pop()]
    count = layers[0].last - layers[0].first + 1
    ran = [sum(n < count for n in line.on(trace, layers[0])[0].backward) for line in lines]
    assert max(ran) >= count - 3 and min(ran) < count / 3  # nearly everything again, and little


def test_it_is_never_slower_than_rotor_and_less_memory_is_never_faster(traced_gpt2):
    model, batch, _, trace = traced_gpt2
    fixed, plain = range_of(trace)
    before = 0.0
    for share in (100, 75, 50, 30):
        budget = fixed + (plain - fixed) * share // 100
        mine = holdall.plan(trace, planner="rockmate", menus="cut", budget=budget, hardware=machine(), allow=["recompute"])
        rotor = holdall.plan(trace, planner="rotor", budget=budget, hardware=machine(), allow=["recompute"])
        assert mine.predicted.seconds <= rotor.predicted.seconds
        assert mine.predicted.seconds >= before
        before = mine.predicted.seconds
    assert model is not None and batch


def test_the_model_as_one_graph_is_never_slower():
    """A short chain of small blocks, by the exact solver: Rockmate sees the chain and the blocks, not what lies across."""

    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)) for _ in range(3)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.pow(2).mean()

    torch.manual_seed(0)
    model, x = Stack(), torch.randn(256, 16)
    trace = cost_trace(holdall.trace(model, x), machine())
    fixed, plain = range_of(trace)
    for share in (85, 72):
        budget = fixed + (plain - fixed) * share // 100
        mine = holdall.plan(trace, planner="rockmate", budget=budget, hardware=machine(), allow=["recompute"])
        one = holdall.plan(trace, planner="checkmate", budget=budget, gap=1e-4, hardware=machine(), allow=["recompute"])
        assert one.predicted.seconds <= mine.predicted.seconds * 1.0001


@pytest.mark.parametrize(
    ("share", "options"), [(75, {"options": 2, "time_limit": 0.2}), (20, {"menus": "cut"})], ids=["solved", "in replays"]
)
def test_a_real_run_keeps_the_bits_and_the_peak(traced_gpt2, share, options):
    """The smaller budget is below rotor's smallest: blocks run by programs inside of dropped stretches."""
    model, batch, _, trace = traced_gpt2
    model = copy.deepcopy(model)
    fixed, plain = range_of(trace)
    budget = fixed + (plain - fixed) * share // 100
    plan = holdall.plan(trace, planner="rockmate", budget=budget, hardware=machine(), allow=["recompute"], **options)
    assert any(a.name == "recompute" and a.programs for a in plan.actions) == (share == 20)
    reference = copy.deepcopy(model)
    expected = train(reference, batch, torch.optim.SGD(reference.parameters(), lr=1e-2), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with holdall.apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer, 2) == expected
    assert max(harness.step_peaks) == plan.predicted.peak["cpu"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_unknown_menus_are_refused():
    with pytest.raises(holdall.errors.HoldallError, match="menus of rockmate"):
        holdall.plan(gpt2(1)[3], planner="rockmate", menus="soup", budget="1GiB", hardware=machine())
