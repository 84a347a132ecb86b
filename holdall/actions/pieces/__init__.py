"""Pieces: modules that treat each position of the sequence alone (MLPs, norms) run on a piece of the sequence at a time; or, by
samples, modules of convolutions on a piece of the batch.

For contexts so long that the backward of one block exceeds the budget: an MLP then holds its intermediate results for one piece
only, in forward and in backward, and saves nothing but its input. Attention is computed in pieces by its own kernel, and the
vocabulary head by `head`.

It changes the ops of the step, so it is applied to the trace before any other action: those see the module's pieces, its one
saved tensor and the sums of its weights' gradients. The tolerance is in `runtime/activations/pieces.py`.

A plan may have several, with pieces of different sizes: one for each set of modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.pieces.regions import POSITIONS, SAMPLES, Region, regions
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
    rows: int  # positions at a time, or samples
    by: str = POSITIONS  # what rows are: "positions" of the sequence, or "samples" of the batch

    name: ClassVar[str] = "pieces"
    exact: ClassVar[bool] = False  # gradients of weights are sums of sums
    rank: ClassVar[int] = 4
    by_default: ClassVar[bool] = True  # `auto` uses it only if nothing else fits
    settles_states: ClassVar[bool] = True  # all plans of a run add gradients in the same order
    spares_activations: ClassVar[bool] = True
    what: ClassVar[str] = "token-wise modules run on a piece of the sequence at a time"

    @staticmethod
    def of(trace: Trace, rows: int, by: str = POSITIONS) -> Pieces:
        """All modules that are worth it, in pieces of so many positions, or samples."""
        return Pieces(modules=tuple(regions(trace, by)), rows=rows, by=by)

    @staticmethod
    def samples(trace: Trace) -> list[Pieces]:
        """Pieces of about a third of the sequence, or of half the batch."""
        if trace.about.pieces:
            return []
        longest, most = (max((r.tokens for r in regions(trace, by).values()), default=0) for by in (POSITIONS, SAMPLES))
        if longest:
            return [Pieces.of(trace, -(-longest // 3))]
        return [Pieces.of(trace, -(-most // 2), SAMPLES)] if most > 1 else []

    @classmethod
    def last_resorts(cls, problem: Problem) -> Iterable[Pieces]:
        """For long sequences: pieces that take a small part of the budget, then the smallest."""
        found = list(regions(problem.trace).values()) if not problem.trace.about.pieces else []
        longest = max((r.tokens for r in found), default=0)
        if longest < _MANY * _LEAST:
            return
        rows = int(_SHARE * problem.limit(problem.home)) // max(r.footprint for r in found)
        for size in dict.fromkeys((max(_LEAST, rows // _LEAST * _LEAST), _LEAST)):
            if size * 2 <= longest:
                yield cls.of(problem.trace, size)

    def retraced(self, trace: Trace) -> Trace:
        asked = SplitModules(modules=self.modules, rows=self.rows, by=self.by)
        if asked in trace.about.pieces:
            return trace

        return once_per_trace(trace, f"_in_pieces_{hash(asked)}", self.changed)

    def changed(self, trace: Trace) -> Trace:
        """The trace with the modules in pieces, made anew."""
        made = in_pieces(trace, self._found(trace), self.rows)
        asked = SplitModules(modules=self.modules, rows=self.rows, by=self.by)
        return replace(made, about=replace(made.about, pieces=(*trace.about.pieces, asked)))

    def _found(self, trace: Trace) -> list[Region]:
        known = regions(trace, self.by)
        missing = [m for m in self.modules if m not in known]
        if missing:
            hint = "plan again: holdall.plan(trace, ...)"
            raise Unsupported(f"`{missing[0]}` cannot run in pieces in this step", hint=hint)
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
            harness.on_close(split(module, path, self.rows, harness.quiet, by=self.by))
        harness.note()(
            f"{len(self.modules)} modules run in pieces of {self.rows} {self.by}: weight gradients are sums over pieces, so "
            'last bits differ from plain training; to rule this out: fit(..., allow=["recompute", "offload", "place", "head"])'
        )
