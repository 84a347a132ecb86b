"""A way to treat a block, as an action offers it to the planners.

Planners ask for the facts below and never look into the label. A choice is offered for one block and stands for the same on
every block of its kind, so it knows how to make its actions for any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdall.types.trace import Block, Trace

if TYPE_CHECKING:
    from holdall.types.plan import Action


def _nothing(trace: Trace, block: Block) -> Sequence[Action]:  # noqa: ARG001
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Equal if it makes the same actions: `make` is a function of a module, `given` plain values."""

    label: str = field(compare=False)  # what reports call it
    make: Callable[..., Sequence[Action]] = _nothing  # (trace, block, *given) -> the actions that it stands for
    given: tuple[Any, ...] = ()
    recomputes: bool = field(default=False, compare=False)  # the block, or some of its ops, run again
    by_program: bool = field(default=False, compare=False)  # the block runs op by op
    moves: bool = field(default=False, compare=False)  # bytes leave for a farther tier
    tier: str = field(default="", compare=False)  # which; empty: the nearest
    late: bool = field(default=False, compare=False)  # they are gone after the next block's forward, which hides the copy
    exact: bool = field(default=True, compare=False)  # the same bits as the untouched model
    for_all: bool = field(default=False, compare=False)  # searches also try it on every block that has it
    lean: bool = field(default=False, compare=False)  # blocks can hardly hold less: where this does not fit, little does

    def on(self, trace: Trace, block: Block) -> tuple[Action, ...]:
        """Its actions for a block."""
        return tuple(self.make(trace, block, *self.given))


KEEP = Choice(label="keep")
"""Nothing is done about the block."""
