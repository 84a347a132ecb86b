"""The library for layouts: lifetimes in, offsets out. The layouts themselves are the members of `holdall/layouts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from holdall.simulator.lifetimes import PlannedStep
from holdall.types.lifetimes import StepLifetimes
from holdall.types.trace import Bytes

__all__ = ["LaidOut", "LayoutMember", "Reorders"]


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """Where tensors lie, or what an allocator reserves for them."""

    reserved: Bytes
    offsets: tuple[Bytes, ...] | None = None  # by number of the tensor; None: an allocator decides while the step runs
    notes: Mapping[str, int] = field(default_factory=dict)  # what else is known: is it proved, how often were pages mapped


class LayoutMember(Protocol):
    """A published way to lay out the tensors of a step. A frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    paper: ClassVar[str]
    is_static: ClassVar[bool]  # offsets are known before the step

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut: ...


@runtime_checkable
class Reorders(Protocol):
    """A layout that also chooses the order of the ops; it lays out the lifetimes of that order."""

    def reorder(self, step: PlannedStep) -> PlannedStep: ...
