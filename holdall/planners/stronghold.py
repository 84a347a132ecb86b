"""STRONGHOLD: a window of layers on the device, moved along behind the computation; the host updates the layers outside of it.

Sun et al., SC 2022. With a window of m layers:

- the first m layers, and what several blocks share or is in none, stay on the device and are updated there;
- of the others, layer j sets out when the computation of layer j - m begins (in backward, j + m): 2m are there at most;
- the last m layers are still there when backward begins: they are loaded once in a step, the layers before them twice;
- the host updates a layer as soon as its gradients are there, where the loop permits (`reads_gradients=False`), else
  beside the next forward, which waits for each layer's own update.

m is the smallest window that hides all loads: with the profiled seconds of every layer, load j is over when the computation
reaches it, loads one after the other on the one link there is; in backward, gradients on their way out count with the loads, as
in the paper. The paper's condition on memory (2m layers fit) is left to the simulator. Where no window that fits hides all
loads, the one that exposes the least is taken, the smallest of equals. Nothing is done if plain training fits.

Here each layer's buffer has its own size, so layers may differ, where the paper recycles 2m buffers of one size. Not here: how
many optimizers run side by side on the host (each update uses all of its processors), several streams of micro-batches on one
device, disks, several ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdall.actions.place import Place, streamable
from holdall.actions.place.schedule import users
from holdall.cost.link import copy_seconds
from holdall.errors import InvalidInput
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.planning.state_planners import NOTHING, missing_bytes, movable, places_states, treatments, update_moment
from holdall.types import Action, Phase, Plan, Problem, Unit
from holdall.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Stronghold:
    window: int = 0  # layers; 0: the smallest that hides all loads
    recompute: bool | None = None  # every block, or none; None: every block where nothing fits without

    name: ClassVar[str] = "stronghold"
    paper: ClassVar[str] = "Sun et al., SC 2022"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.window < 0:
            raise InvalidInput(f"`window` is {self.window} layers", hint="use 1 or more, or 0 to let it be chosen")
        if not self.recompute and not self.window and not over_budget(problem, outcome_or_never(problem, [])):
            return finish(self, problem, [], why=[NOTHING], began=began)
        least: tuple[int, list[Action]] | None = None
        for blocks in treatments(problem, self.recompute):
            window, why = self._window(problem, blocks)
            actions = [*blocks, *([place_window(problem, window)] if window else [])]
            missing = missing_bytes(problem, outcome_or_never(problem, actions))
            if not missing:
                return finish(self, problem, actions, why=why, began=began)
            least = (missing, actions) if least is None or missing < least[0] else least
        assert least is not None
        return finish(self, problem, least[1], began=began)

    def _window(self, problem: Problem, blocks: Sequence[Action]) -> tuple[int, list[str]]:
        if not places_states(problem):
            return 0, []
        times = layer_times(problem, blocks)
        count = len(times.forward)
        if self.window or not count:
            return min(self.window, count) or 1, [f"a window of {self.window} of {count} layers, as asked for"]

        def fits(window: int) -> bool:
            return not missing_bytes(problem, outcome_or_never(problem, [*blocks, place_window(problem, window)]))

        window = smallest_window(times, fits)
        waits = exposed(times, window)
        said = "hides all loads" if not waits else f"exposes {format_seconds(waits)} of loads, the least of those that fit"
        return window, [f"a window of {window} of {count} layers {said}; when: {update_moment(problem)}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of every layer, in order: what the paper's warm-up measures."""

    forward: tuple[float, ...]  # from its first op to the next layer's
    backward: tuple[float, ...]  # likewise, with what is run again
    load: tuple[float, ...]  # its weights to the device
    unload: tuple[float, ...]  # its gradients to the host


def layers_of(problem: Problem) -> list[Unit]:
    can = streamable(problem.trace)
    return [u for u in movable(problem.trace) if u.name in can]


def layer_times(problem: Problem, blocks: Sequence[Action]) -> Times:
    trace, hardware = problem.trace, problem.hardware
    assert hardware.far is not None
    used, layers = users(trace), layers_of(problem)
    calls = [used[u.name][0] for u in layers]
    again = {name for a in blocks for name in getattr(a, "blocks", ())}
    stages = [b.backward for b in calls if b.backward is not None]
    end = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
    first_backward = next((op.id for op in trace.ops if op.site.phase is Phase.BACKWARD), end)
    forward, backward = [], []
    for n, block in enumerate(calls):
        until = calls[n + 1].first if n + 1 < len(calls) else first_backward
        forward.append(sum(op.seconds for op in trace.ops[block.first : until]))
        run_again = sum(op.seconds for op in trace.ops[block.first : block.last + 1]) if block.name in again else 0.0
        begins = block.backward + 1 if block.backward is not None else end
        ends = min((k + 1 for k in stages if k + 1 > begins), default=end)
        backward.append(run_again + sum(op.seconds for op in trace.ops[begins:ends]))

    def bytes_of(tensors: Sequence[int]) -> int:
        return sum(trace.tensors[x].nbytes for x in tensors)

    return Times(
        forward=tuple(forward),
        backward=tuple(backward),
        load=tuple(copy_seconds(bytes_of(u.weights), hardware, hardware.far.name, problem.home) for u in layers),
        unload=tuple(copy_seconds(bytes_of(u.grads), hardware, problem.home, hardware.far.name) for u in layers),
    )


def smallest_window(times: Times, fits: Callable[[int], bool]) -> int:
    """The smallest window that fits and exposes nothing; else the one of those that fit that exposes least; else 1.

    A window takes more memory than any smaller one.
    """
    best, least = 1, float("inf")
    for window in range(1, len(times.forward) + 1):
        if not fits(window):
            break
        waits = exposed(times, window)
        if waits < least:
            best, least = window, waits
        if not waits:
            break
    return best


def exposed(times: Times, window: int) -> float:
    """Seconds of a step in which the device waits for loads."""
    count = len(times.load)
    back = [load + unload for load, unload in zip(times.load, times.unload, strict=True)]
    in_backward = _waits(times.backward[::-1], back[::-1], window, until=count - window)  # the first layers stay
    return _waits(times.forward, times.load, window, until=count) + in_backward


def _waits(computes: Sequence[float], loads: Sequence[float], window: int, *, until: int) -> float:
    """Load j begins when computation j - window does, and after the load before; computation j begins when both are over."""
    starts: list[float] = []
    now = link = waited = 0.0
    for j, compute in enumerate(computes):
        if window <= j < until:
            link = max(link, starts[j - window]) + loads[j]
            waited += max(0.0, link - now)
            now = max(now, link)
        starts.append(now)
        now += compute
    return waited


def place_window(problem: Problem, window: int) -> Place:
    """The first layers stay with all that is theirs; of the others, the last keep their weights here."""
    trace, layers = problem.trace, [u.name for u in layers_of(problem)]
    is_narrow = trace.about.precision is not None
    rows = {u.name: ("resident", "host") for u in movable(trace) if is_narrow and not u.numel}  # a wide copy is of no use here
    rows.update(dict.fromkeys(layers[window : max(window, len(layers) - window)], ("streamed", "host")))
    rows.update(dict.fromkeys(layers[max(window, len(layers) - window) :], ("resident", "host")))
    when = update_moment(problem)
    overlap = problem.hardware.overlap
    return Place.of(trace, rows, when=when, share=problem.accumulate == 1, overlap=overlap, prefetch=window)
