"""Plays a training step on several GPUs that copy tensors to the host and back over one link that they share. Simulated.

Every GPU computes the same blocks forward and backward. A block's tensors take room from the start of its forward; those that
leave give it back when their copy is over, and take it again when they begin to come back, the soonest needed first. A forward
waits for room, a backward for its tensors. Tensors whose copy is not over when they are needed stay. Copies that share the link
one way have equal parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from holdall.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapBlock:
    """What a block of the model takes on every GPU."""

    nbytes: int  # of its tensors, from forward to backward
    forward: float = 1.0  # seconds
    backward: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """Bytes per second each way between one switch and the host."""

    rate: float  # of one copy alone
    together: float | None = None  # of several at once, all of them; None: as of one

    def share(self, copies: int) -> float:
        """Of each of so many copies."""
        return self.rate / copies if copies == 1 or self.together is None else self.together / copies


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """A simulated step."""

    seconds: float
    peak: tuple[int, ...]  # GPU -> bytes
    sent: tuple[int, ...]  # GPU -> bytes to the host
    most_copies: int  # that shared the link one way


def play_shared(
    blocks: Sequence[SwapBlock],
    link: SharedLink,
    away: Sequence[Sequence[int]],
    *,
    memory: int,
    in_turns: bool = False,
    sync: int = 0,
) -> SharedStep:
    """One step. `away`: GPU -> the blocks whose tensors leave. `in_turns`: one copy at a time each way. `sync`: GPUs wait for
    each other every so many blocks of the backward; 0: at the end only."""
    for gpu, own in enumerate(away):
        if not can_fit(blocks, own, memory):
            raise InvalidInput(f"GPU {gpu} has no room for all that does not leave it", hint="let more leave")
    return _SharedPlay(blocks, link, [_Gpu(frozenset(own)) for own in away], memory, in_turns, sync).to_the_end()


def can_fit(blocks: Sequence[SwapBlock], away: Sequence[int], memory: int) -> bool:
    """Is there room for each block beside those before it that stay?"""
    kept = 0
    for n, block in enumerate(blocks):
        if kept + block.nbytes > memory:
            return False
        kept += 0 if n in away else block.nbytes
    return True


@dataclass
class _Copy:
    block: int
    left: float  # bytes
    asked: float  # when
    is_begun: bool = False


@dataclass
class _Gpu:
    away: frozenset[int]
    at: int = 0  # tasks that are over: forwards of all blocks, then backwards
    until: float | None = None  # end of the task that runs
    held: int = 0
    peak: int = 0
    sent: int = 0
    out: list[_Copy] = field(default_factory=list)  # copies one after another, each way
    back: list[_Copy] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)  # blocks at the host

    def hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


@dataclass
class _SharedPlay:
    blocks: Sequence[SwapBlock]
    link: SharedLink
    gpus: list[_Gpu]
    memory: int
    in_turns: bool
    sync: int
    now: float = 0.0
    most: int = 0

    def to_the_end(self) -> SharedStep:
        tasks = 2 * len(self.blocks)
        while True:
            while sum(self._begin(gpu) for gpu in self.gpus):
                pass
            if all(gpu.at == tasks for gpu in self.gpus):
                break
            self._advance()
        return SharedStep(
            seconds=self.now,
            peak=tuple(gpu.peak for gpu in self.gpus),
            sent=tuple(gpu.sent for gpu in self.gpus),
            most_copies=self.most,
        )

    def _block(self, at: int) -> int:
        count = len(self.blocks)
        return at if at < count else 2 * count - 1 - at

    def _begin(self, gpu: _Gpu) -> bool:
        """Begin the next task and the next fetch, if they may; True: one has begun."""
        count, begun = len(self.blocks), False
        if gpu.at >= count and not gpu.back:
            coming = max(gpu.gone, default=None)
            if coming is not None and gpu.held + self.blocks[coming].nbytes <= self.memory:
                gpu.gone.discard(coming)
                gpu.hold(self.blocks[coming].nbytes)
                gpu.back.append(_Copy(coming, self.blocks[coming].nbytes, self.now))
                begun = True
        if gpu.until is not None or gpu.at == 2 * count:
            return begun
        n = self._block(gpu.at)
        block = self.blocks[n]
        if gpu.at < count:
            if gpu.held + block.nbytes > self.memory:
                return begun
            gpu.hold(block.nbytes)
            gpu.until = self.now + block.forward
            return True
        if n in gpu.gone or any(copy.block == n for copy in gpu.back) or self._waits_for_others(gpu):
            return begun
        gpu.out = [copy for copy in gpu.out if copy.block != n]  # it has not left
        gpu.until = self.now + block.backward
        return True

    def _waits_for_others(self, gpu: _Gpu) -> bool:
        done = gpu.at - len(self.blocks)
        return bool(self.sync) and done > 0 and done % self.sync == 0 and min(g.at for g in self.gpus) < gpu.at

    def _advance(self) -> None:
        """To the next end of a task or a copy."""
        flows = [self._flows(is_out=True), self._flows(is_out=False)]
        ends = [gpu.until for gpu in self.gpus if gpu.until is not None]
        rates = [self.link.share(len(some)) if some else 0.0 for some in flows]
        each = [(copy, gpu, rate) for some, rate in zip(flows, rates, strict=True) for gpu, copy in some]
        ends += [self.now + copy.left / rate for copy, _, rate in each]
        after = min(ends, default=inf)
        assert after < inf, "nothing moves"
        self.most = max(self.most, *(len(some) for some in flows))
        for copy, gpu, rate in each:
            is_over = self.now + copy.left / rate <= after
            copy.left -= (after - self.now) * rate
            if is_over:
                self._arrive(gpu, copy)
        self.now = after
        for gpu in self.gpus:
            if gpu.until is not None and gpu.until <= after:
                self._end(gpu)

    def _flows(self, *, is_out: bool) -> list[tuple[_Gpu, _Copy]]:
        """The copies one way that have the link now: the first of every GPU, or the first of all."""
        heads = [(gpu, copies[0]) for gpu in self.gpus if (copies := gpu.out if is_out else gpu.back)]
        if self.in_turns and heads:
            heads = [min(heads, key=lambda head: self._urgency(*head, is_out=is_out))]
        for _, copy in heads:
            copy.is_begun = True
        return heads

    def _urgency(self, gpu: _Gpu, copy: _Copy, *, is_out: bool) -> tuple[bool, float, float]:
        """Less is sooner: a copy that has begun; then the seconds that the GPU can compute before it needs this one."""
        waits = 0.0
        if not is_out:
            for at in range(gpu.at, 2 * len(self.blocks) - 1 - copy.block):
                waits += self.blocks[self._block(at)].backward
        return not copy.is_begun, waits, copy.asked

    def _arrive(self, gpu: _Gpu, copy: _Copy) -> None:
        if copy in gpu.out:
            gpu.out.remove(copy)
            gpu.held -= self.blocks[copy.block].nbytes
            gpu.sent += self.blocks[copy.block].nbytes
            gpu.gone.add(copy.block)
        else:
            gpu.back.remove(copy)

    def _end(self, gpu: _Gpu) -> None:
        n = self._block(gpu.at)
        if gpu.at >= len(self.blocks):
            gpu.held -= self.blocks[n].nbytes
        elif n in gpu.away:
            gpu.out.append(_Copy(n, self.blocks[n].nbytes, self.now))
        gpu.at += 1
        gpu.until = None
