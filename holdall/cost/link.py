"""Seconds for copies between the accelerator and a farther memory.

`copy_seconds` prices one copy alone. `Links` is the same with a clock: each direction is a queue served in order, and while
bytes flow both ways at once each direction keeps `hardware.duplex` of its rate. A copy that starts later can thus delay one
that is under way, so a finish time is worked out when it is asked for, from the copies known by then.

    out  |lat|######full######|##shared##|            A queue's head first spends its latency, during which no bytes flow
    in                    |lat|##shared##|##full##|   and the other direction is not slowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdall.errors import InvalidInput, unknown_name
from holdall.types import Hardware, Tier
from holdall.types.trace import Bytes, Seconds

Ticket = int
OUT, IN = "out", "in"  # from the accelerator, to the accelerator
_NEVER = float("inf")


def copy_seconds(nbytes: Bytes, tier: Tier, hardware: Hardware, direction: str, both_busy: bool = False) -> Seconds:
    """One copy between the accelerator and `tier`. `both_busy`: the other direction is in use all the while."""
    share = hardware.duplex if both_busy else 1.0
    return tier.latency + nbytes / (share * _rate(tier, direction))


def _rate(tier: Tier, direction: str) -> float:
    if direction not in (OUT, IN):
        raise unknown_name("direction", direction, (OUT, IN))
    rate = tier.write if direction == OUT else tier.read
    if rate <= 0:
        raise InvalidInput(
            f"the memory `{tier.name}` has no rate for copies {direction}",
            hint="give its `read` and `write` in bytes per second",
        )
    return rate


@dataclass(slots=True)
class _Pending:
    """What is left of a copy, and what is known of when it began and ends."""

    ticket: Ticket
    latency: Seconds
    nbytes: float
    rate: float
    began: Seconds = _NEVER


class Links:
    """Both directions of the link on one clock. Starts are told in the order of time; `finish` may be asked at any moment."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._clock = 0.0  # everything up to here is settled: no copy can still start before it
        self._queues: dict[str, list[_Pending]] = {OUT: [], IN: []}
        self._settled: dict[Ticket, tuple[Seconds, Seconds]] = {}
        self._expected: dict[Ticket, tuple[Seconds, Seconds]] | None = None  # of what is queued now; None: not worked out
        self._tickets = 0

    def start(self, now: Seconds, tier_name: str, direction: str, nbytes: Bytes) -> Ticket:
        """Queue a copy at `now`, which is never before an earlier start's."""
        assert now >= self._clock, f"a copy starts at {now}, before {self._clock}"
        tier = self.hardware.tier(tier_name)
        rate = _rate(tier, direction)
        self._settled.update(_serve(self._queues, self.hardware.duplex, self._clock, until=now))
        self._clock = now
        self._expected = None
        self._tickets += 1
        self._queues[direction].append(_Pending(self._tickets, tier.latency, nbytes, rate))
        return self._tickets

    def finish(self, ticket: Ticket) -> Seconds:
        """When the copy is done, if nothing more starts before that."""
        return self.span(ticket)[1]

    def span(self, ticket: Ticket) -> tuple[Seconds, Seconds]:
        """When the copy reached the head of its queue, and when it is done."""
        if ticket in self._settled:
            return self._settled[ticket]
        if self._expected is None:
            copied = {direction: [_copy(p) for p in queue] for direction, queue in self._queues.items()}
            self._expected = _serve(copied, self.hardware.duplex, self._clock, until=_NEVER)
        return self._expected[ticket]


def _copy(p: _Pending) -> _Pending:
    return _Pending(p.ticket, p.latency, p.nbytes, p.rate, p.began)


def _serve(
    queues: Mapping[str, list[_Pending]], duplex: float, now: Seconds, until: Seconds
) -> dict[Ticket, tuple[Seconds, Seconds]]:
    """Work the queues off from `now` to `until`; (began, done) of the copies that are done by then.

    Between two changes (a latency over, a copy done) every rate is constant, so each turn of the loop is exact.
    """
    done: dict[Ticket, tuple[Seconds, Seconds]] = {}
    served = dict.fromkeys(queues, 0)  # heads are passed by index and cut off at the end
    while True:
        heads = [(d, queue[served[d]]) for d, queue in queues.items() if served[d] < len(queue)]
        for _, head in heads:
            head.began = min(head.began, now)
        share = duplex if len(heads) == 2 and not any(head.latency for _, head in heads) else 1.0
        lefts = [head.latency or head.nbytes / (head.rate * share) for _, head in heads]
        turn = min(lefts, default=_NEVER)
        if not heads or now + turn > until:
            turn = until - now
        for (direction, head), left in zip(heads, lefts, strict=True):
            if head.latency:
                head.latency = 0.0 if left <= turn else head.latency - turn
            elif left <= turn:
                done[head.ticket] = (head.began, now + turn)
                served[direction] += 1
            else:
                head.nbytes = max(0.0, head.nbytes - turn * head.rate * share)
        now += turn
        if not heads or now >= until:
            break
    for direction, queue in queues.items():
        del queue[: served[direction]]
    return done
