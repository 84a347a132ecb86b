"""The best choice for every block of a chain under a budget, by dynamic programming.

The shape is that of pofo (Beaumont et al., NeurIPS 2021): forward and backward of a block nest around those of all later
blocks, so one walk in forward order sees both. Its state is what the earlier blocks have freed, and the bytes of the block
just before that are still on their way: a copy is hidden by the forward of the next block, its return by that block's
backward. More freed is never worse, so only states that no other beats in time and freed bytes are carried on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.planners._menu import Choice, Item
from holdall.types import Hardware

_STATES = 1000  # beyond this, of states closer together than a thousandth of the budget only the fastest is kept


@dataclass(frozen=True, slots=True)
class _State:
    seconds: float
    freed: int  # by blocks whose memory is certain to be free here
    late: int  # by the block just before, free only after this block's forward
    out: int  # bytes of the block just before still to be copied
    back: int
    path: tuple[int, object] | None  # (choice, earlier path): a linked list, so that states share their past


def best_choices(items: Sequence[Item], budget: int, hardware: Hardware) -> tuple[float, list[Choice]] | None:
    """The least extra seconds and a choice per item, or None if no combination stays within the budget."""
    states = [_State(0.0, 0, 0, 0, 0, None)]
    for item in items:
        grown = [new for state in states for new in _extend(state, item, budget, hardware)]
        states = _front(grown, budget)
        if not states:
            return None
    ended = [(s.seconds + _tail(s, hardware), s) for s in states]
    seconds, state = min(ended, key=lambda e: e[0])
    picks: list[int] = []
    path = state.path
    while path is not None:
        picks.append(path[0])
        path = path[1]  # type: ignore[assignment]
    return seconds, [item.choices[n] for item, n in zip(items, reversed(picks), strict=True)]


def _extend(state: _State, item: Item, budget: int, hardware: Hardware) -> list[_State]:
    """Every choice for the next block that fits on top of a state."""
    found = []
    for n, choice in enumerate(item.choices):
        if item.before_forward - state.freed + choice.forward > budget:
            continue
        if item.before_backward - state.freed + choice.backward > budget:
            continue
        seconds = state.seconds + step_seconds(state.out, state.back, item, choice, hardware)
        freed = state.freed + state.late
        if choice.late:
            found.append(
                _State(seconds, freed + choice.freed - choice.slow, choice.slow, choice.out, choice.back, (n, state.path))
            )
        else:
            found.append(_State(seconds, freed + choice.freed, 0, 0, 0, (n, state.path)))
    return found


def step_seconds(out: int, back: int, item: Item, choice: Choice, hardware: Hardware) -> float:
    """What a choice adds: recomputation, and copies as far as nothing hides them."""
    seconds = choice.seconds
    far = hardware.far
    if far is None:
        return seconds
    if out:
        seconds += max(0.0, far.latency + out / far.write - item.forward_seconds)
    if back:
        seconds += max(0.0, far.latency + back / far.read - item.backward_seconds - choice.seconds)
    if not choice.late and choice.out:
        seconds += 2 * far.latency + choice.out / far.write + choice.back / far.read
    return seconds


def _tail(state: _State, hardware: Hardware) -> float:
    """Copies of the last block: nothing comes after it to hide them."""
    far = hardware.far
    if far is None or not state.out:
        return 0.0
    return 2 * far.latency + state.out / far.write + state.back / far.read


def _front(states: list[_State], budget: int) -> list[_State]:
    """States that no other beats. Late bytes and copies under way must be equal for two to be compared."""
    groups: dict[tuple[int, int, int], list[_State]] = {}
    for s in states:
        groups.setdefault((s.late, s.out, s.back), []).append(s)
    kept: list[_State] = []
    for group in groups.values():
        group.sort(key=lambda s: (s.seconds, -s.freed))
        most = -1
        for s in group:
            if s.freed > most:
                kept.append(s)
                most = s.freed
    if len(kept) <= _STATES:
        return kept
    grain = max(1, budget // 1000)
    merged: dict[tuple[int, int, int, int], _State] = {}
    for s in kept:
        key = (s.freed // grain, s.late, s.out, s.back)
        if key not in merged or s.seconds < merged[key].seconds:
            merged[key] = s
    return list(merged.values())
