"""Memo (arXiv 2407.12117): alpha, the division of products by tokens, addresses, and plans against plain training."""

import copy
import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import holdall
from holdall.actions.recompute_rows import RecomputeRows, products
from holdall.cost.roofline import cost_trace
from holdall.errors import InvalidInput
from holdall.planners.memo import LAST, Memo, largest_alpha, layers_of, lifetimes, planned_addresses, program_of, sizes_of
from holdall.planners.memo.addresses import Life, best_fit, in_two_levels, live_bytes, solve
from holdall.planning.finish import finish
from holdall.runtime.activations.recompute_rows import RowEntry, with_first_rows
from holdall.simulator import close, lower, simulate
from holdall.testing.chaos import chaos
from holdall.testing.contracts import check_run, problem_for, train, trained_plainly
from holdall.testing.stand_ins import no_solver
from holdall.testing.worlds import family, machine
from holdall.types import Run, Wait

NAMES = ["tied", "tiny-gpt2", "tiny-llama", "tiny-bert"]


def test_alpha_is_the_closed_form_of_the_paper():
    """Check (1) of the catalogue, with its numbers; the ends, and alpha against a search."""
    assert largest_alpha(always=2, other=14, hidden=9, host=1e9, layers=30) == 0.5
    assert largest_alpha(always=2, other=14, hidden=9, host=150, layers=32 - LAST) == pytest.approx(0.214, abs=5e-4)
    assert largest_alpha(always=2, other=14, hidden=100, host=1e9, layers=30) == 1
    assert largest_alpha(always=2, other=14, hidden=1, host=1e9, layers=30) == 0
    rng = random.Random(0)
    for _ in range(100):
        always, other, hidden, host, layers = (rng.randint(1, 30) for _ in range(5))
        fits = [n for n in range(1001) if always + n / 1000 * other <= min(hidden, 20 * host / layers)]
        found = largest_alpha(always=always, other=other, hidden=hidden, host=20 * host, layers=layers)
        assert found == pytest.approx(max(fits, default=0) / 1000, abs=1.1e-3)


# addresses


def random_lives(rng, count):
    lives = []
    for _ in range(count):
        first = rng.randint(0, 6)
        lives.append(Life(rng.randint(1, 9), first, first + rng.randint(0, 4)))
    return lives


def brute_force(lives):
    """Every order of the tensors, each put as low as it goes: one of them is optimal."""
    best = 10**9
    for order in itertools.permutations(range(len(lives))):
        at = {}
        for n in order:
            at[n] = max((at[m] + lives[m].nbytes for m in at if lives[m].meets(lives[n])), default=0)
        best = min(best, max(at[n] + lives[n].nbytes for n in at))
    return best


def is_legal(lives, placed):
    ends = [a + x.nbytes for a, x in zip(placed.addresses, lives, strict=True)]
    apart = (
        ends[i] <= placed.addresses[j] or ends[j] <= placed.addresses[i]
        for i, j in itertools.combinations(range(len(lives)), 2)
        if lives[i].meets(lives[j])
    )
    return all(apart) and placed.peak == max(ends)


@pytest.mark.parametrize("seed", range(3))
def test_the_program_for_addresses_equals_brute_force(seed):
    """Check (2): never below the bytes that are alive, never above best fit, and optimal for up to six tensors."""
    pytest.importorskip("scipy")
    rng = random.Random(seed)
    gained = 0
    for _ in range(25):
        lives = random_lives(rng, rng.randint(1, 6))
        found, fit = solve(lives), best_fit(lives)
        assert is_legal(lives, found) and is_legal(lives, fit)
        assert live_bytes(lives) <= found.peak == brute_force(lives) <= fit.peak
        gained += found.peak < fit.peak
    assert gained or seed


def test_the_program_is_asked_only_where_best_fit_may_be_bettered_and_tensors_are_few():
    """Lives for which best fit takes more than is alive, and up to 41 of them; the others come one after the other."""
    lives = next(x for seed in range(99) if best_fit(x := random_lives(random.Random(seed), 6)).peak > live_bytes(x))
    asked = []
    with no_solver(asked):
        assert solve([Life(5, 0, 3), Life(4, 2, 6)]).peak == 9 and not asked
        for more in (34, 35):
            assert solve([*lives, *(Life(1, 100 + n, 100 + n) for n in range(more))]).peak == best_fit(lives).peak
            assert len(asked) == 1


