"""The largest batch, length or model of a list that fits: doubles until one does not, then bisects.

Planners are heuristics, so a larger value may fit where a smaller one does not. The answer rests on trials: it has a plan, and
the next larger value (or, with `near`, one that little larger) was refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdall.errors import HoldallError, Infeasible, InvalidInput, Unsupported
from holdall.types import Plan, Progress
from holdall.types.plan import silent


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One value that was planned for."""

    value: int
    plan: Plan | None = None  # None: no plan
    error: HoldallError | None = None  # why there is none: `Infeasible`, or an error of the model

    @property
    def fits(self) -> bool:
        return self.plan is not None


@dataclass(frozen=True, kw_only=True)
class Largest:
    value: int
    plan: Plan
    beyond: Probe | None  # the least value that was refused; None: `most` was reached
    probes: tuple[Probe, ...]  # in the order of the trials


def largest(
    make_plan: Callable[[int], Plan],
    *,
    start: int = 1,
    step: int = 1,
    most: int = 2**24,
    near: float = 0.0,
    progress: Progress = silent,
) -> Largest:
    """The largest multiple of `step` up to `most` that has a plan; `Infeasible` if not even `step` has one.

    `make_plan`: value -> plan. `start`: the first value to try. `near`: an answer that may be this share too small is enough.
    """
    if step < 1 or most < step:
        raise InvalidInput(f"`step` is {step} and `most` is {most}: there is nothing to try", hint="use 1 <= step <= most")
    tried: dict[int, Probe] = {}

    def fits(k: int) -> bool:
        if k not in tried:
            best = max((p.value for p in tried.values() if p.fits), default=0)
            progress(f"trying {k * step}", len(tried), 0, f"{best} fits" if best else "")
            tried[k] = _probe(make_plan, k * step)
        return tried[k].fits

    end = most // step
    low, high = 0, end + 1  # low fits, high does not, once tried
    k = min(max(1, start // step), end)
    while low < k < high:
        if fits(k):
            low, k = k, min(2 * k, end)
        else:
            high, k = k, k if low else k // 2
    while high - low > max(1, int(near * low)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        error = tried[1].error
        assert error is not None
        raise error
    found = tried[low]
    assert found.plan is not None
    return Largest(value=found.value, plan=found.plan, beyond=tried.get(high), probes=tuple(tried.values()))


def _probe(make_plan: Callable[[int], Plan], value: int) -> Probe:
    try:
        return Probe(value=value, plan=make_plan(value))
    except (Infeasible, InvalidInput, Unsupported) as error:  # the latter two: no positions left, or no such batch
        return Probe(value=value, error=error)
