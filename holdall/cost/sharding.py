"""Model states over data-parallel ranks in closed form: memory, bytes sent and seconds of three nested shard factors.

Parameters are cut into p parts, gradients into g, optimizer states into o, where p divides g, g divides o and o divides the
number of ranks d; every part is repeated on the other d / p, d / g, d / o ranks. Published systems are points of this space:

    DDP (1, 1, 1)     ZeRO-1 (1, 1, d)     ZeRO-2 (1, d, d)     ZeRO-3 and FSDP (d, d, d)     MiCS and HSDP (s, s, s)
    ZeRO++'s hpZ (d, d, d), with a second copy in k parts     PaRO's IIG (k, k, d)     AMSP any

Bytes that one rank sends in a step of A backwards, P being the bytes of all parameters as they travel, G of all gradients:

    gather parameters        A P (p-1)/p in forward, the same in backward unless they stay; over k ranks from a second copy
    reduce gradients         A G (g-1)/g, every backward
    at the end of a step     G/g (r-1)/r scattered, r = o/g; 2 G/o (q-1)/q all-reduced, q = d/o
    after the update         P/p (r-1)/r gathered, r = o/p

Ranks of a group are as near as they can be: parts of parameters on consecutive ranks, those of gradients and of states on
groups of these. This is an estimate to search by; `parallel/sharding/by_rule.py` has the moments of a real step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdall.cost.collectives import collective_seconds, sent_bytes
from holdall.errors import InvalidInput
from holdall.types.mesh import MeshDim, Network
from holdall.types.trace import Bytes, Seconds


class ShardFactors(NamedTuple):
    """Into how many parts parameters, gradients and optimizer states are cut."""

    params: int
    grads: int
    states: int

    def __str__(self) -> str:
        return f"({self.params}, {self.grads}, {self.states})"


def presets(ranks: int, per_node: int) -> dict[str, ShardFactors]:
    """Published points of the space by name."""
    d, k = ranks, min(per_node, ranks)
    return {
        "ddp": ShardFactors(1, 1, 1),
        "zero1": ShardFactors(1, 1, d),
        "zero2": ShardFactors(1, d, d),
        "zero3": ShardFactors(d, d, d),
        "mics": ShardFactors(k, k, k),
        "iig": ShardFactors(k, k, d),
    }


def divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def nested_factors(ranks: int) -> Iterator[ShardFactors]:
    """All of them, from replicas to full shards."""
    for o in divisors(ranks):
        for g in divisors(o):
            for p in divisors(g):
                yield ShardFactors(p, g, o)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Bytes of a model's states on a rank that shards nothing. `units`: parts that are gathered one by one, such as layers."""

    params: Bytes
    grads: Bytes
    states: Bytes  # masters among them
    units: int = 1
    params_sent: Bytes | None = None  # as they travel, where that is in another precision
    grads_sent: Bytes | None = None

    @staticmethod
    def mixed(count: int, *, grad: int = 2, states: int = 12, units: int = 1) -> ModelStates:
        """`count` parameters in 16 bits, with Adam: a master and two moments in 32 bits are 12 bytes."""
        return ModelStates(params=2 * count, grads=grad * count, states=states * count, units=units)

    @property
    def gathered(self) -> Bytes:
        return self.params if self.params_sent is None else self.params_sent

    @property
    def reduced(self) -> Bytes:
        return self.grads if self.grads_sent is None else self.grads_sent


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStep:
    """What a step does besides: backwards, and the computation of one, behind which collectives hide."""

    ranks: int
    backwards: int = 1
    forward: Seconds = 0.0
    backward: Seconds = 0.0
    stays: bool = False  # gathered parameters stay from forward to backward
    second: int = 0  # parts of a second copy of the parameters, from which backward gathers (hpZ); 0: there is none


class Sending(NamedTuple):
    """One collective of a step, over all units together."""

    phase: str  # "forward", "backward", "end" (behind the last backward) or "after" (behind the next first forward)
    kind: str
    nbytes: Bytes  # of the whole buffer
    ranks: int  # of its group
    stride: int  # distance of two neighbours of it
    times: int  # in a step

    @property
    def sent(self) -> Bytes:
        return self.times * sent_bytes(self.kind, self.nbytes, self.ranks)


