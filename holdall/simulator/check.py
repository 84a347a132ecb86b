"""Checks that a list of steps is legal and computes its peak. Naive on purpose: it shares no code with what it checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdall.types import Collect, Copy, Drop, Run, Step, TensorInfo, Wait


class Illegal(AssertionError):
    """A schedule that no machine could run: a bug in an action or a planner, never the user's fault."""


def check(
    steps: Iterable[Step], tensors: Mapping[int, TensorInfo], home: str, start: Mapping[int, str] | None = None
) -> dict[str, int]:
    """Walk the steps; raise `Illegal` at the first that cannot run. Returns the peak bytes of every tier.

    `start`: tensors that are not in `home` before the step -> their tier.
    """
    start = start or {}
    present: dict[str, set[int]] = {home: set()}
    for x, t in tensors.items():
        if t.born < 0:
            present.setdefault(start.get(x, home), set()).add(x)
    flying: dict[int, str] = {}  # tensor -> the tier it is being copied to
    peak: dict[str, int] = {}

    total: dict[str, int] = {tier: sum(tensors[x].nbytes for x in there) for tier, there in present.items()}

    def measure(workspace: int = 0) -> None:
        for tier, size in total.items():
            peak[tier] = max(peak.get(tier, 0), size + (workspace if tier == home else 0))

    measure()
    for number, step in enumerate(steps):
        if isinstance(step, Run):
            what = f"step {number}, {step.name} (op {step.op}, run {step.again})"
            if step.stream != "compute":
                for x in (*step.reads, *step.mutates):
                    if not any(x in there for there in present.values()):
                        raise Illegal(f"{what} reads {tensors[x].name} (tensor {x}), which is nowhere")
                continue
            for x in (*step.reads, *step.mutates):
                if x not in present[home]:
                    raise Illegal(f"{what} reads {tensors[x].name} (tensor {x}), which is not there")
                if flying.get(x) == home:
                    raise Illegal(f"{what} reads {tensors[x].name} (tensor {x}) before its copy has arrived")
            for x in step.writes:
                if x in present[home]:
                    raise Illegal(f"{what} makes {tensors[x].name} (tensor {x}), which is there already")
                present[home].add(x)
                total[home] += tensors[x].nbytes
            measure(step.workspace)
        elif isinstance(step, Copy):
            for x in step.tensors:
                if not step.lands:
                    if x not in present.get(step.dst, ()) and x not in present.get(step.src, ()):
                        raise Illegal(f"step {number} copies tensor {x} over what is in {step.dst}, and it is nowhere")
                    if step.dst == home and x in present[home]:  # otherwise it has memory of its own, in the order of its lane
                        flying[x] = step.dst
                    continue
                source = step.uses if step.aside and step.src == home else (x,)  # a part of that room is copied
                if not present.get(step.src, set()).issuperset(source):
                    raise Illegal(f"step {number} copies tensor {x} from {step.src}, where it is not")
                if x in present.setdefault(step.dst, set()):
                    raise Illegal(f"step {number} copies tensor {x} to {step.dst}, where it is already")
                if x in flying:
                    raise Illegal(f"step {number} copies tensor {x} while it is being copied")
                present[step.dst].add(x)
                total[step.dst] = total.get(step.dst, 0) + tensors[x].nbytes
                flying[x] = step.dst
            measure()
        elif isinstance(step, Collect):
            for x in step.tensors:
                if x not in present[home]:
                    raise Illegal(f"step {number}, {step.kind}, takes tensor {x}, which is not there")
                if x in flying:
                    raise Illegal(f"step {number}, {step.kind}, takes tensor {x} while others do")
                flying[x] = home
        elif isinstance(step, Wait):
            for x in step.tensors:
                flying.pop(x, None)
        elif isinstance(step, Drop):
            if step.tensor not in present.get(step.tier, ()):
                raise Illegal(f"step {number} drops tensor {step.tensor} from {step.tier}, where it is not")
            if step.tensor in flying:
                raise Illegal(f"step {number} drops tensor {step.tensor} while it is being copied")
            present[step.tier].remove(step.tensor)
            total[step.tier] -= tensors[step.tensor].nbytes
    return peak
