"""Pieces: modules that treat each position of the sequence alone (MLPs, norms) run on a piece of the sequence at a time.

For contexts so long that the backward of one block exceeds the budget: an MLP then holds its intermediate results for one piece
only, in forward and in backward, and saves nothing but its input. Attention is computed in pieces by its own kernel, and the
vocabulary head by `head`.

It changes the ops of the step, so it is applied to the trace before any other action: those see the module's pieces, its one
saved tensor and the sums of its weights' gradients. The tolerance is in `runtime/activations/pieces.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.pieces.regions import Region, regions
from holdall.actions.pieces.step import in_pieces
from holdall.errors import Unsupported
from holdall.types import Facts, Problem, Schedule, SplitModules, Trace
from holdall.types.trace import once_per_trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_SHARE = 1 / 16  # of the budget that a piece may take
_LEAST = 1024  # positions of a piece: smaller ones leave a GPU idle
_MANY = 4  # pieces of this size at least, or the sequence is no long one


@dataclass(frozen=True, kw_only=True)
class Pieces(Facts):
    modules: tuple[str, ...]  # their paths
    rows: int  # positions at a time

    name: ClassVar[str] = "pieces"
    exact: ClassVar[bool] = False  # gradients of weights are sums of sums
    rank: ClassVar[int] = 4
    by_default: ClassVar[bool] = True  # `auto` uses it only if nothing else fits
    settles_states: ClassVar[bool] = True  # all plans of a run add gradients in the same order
    spares_activations: ClassVar[bool] = True
    what: ClassVar[str] = "token-wise modules run on a piece of the sequence at a time"

    @staticmethod
    def of(trace: Trace, rows: int) -> Pieces:
        """All modules that are worth it, in pieces of so many positions."""
        return Pieces(modules=tuple(regions(trace)), rows=rows)

    @staticmethod
    def samples(trace: Trace) -> list[Pieces]:
        """Pieces of about a third of the sequence."""
        if trace.about.pieces is not None:
            return []
        longest = max((r.tokens for r in regions(trace).values()), default=0)
        return [Pieces.of(trace, -(-longest // 3))] if longest else []

    @classmethod
    def last_resorts(cls, problem: Problem) -> Iterable[Pieces]:
        """For long sequences: pieces that take a small part of the budget, then the smallest."""
        found = list(regions(problem.trace).values()) if problem.trace.about.pieces is None else []
        longest = max((r.tokens for r in found), default=0)
        if longest < _MANY * _LEAST:
            return
        rows = int(_SHARE * problem.limit(problem.home)) // max(r.footprint for r in found)
        for size in dict.fromkeys((max(_LEAST, rows // _LEAST * _LEAST), _LEAST)):
            if size * 2 <= longest:
                yield cls.of(problem.trace, size)

    def retraced(self, trace: Trace) -> Trace:
        asked = SplitModules(modules=self.modules, rows=self.rows)
        if trace.about.pieces == asked:
            return trace

        def make(trace: Trace) -> Trace:
            made = in_pieces(trace, self._found(trace), self.rows)
            return replace(made, about=replace(made.about, pieces=asked))

        return once_per_trace(trace, f"_in_pieces_{hash(asked)}", make)

    def _found(self, trace: Trace) -> list[Region]:
        known = regions(trace)
        missing = [m for m in self.modules if m not in known]
        if missing or trace.about.pieces is not None:
            raise Unsupported(
                f"`{missing[0] if missing else self.modules[0]}` cannot run in pieces in this step",
                hint="plan again: holdall.plan(trace, ...)",
            )
        return [known[m] for m in self.modules]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:  # noqa: ARG002
        return schedule  # of the trace in pieces

    def install(self, harness: Harness) -> None:
        from holdall.runtime.activations.pieces import split  # planning needs no torch

        for path in self.modules:
            try:
                module = harness.model.get_submodule(path)
            except AttributeError:
                raise Unsupported(f"the model has no module `{path}`", hint="plan again for this model") from None
            harness.on_close(split(module, path, self.rows, harness.quiet))
        harness.note()(
            f"{len(self.modules)} modules run in pieces of {self.rows} positions: weight gradients are sums over pieces, so "
            'last bits differ from plain training; to rule this out: fit(..., allow=["recompute", "offload", "place", "head"])'
        )
