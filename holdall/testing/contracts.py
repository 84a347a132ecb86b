"""What every member must do, found by folder. A file added to `actions/` or `planners/` is tested by existing.

Elsewhere: subclass `PlannerContract`, `ActionContract` or `TierContract`, set the class attribute, and let pytest collect it.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from holdall.api import apply
from holdall.cost.roofline import cost_trace
from holdall.errors import Infeasible, OverBudget
from holdall.planners.nop import Nop
from holdall.planning.finish import finish, over_budget
from holdall.registry import member_names
from holdall.runtime.harness import Harness
from holdall.simulator import check, close, lower, simulate
from holdall.simulator.lower import blocks_of, excludes
from holdall.testing.worlds import chain, family, machine
from holdall.tiers.far import Far
from holdall.tracing import trace_step
from holdall.tracing.step import default_loss
from holdall.types import Action, Choice, Copy, Plan, Problem, Run, Trace

UNLIMITED = 2**50


def problem_for(trace: Trace, *, budget: int = UNLIMITED, overlap: bool = False) -> Problem:
    hardware = machine(overlap=overlap)
    return Problem(trace=trace, hardware=hardware, budget={"cpu": budget, "far": UNLIMITED})


def traced(name: str) -> tuple[torch.nn.Module, Any, torch.optim.Optimizer, Trace]:
    """A tiny model of a family with its batch, an AdamW and its trace, with costs."""
    model, batch = family(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name not in _TRACES:  # a family is the same every time, and so is its trace
        _TRACES[name] = cost_trace(trace_step(model, batch, optimizer=optimizer), machine())
    return model, batch, optimizer, _TRACES[name]


_TRACES: dict[str, Trace] = {}


def train(model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """The plainest of loops; seeded, so that dropout can be compared."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = default_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cache
def trained_plainly(name: str) -> tuple[list[float], torch.nn.Module]:
    """(losses, model) of a family after plain training."""
    model, batch = family(name)
    return train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3)), model


def check_run(name: str, plan: Plan) -> Harness:
    """Train a family under a plan: losses and parameters are those of plain training, and nothing was remarked on."""
    model, batch = family(name)
    expected, reference = trained_plainly(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gc.collect()
    with apply(plan, model, optimizer) as harness:
        assert train(model, batch, optimizer) == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert harness.notes == []
    return harness


def run_both(
    name: str, choose: Any, *, steps: int = 3
) -> tuple[bool, Plan, Harness, torch.nn.Module, tuple[list[float], list[float]]]:
    """Train a family plainly and under actions: (same bits everywhere, plan, harness, model, losses of both)."""
    model, batch, optimizer, trace = traced(name)
    reference = copy.deepcopy(model)
    problem = problem_for(trace)
    plan = finish(Nop(), problem, choose(trace))
    expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3), steps)
    gc.collect()
    with Harness(plan, model, optimizer, stores=[Far()]) as harness:
        got = train(model, batch, optimizer, steps)
    mine, theirs = model.state_dict(), reference.state_dict()
    same = got == expected and all(torch.equal(mine[k], theirs[k]) for k in theirs)
    return same, plan, harness, model, (got, expected)


_PLANS: dict[tuple[Any, ...], Plan | None] = {}


