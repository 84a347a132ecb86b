"""What to do about a step: the two protocols (Action, Planner), the problem they solve and the plan they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from holdall.errors import InvalidInput, Unsupported, unknown_name
from holdall.registry import action_from_json, allowed_by_default
from holdall.types import _json
from holdall.types.choice import Choice
from holdall.types.hardware import Hardware
from holdall.types.info import PlanInfo
from holdall.types.outcome import Outcome
from holdall.types.schedule import Schedule
from holdall.types.trace import Block, Trace
from holdall.units import format_bytes, format_seconds

FORMAT = "holdall-plan-1"

Progress = Callable[[str, int, int, str], None]
"""Receives (what, done, total, best so far) from anything that may take more than a couple of seconds."""


def silent(what: str, done: int, total: int, best: str) -> None:
    """The progress that shows nothing."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    trace: Trace
    hardware: Hardware
    budget: Mapping[str, int]  # tier -> bytes; a tier that is not named has its capacity
    allow: frozenset[str] = field(default_factory=allowed_by_default)  # names of actions that may be used
    reads_gradients: bool = True  # the loop reads or changes gradients between backward and step
    accumulate: int = 1  # backwards per step
    layout: str = ""  # the layout of tensors in an arena; empty: the device's own allocator decides where they lie
    clipped: bool = True  # gradients are clipped in every step, so that an update begun ahead of that was in vain
    progress: Progress = silent

    @property
    def home(self) -> str:
        return self.hardware.home.name

    def other(self, name: str = "") -> str:
        """The farther tier of this name; the nearest one, if there is no name."""
        others = [tier.name for tier in self.hardware.others]
        if not others:
            raise Unsupported("there is no tier for bytes to leave to", hint="plan for hardware with a second tier")
        if name and name not in others:
            raise unknown_name("tier", name, others)
        return name or others[0]

    def limit(self, tier: str) -> int:
        """Bytes allowed in a tier."""
        return self.budget.get(tier, self.hardware.tier(tier).capacity)

    def under(self, actions: Iterable[Action]) -> Problem:
        """The same problem with the ops of the step as these actions change them."""
        trace = self.trace
        for action in actions:
            trace = action.retraced(trace)
        return self if trace is self.trace else replace(self, trace=trace)

    def permits(self, action: type[Action]) -> bool:
        """Whether an action may be used: it was named, or one that it serves was."""
        if self.trace.about.shards is not None and not action.on_shards:
            return False  # a sharded step is planned by actions that work on shards
        return bool({action.name, *action.permitted_by} & self.allow)