def test_two_levels_are_legal_and_lose_little():
    """Equal layers are solved once; tensors of one layer share its block of memory, also between layers."""
    rng = random.Random(1)
    layer = random_lives(rng, 6)
    end = max(x.last for x in layer) + 1
    layers = [[Life(x.nbytes, x.first + n * end, x.last + n * end) for x in layer] for n in range(4)]
    rest = [Life(5, 0, 4 * end), Life(3, end, 3 * end)]
    placed = in_two_levels(layers, rest)
    every = [*rest, *itertools.chain.from_iterable(layers)]
    assert is_legal(every, placed._replace(peak=max(a + x.nbytes for a, x in zip(placed.addresses, every, strict=True))))
    assert live_bytes(every) <= placed.peak <= 8 + solve(layer).peak


def test_addresses_of_a_real_step_cover_its_bytes():
    problem = problem_for(traced("tied"), overlap=True)
    actions = holdall.plan(traced("tied"), planner="memo", hardware=machine(overlap=True), alpha=0.5).actions
    layers, rest = lifetimes(problem, actions)
    before = sum(t.nbytes for t in traced("tied").tensors.values() if t.born < 0)
    every = [*rest, *itertools.chain.from_iterable(layers)]
    assert sum(map(bool, layers)) > 4
    beyond = simulate(problem, actions).peak["cpu"] - before
    assert beyond <= live_bytes(every) < 1.01 * beyond  # a scalar that was there before the step is replaced in it
    assert live_bytes(every) <= planned_addresses(problem, actions).peak <= 1.3 * live_bytes(every)


# rows


@cache
def traced(name):
    model, batch = family(name)
    return holdall.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


@cache
def costed(name):
    return cost_trace(traced(name), machine())


