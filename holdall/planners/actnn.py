"""ActNN: saved activations are stored in a few stochastically rounded bits, allocated where they lower the variance most.

Chen et al., "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training" (ICML 2021, arXiv 2104.14129).
Its levels, here:

L0            nothing
L1            4 bits for saved tensors of convolutions and matrix products; those of norms and other ops stay as they are
L2            4 bits for everything
L3, L3.1      2 bits on average, allocated by sensitivity (L3.1 adds settings of cuDNN and its allocator, not used here)
L4            as L3, with the codes offloaded to the next tier
L5            as L4; defragmentation is left to the allocator: plans for a GPU assume expandable segments

The paper learns sensitivities during training; a plan is made before it. Here they are measured once, as GACT does (arXiv
2206.11357; `measure_sensitivity` of `holdall.testing.sensitivity`), and given as an option; without them all elements weigh the
same. Bits are chosen per tensor, not per sample. Not exact, and so only used with `compress` among the allowed actions.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from holdall.actions.compress import Compress, asks_for_sign, codable, key_of, numel_of
from holdall.errors import Infeasible, InvalidInput, unknown_name
from holdall.planning.finish import finish
from holdall.types import Block, Plan, Problem, Trace

MOST, LEAST = 8, 1  # bits of a code
_LEVELS = {"L0": 0.0, "L1": 4.0, "L2": 4.0, "L3": 2.0, "L3.1": 2.0, "L4": 2.0, "L5": 2.0}
_ADAPTIVE = ("L3", "L3.1", "L4", "L5")
_SWAPPING = ("L4", "L5")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution_backward")


@dataclass(frozen=True, kw_only=True)
class Actnn:
    level: str = "L3"
    bits: float | None = None  # bits per element on average; None: those of the level
    sensitivity: Mapping[str, float] = field(default_factory=dict)  # `block:n` -> variance at 1 bit; missing: its elements

    name: ClassVar[str] = "actnn"
    paper: ClassVar[str] = "Chen et al., ICML 2021, arXiv 2104.14129"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.level not in _LEVELS:
            raise unknown_name("level of actnn", self.level, _LEVELS)
        average = _LEVELS[self.level] if self.bits is None else self.bits
        if self.level != "L0" and not LEAST <= average <= MOST:
            raise InvalidInput(f"`bits` is {average:g}; it must be from 1 to 8", hint="give an average, such as bits=2.5")
        if not problem.permits(Compress):
            return self._without_consent(problem, began)
        chosen = [] if self.level == "L0" else self._tensors(problem.trace)
        widths = self._widths(problem.trace, chosen, average)
        actions = self._actions(problem, chosen, widths)
        return finish(self, problem, actions, why=self._why(problem.trace, chosen, widths), began=began)

    def _without_consent(self, problem: Problem, began: float) -> Plan:
        """The plan without compression; if it does not fit, the error asks for `compress`."""
        why = ["nothing is compressed: that would make gradients approximate, and `compress` is not allowed"]
        try:
            return finish(self, problem, [], why=why, began=began)
        except Infeasible as error:
            hint = "accept approximate gradients with --allow compress, or choose another of `holdall planners`"
            raise Infeasible(error.fact, hint=hint, smallest=error.smallest) from None

    def _tensors(self, trace: Trace) -> list[tuple[Block, int, str]]:
        """(block, tensor, its key) of every tensor that this level compresses."""
        found = []
        for block in trace.blocks:
            if block.backward is None:
                continue
            for n, x in enumerate(codable(trace, block)):
                if self.level != "L1" or _is_for_products(trace, block, x):
                    found.append((block, x, key_of(block.name, n)))
        return found

    def _widths(self, trace: Trace, chosen: Sequence[tuple[Block, int, str]], average: float) -> list[int]:
        sizes = [numel_of(trace, x) for _, x, _ in chosen]
        if self.level not in _ADAPTIVE and average == int(average):
            return [int(average)] * len(chosen)
        costs = [self.sensitivity.get(key, float(size)) for (_, _, key), size in zip(chosen, sizes, strict=True)]
        return allocate_bits(costs, sizes, average * sum(sizes))

    def _actions(self, problem: Problem, chosen: Sequence[tuple[Block, int, str]], widths: Sequence[int]) -> list[Compress]:
        by_block: dict[int, dict[int, int]] = {}
        for (block, x, _), width in zip(chosen, widths, strict=True):
            by_block.setdefault(block.id, {})[x] = width
        swap = self.level in _SWAPPING and problem.hardware.far is not None
        overlap = problem.hardware.overlap
        blocks = problem.trace.blocks
        return [Compress.of(problem.trace, blocks[b], bits=bits, swap=swap, overlap=overlap) for b, bits in by_block.items()]

    def _why(self, trace: Trace, chosen: Sequence[tuple[Block, int, str]], widths: Sequence[int]) -> list[str]:
        sizes = [numel_of(trace, x) for _, x, _ in chosen]
        if not sizes:
            return [f"{self.level}: nothing to compress"]
        mean = sum(w * n for w, n in zip(widths, sizes, strict=True)) / sum(sizes)
        reasons = [f"{self.level}: {len(chosen)} tensors compressed to {mean:.2f} bits on average; gradients are approximate"]
        if self.level in _ADAPTIVE and not self.sensitivity:
            reasons.append("no `sensitivity` was given: all elements weigh the same")
        return reasons


def allocate_bits(sensitivity: Sequence[float], weights: Sequence[int], total: float) -> list[int]:
    """The paper's greedy allocation: from 8 bits each, take one bit where the variance grows least per weight saved, until the
    weighted sum is at most `total`. The variance of item i at b bits is sensitivity[i] / (2^b - 1)^2."""
    bits = [MOST] * len(weights)
    spent = MOST * sum(weights)
    heap = [(_growth(c, MOST) / w, i) for i, (c, w) in enumerate(zip(sensitivity, weights, strict=True))]
    heapq.heapify(heap)
    while spent > total and heap:
        _, i = heapq.heappop(heap)
        bits[i] -= 1
        spent -= weights[i]
        if bits[i] > LEAST:
            heapq.heappush(heap, (_growth(sensitivity[i], bits[i]) / weights[i], i))
    return bits


def _growth(sensitivity: float, bits: int) -> float:
    """Growth of the variance when an item loses a bit."""
    before, after = float(2**bits - 1), float(2 ** (bits - 1) - 1)
    return sensitivity * (1 / (after * after) - 1 / (before * before))


def _is_for_products(trace: Trace, block: Block, tensor: int) -> bool:
    """Do only convolutions and matrix products (and ReLUs, for its sign) read it in backward?"""
    saves = [trace.saves[i] for i in block.saves if trace.saves[i].tensor == tensor]
    asked = [s for s in saves if s.unpacked is not None and not asks_for_sign(trace, s)]
    return bool(asked) and all(_asking(trace, s.unpacked or 0) in _PRODUCTS for s in asked)


def _asking(trace: Trace, moment: int) -> str:
    """The op after `moment`, without its overload."""
    name = trace.ops[moment + 1].site.op if moment + 1 < len(trace.ops) else ""
    return name.split(".")[1] if "." in name else name
