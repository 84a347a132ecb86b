"""When swapped tensors leave and return: one copy after the other on each way, and triggers before the back-access.

A copy begins when its block's forward is over, and its memory is freed at the end of the first block by which it should be
done, so that computation need not wait (decoupled swaps). A fetch is hung on the beginning of a block's backward: the latest
that leaves time for it. If it still arrives late, it is moved earlier by a part of its own time (feedback).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdall.actions.offload import Offload
from holdall.planners.capuchin.accesses import HeldTensor, ends_of_ops, holding
from holdall.types import Block, Problem, Span, Trace

EARLIER = 0.05  # of a swap's own time, for each time that it was late


def earlier(lead: float, seconds: float) -> float:
    """The lead of a trigger after one more step in which its tensor was late; `seconds`: of the copy."""
    return lead + EARLIER * seconds


def left_at(swaps: Sequence[HeldTensor]) -> dict[int, float]:
    """Tensor -> when its copy out is done."""
    end = 0.0
    found = {}
    for c in sorted(swaps, key=lambda c: (c.swap.evict, c.tensor)):
        end = max(end, c.swap.evict) + c.swap.out
        found[c.tensor] = end
    return found


def starts_of_fetches(swaps: Sequence[HeldTensor]) -> dict[int, float]:
    """Tensor -> when its copy in must begin, at the latest, so that it and all after it are in time."""
    start = float("inf")
    found = {}
    for c in sorted(swaps, key=lambda c: (-c.swap.back, c.tensor)):
        start = min(start, c.swap.back) - c.swap.into
        found[c.tensor] = start
    return found


def overhead(swaps: Sequence[HeldTensor], turn: float) -> float:
    """Seconds by which copies are late. `turn`: when backward, and with it the first trigger, begins."""
    out, into = left_at(swaps), starts_of_fetches(swaps)
    return max((max(out[x], turn) - into[x] for x in out), default=0.0) if swaps else 0.0


class Triggers:
    """The moments of a step on which copies can be hung. `most`: blocks that a copy may take each way; None: as many as it
    needs. Fewer cost waiting, as where an allocation fails in the paper, and less memory for copies under way."""

    def __init__(self, problem: Problem, most: int | None = None) -> None:
        trace = problem.trace
        self.trace = trace
        self.most = most
        self.overlap = problem.hardware.overlap
        self._ends = ends_of_ops(trace)
        self._blocks = holding(trace)
        self.turn = min((self._ends[b.backward] for b in self._blocks if b.backward is not None), default=0.0)

    def offloads(
        self, swaps: Sequence[HeldTensor], programs: Mapping[int, object], leads: Mapping[int, float] | None = None
    ) -> list[Offload]:
        """The actions, blocks in order. `programs`: blocks that run by a program. `leads`: fetches are earlier by so much."""
        return [self.offload(*key, chosen, key[0] in programs) for key, chosen in self.parts(swaps, leads).items()]

    def parts(
        self, swaps: Sequence[HeldTensor], leads: Mapping[int, float] | None = None
    ) -> dict[tuple[int, str, str], list[HeldTensor]]:
        """The tensors that leave and return together, by block and both moments."""
        out, into = left_at(swaps), starts_of_fetches(swaps)
        parts: dict[tuple[int, str, str], list[HeldTensor]] = {}
        for c in sorted(swaps, key=lambda c: (c.block, c.tensor)):
            lead = (leads or {}).get(c.tensor, 0.0)
            moments = (self._until(c, out[c.tensor]), self.fetch(c, into[c.tensor] - lead)) if self.overlap else ("", "")
            parts.setdefault((c.block, *moments), []).append(c)
        return parts

    def _until(self, c: HeldTensor, end: float) -> str:
        later = self._within([b for b in self._blocks if b.id >= c.block], 1)
        done = next((b for b in later if self._ends[b.last] >= end), later[-1])
        return done.name if done.id != c.block else ""

    def fetch(self, c: HeldTensor, start: float) -> str:
        """The block at whose backward the fetch begins; empty: when the tensor is needed."""
        later = self._within([b for b in self._blocks if b.id > c.block and self._begins(b) <= c.swap.back])
        early = [b for b in later if self._begins(b) <= start]
        best = max(early, key=self._begins, default=min(later, key=self._begins, default=None))
        return best.name if best is not None else ""

    def _within(self, blocks: list[Block], more: int = 0) -> list[Block]:
        return blocks if self.most is None else blocks[: self.most + more]

    def _begins(self, block: Block) -> float:
        return self._ends[-1 if block.backward is None else block.backward]

    def offload(self, block: int, until: str, fetch: str, chosen: Sequence[HeldTensor], by_program: bool) -> Offload:
        """The action for tensors of one part."""
        here = self.trace.blocks[block]
        inputs = tuple(sorted(c.input for c in chosen if c.input is not None))
        made = {c.tensor for c in chosen if c.input is None}
        return Offload(
            block=here.name,
            inputs=inputs,
            lag=bool(until),
            until=until,
            fetch=fetch,
            saves=numbers_of(self.trace, here, made, by_program=by_program),
        )

    def feedback(self, swaps: Sequence[HeldTensor], leads: dict[int, float], late: set[str]) -> bool:
        """Move the triggers of late blocks to earlier ones; returns whether any has moved."""
        into = starts_of_fetches(swaps)
        moved = False
        for c in swaps:
            if self.trace.blocks[c.block].name not in late or c.swap.into <= 0:
                continue
            lead = leads.get(c.tensor, 0.0)
            now = self.fetch(c, into[c.tensor] - lead)
            for _ in range(round(1 / EARLIER)):  # until another block is reached: triggers lie apart
                lead = earlier(lead, c.swap.into)
                if self.fetch(c, into[c.tensor] - lead) != now:
                    leads[c.tensor] = lead
                    moved = True
                    break
        return moved


def numbers_of(trace: Trace, block: Block, tensors: set[int], *, by_program: bool) -> tuple[int, ...]:
    """The numbers by which `Offload` names these tensors of a block."""
    if by_program:
        made = (x for op in trace.ops[block.first : block.last + 1] for x in op.writes)
        return tuple(n for n, x in enumerate(made) if x in tensors)
    return tuple(n for n, i in enumerate(block.saves) if trace.saves[i].tensor in tensors)


def waited_for(lanes: Sequence[Span]) -> set[str]:
    """Blocks whose fetch computation waited for, in a simulated step."""
    ends = [span.end for span in lanes if span.lane == "waiting"]
    fetches = [span for span in lanes if span.lane.startswith("copy in")]
    return {span.name for span in fetches if any(abs(span.end - end) < 1e-9 * max(1.0, end) for end in ends)}