def planned(name, **options):
    return holdall.plan(traced(name), planner="memo", hardware=machine(overlap=True), **options)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_training_has_the_same_bits_for_every_alpha(name, alpha):
    """Check (4), in fp32; the peak and the bytes on the link are those that were predicted."""
    plan = planned(name, alpha=alpha)
    rows = [a for a in plan.actions if isinstance(a, RecomputeRows)]
    assert len(rows) == len(layers_of(traced(name))) - LAST
    assert all(bool(a.ops) == (alpha > 0) for a in rows)
    harness = check_run(name, plan)
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.measured().traffic == plan.predicted.traffic


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(48, 16)
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack():
    torch.manual_seed(0)
    return Stack().double(), torch.randn(1, 64, 16, dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_gradients_of_one_long_sequence_in_fp64_have_the_same_bits(alpha):
    """Check (4): attention runs once, and the products of the layers that leave on (1 - alpha) of the rows."""
    model, batch = stack()
    expected = copy.deepcopy(model)
    expected(batch).backward()
    plan = holdall.plan(holdall.trace(model, batch), planner="memo", hardware=machine(overlap=True), alpha=alpha)
    counts = []
    for _ in range(2):  # in the first step the bits of shorter products are compared
        model.zero_grad()
        with holdall.apply(plan, model, None), Counting() as counting:
            model(batch).backward()
        counts.append(counting)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert counts[1].calls[f"{attention}.default"] == counts[1].calls[f"{attention}_backward.default"] == 5


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Verdict(dict):
    """Knows about every product whether shorter ones have its bits."""

    def __init__(self, verdict):
        super().__init__()
        self.verdict = verdict

    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        return self.verdict


@pytest.mark.parametrize("verdict", [True, False, None], ids=["same", "differs", "compared"])
@pytest.mark.parametrize("bias", [None, 1, 2], ids=["mm", "row added", "matrix added"])
def test_a_product_is_put_together_from_known_rows_and_the_others(verdict, bias):
    """Known rows of another value show where they are used; where bits would differ, the whole product is computed."""
    known = {} if verdict is None else Verdict(verdict)
    left, right = torch.randn(12, 5), torch.randn(5, 7)
    args = [left, right] if bias is None else [torch.randn(7) if bias == 1 else torch.randn(12, 7), left, right]
    product = torch.ops.aten.mm.default if bias is None else torch.ops.aten.addmm.default
    whole = product(*args)
    expected = whole.clone()
    before = whole.clone()
    before[:4] = 1.5
    for _ in range(2):
        found = with_first_rows(product, args, RowEntry(before, 4, None), known)
        is_whole = not (next(iter(known.values())) if verdict is None else verdict)
        assert torch.equal(found[:4], expected[:4] if is_whole else before[:4])
        assert torch.allclose(found[4:], expected[4:])
        assert verdict is not None or torch.equal(found[4:], expected[4:])
    assert verdict is not None or len(known) == 1  # compared once


def test_the_rows_of_a_layer_have_left_before_the_layer_after_next_begins():
    """Check (3): of two buffers, a layer may write to one only when the rows in it are on the host."""
    trace = traced("tiny-llama")
    actions = planned("tiny-llama", alpha=0.5).actions
    schedule = lower(problem_for(trace, overlap=True), actions)
    layers = layers_of(trace)
    waited, steps = {}, list(close(schedule))
    for n, step in enumerate(steps):
        if isinstance(step, Wait):
            for x in step.tensors:
                waited.setdefault(x, n)
    begins = {s.op: n for n, s in enumerate(steps) if isinstance(s, Run) and not s.again}
    for block, after_next in zip(layers[:-LAST], layers[2:], strict=True):
        results = [op.writes[0] for op in products(trace, program_of(trace, block)).values()]
        assert results and all(waited[x] < begins[after_next.first] for x in results)


@pytest.mark.parametrize("name", ["tied", "tiny-gpt2"])
def test_late_copies_change_nothing(name):
    """Check (3): rows in flight are poisoned until they have arrived, and no bit changes."""
    with chaos(seed=4):
        check_run(name, planned(name, alpha=0.6))


@pytest.mark.parametrize("late", [False, True], ids=["rows first", "rows later"])
def test_rows_may_move_at_other_moments_than_the_tensors_that_the_program_keeps(late):
    actions = []
    for action in planned("tiny-gpt2", alpha=0.5).actions:
        at_once = isinstance(action, RecomputeRows) != late
        actions.append(replace(action, lag=False, fetch="") if at_once else action)
    plan = finish(Memo(), problem_for(traced("tiny-gpt2"), overlap=True), actions)
    assert len({a.lag for a in plan.actions}) == 2
    harness = check_run("tiny-gpt2", plan)
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert harness.measured().traffic == plan.predicted.traffic


def test_more_rows_offloaded_are_fewer_seconds_of_recomputation():
    trace = costed("tiny-llama")
    problem = problem_for(trace, overlap=True)
    outcomes = [simulate(problem, planned("tiny-llama", alpha=alpha).actions) for alpha in (0.0, 0.5, 1.0)]
    again = [o.recompute_seconds for o in outcomes]
    sent = [o.traffic["cpu->far"] for o in outcomes]
    assert again[0] > again[1] > again[2] and sent[0] < sent[1] < sent[2]
    sizes = sizes_of(problem, program_of(trace, layers_of(trace)[1]))
    assert sent[2] - sent[0] == sizes.other * (len(layers_of(trace)) - LAST)


def test_a_slow_link_and_a_small_host_lower_alpha():
    trace = costed("tiny-llama")

    def share(**figures):
        hardware = machine(overlap=True, **figures)
        actions = Memo()(replace(problem_for(trace), hardware=hardware, budget={"cpu": 2**50})).actions
        return sum(a.rows[0] for a in actions if isinstance(a, RecomputeRows) and a.rows)

    assert share(write=1e12) > share(write=1e7) > share(write=1e3) == 0
    host = 2 * sum(sizes_of(problem_for(trace), program_of(trace, layers_of(trace)[1]))[:2])
    assert 0 < share(write=1e12, far=int(1.5 * host)) < share(write=1e12)


def test_fit_takes_it_by_name_and_wrong_options_are_refused():
    model, batch = family("tied")
    expected, _ = trained_plainly("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    peak = planned("tied", alpha=0.5).predicted.peak["cpu"]
    plain = holdall.plan(traced("tied"), planner="nop", hardware=machine()).predicted.peak["cpu"]
    assert peak < plain
    with holdall.fit(model, optimizer, batch, budget=(peak + plain) // 2, planner="memo", alpha=0.5) as harness:
        assert train(model, batch, optimizer) == expected
    assert harness.plan.planner == "memo" and harness.plan.actions
    assert "static addresses" in planned("tied", alpha=0.5, addresses=True).why[1]
    with pytest.raises(InvalidInput, match="alpha"):
        planned("tied", alpha=2.0)
    with pytest.raises(holdall.Infeasible):
        planned("tied", budget=plain // 4)