class Links(Protocol):
    """Seconds of one collective over `ranks` ranks, of which neighbours are `stride` apart."""

    def seconds(self, kind: str, nbytes: Bytes, ranks: int, stride: int) -> Seconds: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """Nodes of `per_node` ranks. A group that spans nodes is as slow as what joins them, unless collectives are hierarchical:
    then that carries only what the ranks of a node leave to each."""

    per_node: int
    inside: Network
    across: Network
    hierarchical: bool = False

    def near(self, ranks: int, stride: int) -> int:
        """Ranks of a group that share a node."""
        return min(ranks, max(1, self.per_node // stride))

    def seconds(self, kind: str, nbytes: Bytes, ranks: int, stride: int) -> Seconds:
        near = self.near(ranks, stride)
        if near == ranks:
            return collective_seconds(kind, nbytes, [MeshDim(name="inside", size=ranks, network=self.inside)])
        if near == 1 or not self.hierarchical or ranks % near:
            return collective_seconds(kind, nbytes, [MeshDim(name="across", size=ranks, network=self.across)])
        far = MeshDim(name="across", size=ranks // near, network=self.across)
        return collective_seconds(kind, nbytes, [far, MeshDim(name="inside", size=near, network=self.inside)])


def check_factors(factors: ShardFactors, ranks: int) -> None:
    p, g, o = factors
    if min(factors) < 1 or g % p or o % g or ranks % o:
        raise InvalidInput(
            f"shard factors {factors} of {ranks} ranks: each must divide the next, and the last the ranks",
            hint=f"such as {ShardFactors(1, 1, ranks)}",
        )


def state_bytes(factors: ShardFactors, model: ModelStates, step: ShardStep) -> Bytes:
    """Bytes of model states that a rank holds all the time, rounded up."""
    p, g, o = factors
    second = _part(model.params, step.second) if step.second else 0
    return _part(model.params, p) + _part(model.grads, g) + _part(model.states, o) + second


def transient_bytes(factors: ShardFactors, model: ModelStates, step: ShardStep) -> Bytes:
    """Bytes for a while: the gathered parameters of the unit that computes and of the next, and gradients of one unit."""
    p, g, _ = factors
    whole = model.params if step.stays else min(2, model.units) * _part(model.params, model.units)
    return (whole if p > 1 else 0) + (_part(model.grads, model.units) if g > 1 else 0)


def memory(factors: ShardFactors, model: ModelStates, step: ShardStep) -> Bytes:
    return state_bytes(factors, model, step) + transient_bytes(factors, model, step)


def sendings(factors: ShardFactors, model: ModelStates, step: ShardStep) -> tuple[Sending, ...]:
    """The collectives of a step."""
    check_factors(factors, step.ranks)
    p, g, o = factors
    times, copies = step.backwards, step.ranks // o
    again = 0 if step.stays else times
    found = [
        Sending("forward", "all_gather", model.gathered, p, 1, times),
        Sending("backward", "all_gather", model.gathered, (step.second or p) if p > 1 else 1, 1, again),
        Sending("backward", "reduce_scatter", model.reduced, g, 1, times),
        Sending("end", "reduce_scatter", model.reduced // g, o // g, g, 1),
        Sending("end", "all_reduce", model.reduced // o, copies, o, 1),
        Sending("after", "all_gather", model.gathered // p, o // p, p, 1),
    ]
    return tuple(s for s in found if s.ranks > 1 and s.times)


def sent(factors: ShardFactors, model: ModelStates, step: ShardStep) -> Bytes:
    """Bytes that a rank sends in a step."""
    return sum(s.sent for s in sendings(factors, model, step))


def sent_across(factors: ShardFactors, model: ModelStates, step: ShardStep, per_node: int) -> Bytes:
    """Those of collectives whose ranks are on several nodes: a ring crosses from one to the next with all of them."""
    return sum(s.sent for s in sendings(factors, model, step) if s.ranks * s.stride > per_node)


def collectives_seconds(factors: ShardFactors, model: ModelStates, step: ShardStep, links: Links) -> Seconds:
    """All collectives of a step, one after the other (AMSP's objective)."""
    return sum(s.times * _seconds(s, model, links) for s in sendings(factors, model, step))


def step_seconds(factors: ShardFactors, model: ModelStates, step: ShardStep, links: Links) -> Seconds:
    """Computation, and what collectives take beyond it (PaRO's objective). Those of the first unit of a phase hide behind
    nothing."""
    once = dict.fromkeys(("forward", "backward", "end", "after"), 0.0)
    for s in sendings(factors, model, step):
        once[s.phase] += _seconds(s, model, links)

    def phase(compute: Seconds, collectives: Seconds) -> Seconds:
        bare = collectives / model.units
        return bare + max(compute, collectives - bare)

    later = step.backwards - 1
    first_forward = phase(step.forward, once["forward"] + once["after"])
    last_backward = phase(step.backward, once["backward"] + once["end"])
    return (
        first_forward + later * (phase(step.forward, once["forward"]) + phase(step.backward, once["backward"])) + last_backward
    )


def _seconds(sending: Sending, model: ModelStates, links: Links) -> Seconds:
    """Of one time, unit by unit."""
    return model.units * links.seconds(sending.kind, sending.nbytes // model.units, sending.ranks, sending.stride)


def _part(nbytes: Bytes, parts: int) -> Bytes:
    return -(-nbytes // parts)