class PlannerContract:
    """A plan is legal, fits or is refused, is the same for the same problem, and survives saving."""

    planner: ClassVar[Any]  # the class
    sizes: ClassVar[list[list[int]]] = [[50] * 6, [10, 80, 20, 60, 30], [5, 5, 400, 5]]

    def plans(self, trace: Trace, budget: int, *, overlap: bool = False) -> Plan | None:
        try:
            return self.planner()(problem_for(trace, budget=budget, overlap=overlap))  # type: ignore[no-any-return]
        except Infeasible:
            return None

    def plans_once(self, sizes: Sequence[int], budget: int, *, overlap: bool = False) -> Plan | None:
        """For a chain of these sizes, made by whichever test is the first to ask."""
        key = self.planner, tuple(sizes), budget, overlap
        if key not in _PLANS:
            _PLANS[key] = self.plans(chain(list(sizes)), budget, overlap=overlap)
        return _PLANS[key]

    def budgets(self, trace: Trace) -> list[int]:
        plain = simulate(problem_for(trace), []).peak["cpu"]
        fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
        return [fixed + (plain - fixed) * share // 100 for share in (100, 80, 60, 40, 20, 5)]

    def test_plans_are_legal_and_fit_or_are_refused(self) -> None:
        for sizes in self.sizes:
            trace = chain(sizes)
            for budget in self.budgets(trace):
                for overlap in (False, True):
                    plan = self.plans_once(sizes, budget, overlap=overlap)
                    if plan is not None:
                        problem = problem_for(trace, budget=budget, overlap=overlap)
                        schedule = lower(problem, plan.actions)
                        peak = check(close(schedule), {**trace.tensors, **schedule.added}, "cpu")
                        assert peak == dict(plan.predicted.peak)
                        assert not over_budget(problem, plan.predicted)

    def test_the_same_problem_gives_the_same_plan(self) -> None:
        sizes = [10, 80, 20, 60, 30]
        trace = chain(sizes)
        for budget in self.budgets(trace):
            first, second = self.plans_once(sizes, budget), self.plans(trace, budget)
            assert (first is None) == (second is None)
            if first is not None and second is not None:
                assert first.actions == second.actions

    def test_a_plan_survives_saving_and_loading(self, tmp_path: Path) -> None:
        plan = self.plans_once([50] * 6, UNLIMITED)
        assert plan is not None
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan

    def test_a_refusal_names_a_budget_that_works(self) -> None:
        for sizes in self.sizes:
            trace = chain(sizes)
            try:
                self.planner()(problem_for(trace, budget=1))
            except Infeasible as error:
                assert error.smallest is not None
                assert self.plans(trace, error.smallest) is not None
            else:
                raise AssertionError("a budget of one byte was not refused")

    def test_a_looser_budget_is_never_slower(self) -> None:
        if not self.planner.weighs_budget:
            return
        for sizes in self.sizes:
            trace = chain(sizes)
            before = 0.0
            for budget in self.budgets(trace):  # loosest first
                plan = self.plans_once(sizes, budget)
                if plan is not None:
                    assert plan.predicted.seconds >= before * (1 - 1e-9)
                    before = plan.predicted.seconds

    def test_a_budget_that_holds_everything_needs_no_action(self) -> None:
        if not self.planner.weighs_budget:
            return
        plan = self.plans_once([50] * 6, UNLIMITED)
        assert plan is not None
        assert [a for a in plan.actions if a.name != "keep"] == []

    def test_a_real_model_trains_to_the_same_bits_under_the_plan(self) -> None:
        model, batch, optimizer, trace = traced("tied")
        reference = copy.deepcopy(model)
        plain = simulate(problem_for(trace), []).peak["cpu"]
        fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
        plan = self.plans(trace, fixed + (plain - fixed) * 4 // 5) or self.plans(trace, UNLIMITED)
        assert plan is not None
        expected = train(reference, batch, torch.optim.AdamW(reference.parameters(), lr=1e-3))
        with Harness(plan, model, optimizer, stores=[Far()]) as harness:
            got = train(model, batch, optimizer)
        exact = all(a.exact for a in plan.actions)
        if exact:
            assert got == expected
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
        assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]


class ActionContract:
    """Its schedule is legal alone and after every other action; one real step gives the same bits; leaving restores."""

    action: ClassVar[Any]  # the class
    others: ClassVar[Sequence[Any]] = ()
    families: ClassVar[tuple[str, ...]] = ("tied", "twice", "convnet")

    def test_it_is_plain_data(self) -> None:
        for sample in self.action.samples(chain([50] * 4)):
            assert dataclasses.is_dataclass(sample)
            assert isinstance(sample, Action)
            assert hash(sample) == hash(copy.deepcopy(sample))

    def test_its_schedule_is_legal_alone_and_with_every_other_action(self) -> None:
        for sizes in ([50] * 4, [5, 90, 10]):
            trace = chain(sizes)
            for overlap in (False, True):
                problem = problem_for(trace, overlap=overlap)
                for mine in self.action.samples(trace):
                    simulate(problem, [mine], checked=True)
                    for other in self.others:
                        for theirs in other.samples(trace):
                            if not _clash(mine, theirs):
                                first = simulate(problem, [mine, theirs], checked=True)
                                second = simulate(problem, [theirs, mine], checked=True)
                                assert dict(first.peak) == dict(second.peak)

    def test_its_choices_do_what_they_say(self) -> None:
        every = frozenset(member_names("actions"))
        for trace in (chain([50] * 4), traced("tied")[3]):
            for overlap in (False, True):
                problem = dataclasses.replace(problem_for(trace, overlap=overlap), allow=every)
                for block in (b for b in trace.blocks if b.saves and b.backward is not None and b.same_as is None):
                    choices = list(self.action.choices(problem, block))
                    assert choices == list(self.action.choices(problem, block))
                    assert len({choice.label for choice in choices if choice.for_all}) == sum(c.for_all for c in choices)
                    for choice in choices:
                        _check_choice(problem, choice, choice.on(trace, block))

    def test_one_real_run_gives_the_same_bits_and_the_predicted_peak(self) -> None:
        for name in self.families:
            count = len(self.action.samples(traced(name)[3]))
            for n in range(count):
                same, plan, harness, _, losses = run_both(name, lambda trace, n=n: [self.action.samples(trace)[n]])
                assert same or not self.action.exact, (name, n, losses)
                assert harness.step_peaks[-1] == plan.predicted.peak["cpu"], (name, n)
                assert harness.notes == []

    def test_leaving_restores_every_hook_forward_and_parameter(self) -> None:
        model, _, optimizer, trace = traced("tied")
        before = fingerprint(model, optimizer)
        for sample in self.action.samples(trace):
            plan = finish(Nop(), problem_for(trace), [sample])
            with Harness(plan, model, optimizer, stores=[Far()]):
                pass
            assert fingerprint(model, optimizer) == before


class TierContract:
    """Bytes come back as they were, whole storages travel, counts are exact, and a capacity is kept."""

    tier: ClassVar[Any]  # the class
    device: ClassVar[str] = "cpu"
    keeps: ClassVar[bool] = True  # false: a tier for simulations, which keeps no bytes

    def test_bytes_come_back_as_they_were_and_counts_return_to_zero(self) -> None:
        store = self.tier(device=self.device)
        sources = [torch.randn(n, device=self.device) for n in (1, 7, 4096)]
        tickets = [store.put(t.untyped_storage()) for t in sources]
        if self.keeps:
            assert store.used == sum(t.untyped_storage().nbytes() for t in sources)
        for source, ticket in zip(sources, tickets, strict=True):
            store.wait(ticket)
            fetched = store.get(ticket, self.device)
            store.wait_in(ticket)
            assert fetched.nbytes() == source.untyped_storage().nbytes()
            if self.keeps:
                assert torch.equal(torch.empty(0, device=self.device).set_(fetched), source)
            store.free(ticket)
        assert store.used == 0
        assert store.sent == store.fetched == sum(t.untyped_storage().nbytes() for t in sources)
        store.close()

    def test_several_go_and_come_together(self) -> None:
        store = self.tier(device=self.device)
        sources = [torch.randn(n, device=self.device) for n in (3, 0, 4096, 3)]
        tickets = store.put_all([t.untyped_storage() for t in sources])
        for ticket in tickets:
            store.wait(ticket)
        fetched = store.get_all(tickets, self.device)
        for source, ticket, storage in zip(sources, tickets, fetched, strict=True):
            store.wait_in(ticket)
            assert storage.nbytes() == source.untyped_storage().nbytes()
            if self.keeps:
                assert torch.equal(torch.empty(0, device=self.device).set_(storage), source)
            store.free(ticket)
        assert store.used == 0
        assert store.sent == store.fetched == sum(t.untyped_storage().nbytes() for t in sources)
        assert store.put_all([]) == store.get_all([], self.device) == []
        store.close()

    def test_where_there_is_no_room_for_all_none_is_taken(self) -> None:
        store = self.tier(device=self.device, capacity=1024)
        sources = [torch.zeros(n, device=self.device).untyped_storage() for n in (128, 64, 128)]
        try:
            store.put_all(sources)
        except OverBudget:
            assert store.used == 0
        else:
            raise AssertionError("a tier took more than it holds")
        assert [t.nbytes for t in store.put_all(sources[:2])] == [512, 256]
        store.close()

    def test_a_capacity_is_kept(self) -> None:
        if not self.keeps:
            return
        store = self.tier(device=self.device, capacity=1024)
        store.put(torch.zeros(256, device=self.device).untyped_storage())
        try:
            store.put(torch.zeros(1, device=self.device).untyped_storage())
        except OverBudget as error:
            assert error.hint
        else:
            raise AssertionError("a full tier took more")
        assert store.peak == 1024
        store.close()


def _check_choice(problem: Problem, choice: Choice, actions: Sequence[Action]) -> None:
    """A planner may believe the facts of a choice."""
    steps = [step for steps in lower(problem, actions).after.values() for step in steps]
    assert actions and choice.label
    assert choice.exact == all(a.exact for a in actions)
    assert choice.by_program == any(a.by_ops for a in actions)
    assert choice.recomputes or not any(isinstance(step, Run) and step.again for step in steps)
    assert choice.moves or not any(isinstance(step, Copy) for step in steps)
    assert not choice.late or (choice.moves and problem.hardware.overlap)


def _clash(first: Any, second: Any) -> bool:
    """One technique is applied to a block once; some want it for themselves."""
    shared = set(blocks_of(first)) & set(blocks_of(second))
    same = first.name == second.name
    return any(same or excludes(first, second, block) or excludes(second, first, block) for block in shared)


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that holdall could leave behind."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks") and v is not None]
        seen.append((name, "forward" in module.__dict__, hooks, type(module).__name__))
    seen += [(n, id(p), p.device, p.stride(), p._version, p.tolist()) for n, p in model.named_parameters()]
    seen.append([len(v) for k, v in sorted(vars(optimizer).items()) if k.endswith("_hooks") and hasattr(v, "__len__")])
    return seen