@runtime_checkable
class Action(Protocol):
    """One technique applied to one subject; owns what it does to the schedule and what it does to the model.

    An action is a frozen dataclass of plain values (strings, numbers, booleans, tuples of them), so that a plan is data.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]  # the same bits as the untouched model
    rank: ClassVar[int]  # actions are rewritten and installed in this order, whatever their order in the plan
    by_default: ClassVar[bool]  # this and the following: see `Facts`
    alone: ClassVar[bool]
    beside: ClassVar[frozenset[str]]
    places_states: ClassVar[bool]
    settles_states: ClassVar[bool]
    spares_activations: ClassVar[bool]
    permitted_by: ClassVar[frozenset[str]]
    what: ClassVar[str]
    on_shards: ClassVar[bool]
    only_by_fit: ClassVar[bool]
    over_ranks: ClassVar[bool]

    @property
    def by_ops(self) -> tuple[str, ...]: ...

    @property
    def tiers(self) -> frozenset[str]: ...

    def shares(self, other: Any) -> bool: ...

    @classmethod
    def choices(cls, problem: Problem, block: Block) -> Iterable[Choice]:
        """What it can do about a block, for the menus of planners; the action is permitted by `problem`."""
        ...

    @staticmethod
    def samples(trace: Trace) -> Sequence[Action]:
        """A few instances for this trace, for the contract tests."""
        ...

    def retraced(self, trace: Trace) -> Trace:
        """The step with other ops, if it changes them; the same trace a second time."""
        ...

    @classmethod
    def last_resorts(cls, problem: Problem) -> Iterable[Action]:
        """Actions on the whole step to try if no plan fits without; the action is permitted by `problem`."""
        ...

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule: ...

    def install(self, harness: Any) -> None:
        """Do it to the model of this `runtime.harness.Harness`, whose type is not named here: it needs torch."""
        ...


class Facts:
    """What others ask of an action, in the place of its name. Every action inherits these, and overrides what differs."""

    by_default: ClassVar[bool] = False  # a planner may use it without being told
    alone: ClassVar[bool] = False  # no other action may treat the same block
    beside: ClassVar[frozenset[str]] = frozenset()  # but for the actions of these names
    places_states: ClassVar[bool] = False  # it says where model states live, and adds gradients up itself
    settles_states: ClassVar[bool] = False  # model states or their updates depend on it: the same in all plans of a run
    spares_activations: ClassVar[bool] = False  # blocks hold less for backward
    permitted_by: ClassVar[frozenset[str]] = frozenset()  # names of actions that it serves: whoever allows one allows it
    on_shards: ClassVar[bool] = False  # it works on a model that is sharded over ranks
    only_by_fit: ClassVar[bool] = False  # and is planned for steps traced with the shards, not for models sharded by hand
    over_ranks: ClassVar[bool] = False  # several ranks carry it out together
    what: ClassVar[str] = ""  # one line for tables of features; empty: it is not in them

    @property
    def by_ops(self) -> tuple[str, ...]:
        """The blocks that it runs op by op."""
        return ()

    @property
    def tiers(self) -> frozenset[str]:
        """The farther tiers that it copies bytes to; an empty name is the nearest one."""
        return frozenset()

    def shares(self, other: Any) -> bool:  # noqa: ARG002
        """May another action of its class treat the same block, since each treats a part of it?"""
        return False

    def retraced(self, trace: Trace) -> Trace:
        """The trace itself: most actions leave the ops as they are."""
        return trace

    @classmethod
    def last_resorts(cls, problem: Problem) -> Iterable[Action]:  # noqa: ARG003
        """None: it is no last resort."""
        return ()

    @classmethod
    def choices(cls, problem: Problem, block: Block) -> Iterable[Choice]:  # noqa: ARG003
        """None: planners that choose from menus have no use for it."""
        return ()


class Planner(Protocol):
    """A published way to choose actions. A frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    paper: ClassVar[str]
    weighs_budget: ClassVar[bool]  # false: a fixed rule that ignores the budget

    def __call__(self, problem: Problem) -> Plan: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    planner: str
    options: Mapping[str, Any]
    actions: tuple[Action, ...]
    predicted: Outcome
    trace: str  # fingerprint of the trace it was made for
    signature: str  # of the model: parameter names, shapes and dtypes
    budget: Mapping[str, int]
    hardware: str
    solve_seconds: float = 0.0
    why: tuple[str, ...] = ()
    about: PlanInfo = field(default_factory=PlanInfo)  # what the harness and reports need to know of the step

    def count(self) -> dict[str, int]:
        """How many actions of each name."""
        found: dict[str, int] = {}
        for action in self.actions:
            found[action.name] = found.get(action.name, 0) + 1
        return found

    def summary(self) -> str:
        """One line: what is done and what to expect."""
        counted = ", ".join(f"{n} x {name}" for name, n in sorted(self.count().items())) or "nothing to do"
        home = next(iter(self.predicted.peak), "")
        return (
            f"{self.planner}: {counted}; expect {format_bytes(self.predicted.peak.get(home, 0))} "
            f"and {format_seconds(self.predicted.seconds)}/step"
        )

    def explain(self) -> str:
        """The reasons, and what sits in memory at the peak."""
        lines = [self.summary(), ""]
        lines += [f"- {reason}" for reason in self.why]
        p = self.predicted
        if p.at_peak:
            kinds = ", ".join(f"{k.value} {format_bytes(v)}" for k, v in p.peak_kinds.items() if v)
            lines += ["", f"at the peak ({p.peak_where}): {kinds}"]
            lines += [f"  {format_bytes(h.nbytes):>10}  {h.kind.value:<10}  {h.name}" for h in p.at_peak[:10]]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        packed = {f: _json.pack(getattr(self, f)) for f in self.__dataclass_fields__ if f != "actions"}
        packed["actions"] = [{"action": a.name, **_json.pack(a)} for a in self.actions]
        return packed

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; whole or not at all."""
        _json.write(path, {"format": FORMAT, **self.to_json()})

    @staticmethod
    def load(path: str | Path) -> Plan:
        return Plan.from_json(_json.read(path, FORMAT), str(path))

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> Plan:
        """What `to_json` gave; `where` it comes from is named in errors."""
        listed = data.get("actions")
        if not isinstance(listed, list):
            raise InvalidInput(f"`{where}` has no list of actions", hint="write it again with `plan.save`")
        actions = tuple(action_from_json(entry, where) for entry in listed)
        fields = {name: kind for name, kind in _json._hints(Plan).items() if name in data and name != "actions"}
        read = {name: _json.unpack(kind, data[name], where) for name, kind in fields.items()}
        try:
            return Plan(actions=actions, **read)
        except TypeError as error:
            raise InvalidInput(f"`{where}` is not a whole plan ({error})", hint="write it again with `plan.save`") from None
