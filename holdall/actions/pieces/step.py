"""The traced step with some modules in pieces, as `runtime/activations/pieces.py` runs them.

Forward, for each piece: the module's ops without a graph, then a copy into the whole output; only the input is saved. Backward,
for each piece: the module's ops with a graph, its backward, a copy into the whole gradient of the input; gradients of weights
are added up. The first piece and one of the others stand for all: later pieces hold the same bytes, and their seconds are added
to those of the second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from holdall.actions.pieces.regions import Region, is_rowless
from holdall.types import Block, Kind, Op, Phase, Save, Site, TensorInfo, Trace
from holdall.types.layout import allocated_bytes, element_bytes
from holdall.types.trace import OpId, TensorId

_COPY, _EMPTY, _ADD = "aten.copy_.default", "aten.empty.memory_format", "aten.add_.Tensor"


def in_pieces(trace: Trace, found: Sequence[Region], rows: int) -> Trace:
    """The trace with these modules in pieces of so many rows."""
    return _Rewriting(trace, found, rows).apply()


class _Part(NamedTuple):
    rows: int
    share: float  # of the module's seconds
    pieces: int  # that it stands for


class _Rewriting:
    def __init__(self, trace: Trace, found: Sequence[Region], rows: int) -> None:
        self.trace, self.rows = trace, rows
        self.forward = {r.first: r for r in found}
        self.backward = {r.begin: r for r in found}
        self.ops: list[Op] = []
        self.tensors: dict[TensorId, TensorInfo] = {}
        self.moved: dict[OpId, OpId] = {-1: -1}  # op of the trace -> the op after which the same has happened
        self.next_id = trace.next_id
        self.saved: list[tuple[Region, OpId]] = []  # with the op after which the input is saved
        self.asked: dict[str, tuple[OpId, OpId]] = {}  # module -> (asked for, released)
        self.inside: dict[str, OpId] = {}  # module -> the last op of its backward before sums with others' gradients
        self.is_backward = False  # the region at hand is in its backward

    def apply(self) -> Trace:
        at = 0
        while at < len(self.trace.ops):
            region = self.forward.get(at) or self.backward.get(at)
            if region is None:
                self.moved[at] = self.add(self.trace.ops[at])
                at += 1
                continue
            self.is_backward = at == region.begin
            pieces = _Pieces(self, region)
            pieces.backward() if self.is_backward else pieces.forward()
            last = region.end if self.is_backward else region.last
            inside = self.inside[region.module] if self.is_backward else len(self.ops) - 1
            self.moved.update(dict.fromkeys(range(at, last), inside))
            self.moved[last] = len(self.ops) - 1
            at = last + 1
        self.moved[len(self.trace.ops)] = len(self.ops)
        self._keep_others()
        saves, numbers = self._saves()
        blocks = tuple(self._block(b, numbers) for b in self.trace.blocks)
        whole = self._block(self.trace.whole, numbers) if self.trace.whole is not None else None
        return replace(
            self.trace, ops=tuple(self.ops), tensors=dict(sorted(self.tensors.items())), saves=saves, blocks=blocks, whole=whole
        )

    def add(self, op: Op) -> OpId:
        """Append an op; returns its number."""
        self.ops.append(replace(op, id=len(self.ops)))
        return len(self.ops) - 1

    def new(self, like: TensorInfo, **changes: object) -> TensorId:
        """A tensor that the trace does not have."""
        self.next_id += 1
        self.tensors[self.next_id - 1] = replace(like, id=self.next_id - 1, **changes)  # type: ignore[arg-type]
        return self.next_id - 1

    def _keep_others(self) -> None:
        """Tensors of the trace that are still made, with their new moments, and the moments when new ones are made."""
        made = {x: op.id for op in self.ops for x in op.writes}
        self.tensors = {x: replace(info, born=made[x]) for x, info in self.tensors.items()}
        for x, info in self.trace.tensors.items():
            if info.born >= 0 and x not in made:
                continue  # made in pieces
            freed = None if info.freed is None else self.moved[info.freed]
            self.tensors[x] = replace(info, born=made.get(x, -1), freed=freed)

    def _saves(self) -> tuple[tuple[Save, ...], dict[int, int]]:
        """The saves, and their new numbers: those of modules in pieces are replaced by one of the input, at the first."""
        inner = {id(save): r for r in self.forward.values() for save in r.saves}
        found: list[Save] = []
        numbers: dict[int, int] = {}
        packed = {r.module: at for r, at in self.saved}
        for n, save in enumerate(self.trace.saves):
            region = inner.get(id(save))
            if region is None:
                numbers[n] = len(found)
                unpacked, released = self._moment(save.unpacked), self._moment(save.released)
                found.append(replace(save, packed=self.moved[save.packed], unpacked=unpacked, released=released))
            elif region.module in packed:
                asked, released = self.asked[region.module]
                numbers[n] = len(found)
                found.append(Save(tensor=region.input, packed=packed.pop(region.module), unpacked=asked, released=released))
                self.tensors[region.input] = replace(self.tensors[region.input], saved=True)
        return tuple(found), numbers

    def _moment(self, at: OpId | None) -> OpId | None:
        return None if at is None else self.moved[at]

    def _block(self, block: Block, numbers: Mapping[int, int]) -> Block:
        is_split = any(block.first <= r.first <= block.last for r in self.forward.values())
        return replace(
            block,
            first=self.moved[block.first - 1] + 1,
            last=self.moved[block.last],
            backward=self._moment(block.backward),
            saves=tuple(numbers[n] for n in block.saves if n in numbers),
            beside=tuple(self.moved[k] for k in block.beside),
            apart="a part of it runs in pieces" if is_split else block.apart,
        )


class _Pieces:
    """The ops of one region in pieces: the first, and one that stands for all others."""

    def __init__(self, owner: _Rewriting, region: Region) -> None:
        self.owner, self.region, self.trace = owner, region, owner.trace
        rows = min(owner.rows, region.tokens)
        rest = region.tokens - rows
        others = -(-rest // rows)
        self.parts = [_Part(rows, rows / region.tokens, 1)] + (
            [_Part(min(rows, rest), rest / region.tokens, others)] if rest else []
        )
        self.values = self.trace.ops[region.first : region.last + 1]
        summed = {op.id for op in region.sums}
        self.back = [op for op in self.trace.ops[region.begin : region.end + 1] if op.id not in summed]
        made = {x for op in self.back for x in op.writes}
        self.same = {op.writes[0]: next(x for x in op.reads if x in made) for op in region.sums}  # sum -> the module's own part
        timed = [op.seconds / op.moved for op in (*self.values, *self.back) if op.moved]
        self.rate = min(timed, default=0.0)  # seconds per byte of copies and sums

    def forward(self) -> None:
        """Without a graph; each result is freed with its last local reference."""
        output = self.region.output
        self.owner.saved.append((self.region, len(self.owner.ops) - 1))
        for n, part in enumerate(self.parts):
            now: dict[TensorId, TensorId] = {}
            at = self._run(self.values, now, part)
            for x, piece in now.items():
                self._end(piece, _latest(at, self.trace.tensors[x].freed))
            self._gather(output, now[output], part, is_first=not n)

    def backward(self) -> None:
        region, owner = self.region, self.owner
        asked = len(owner.ops) - 1
        final = None if region.outgoing is None else self.same.get(region.outgoing, region.outgoing)
        whole = region.outgoing
        if region.outgoing is not None and region.sums:
            whole = owner.new(self.trace.tensors[region.outgoing])
        for n, part in enumerate(self.parts):
            now: dict[TensorId, TensorId] = {}
            at = self._run(self.values, now, part, phase=Phase.BACKWARD)
            grads = [x for op in self.back for x in op.writes if self.trace.tensors[x].kind is Kind.GRAD]
            kept = () if n else grads  # the first piece's are added to
            at.update(self._run(self.back, now, part, kept=kept))
            end = len(owner.ops) - 1
            for x, piece in now.items():
                if x != final and x not in grads:
                    self._end(piece, end if x == region.output else max(_latest(at, k) for k in self._held(x)))
            if whole is not None and final is not None:
                self._gather(whole, now[final], part, is_first=not n)
            if n:
                self._add_up([(x, now[x]) for x in grads], part)
        inside = len(owner.ops) - 1
        for op in region.sums:
            (other,) = [x for x in op.reads if x != self.same[op.writes[0]]]
            assert whole is not None
            assert region.outgoing is not None
            owner.add(replace(op, reads=(other, whole), writes=(region.outgoing,)))
            self._end(whole, len(owner.ops) - 1)
        owner.asked[region.module] = asked, len(owner.ops) - 1
        owner.inside[region.module] = inside

    def _held(self, x: TensorId) -> list[OpId]:
        """The moments until which a tensor of the module's call is held: by frames, by autograd, or as a part of a sum."""
        found = [self.trace.tensors[x].freed, *(s.released for s in self.region.saves if s.tensor == x)]
        found += [self.trace.tensors[total].freed for total, part in self.same.items() if part == x]
        return [self.region.end if k is None else k for k in found]

    def _run(
        self,
        ops: Iterable[Op],
        now: dict[TensorId, TensorId],
        part: _Part,
        *,
        phase: Phase | None = None,
        kept: Collection[TensorId] = (),
    ) -> dict[OpId, OpId]:
        """Run ops on a piece. `kept`: results that are the whole ones already. Returns the new op of every op."""
        at: dict[OpId, OpId] = {}
        for op in ops:
            reads = tuple(now.get(self.same.get(x, x), x) for x in op.reads)
            for x in op.writes:
                now[x] = x if x in kept else self._piece(x, part)
            is_whole = is_rowless(op, self.region.rowless)  # every piece computes it anew
            times = part.pieces if is_whole else part.share
            at[op.id] = self.owner.add(
                replace(
                    op,
                    site=op.site if phase is None else replace(op.site, phase=phase),
                    reads=reads,
                    writes=tuple(now[x] for x in op.writes),
                    mutates=tuple(now.get(x, x) for x in op.mutates),
                    seconds=op.seconds * times,
                    flops=int(op.flops * times),
                    moved=int(op.moved * times),
                    workspace=op.workspace if is_whole else int(op.workspace * part.rows / self.region.tokens),
                )
            )
        return at

    def _piece(self, x: TensorId, part: _Part) -> TensorId:
        info = self.trace.tensors[x]
        if info.kind is Kind.GRAD:  # of a weight: as large as the whole
            return self.owner.new(info, kind=Kind.TEMP, name=f"{info.name} of a piece")
        if x in self.region.rowless:
            return self.owner.new(info)
        shape = _shortened(info.shape, self.region.tokens, part.rows)
        size = allocated_bytes(element_bytes(shape, info.dtype), self.trace.about.device)
        return self.owner.new(info, kind=Kind.TEMP, shape=shape, nbytes=size, saved=False, name=f"a piece of {info.name}")

    def _gather(self, whole: TensorId, piece: TensorId, part: _Part, *, is_first: bool) -> None:
        """Copy a piece into the whole, which is allocated after the first piece was computed."""
        if is_first:
            self._extra(_EMPTY, (), (whole,), (), 0.0)
        moved = 2 * self.owner.tensors[piece].nbytes * part.pieces
        self._end(piece, self._extra(_COPY, (piece,), (), (whole,), moved))

    def _add_up(self, gradients: Sequence[tuple[TensorId, TensorId]], part: _Part) -> None:
        for total, more in gradients:
            self._extra(_ADD, (more,), (), (total,), 3 * self.owner.tensors[more].nbytes * part.pieces)
        for _, more in gradients:
            self._end(more, len(self.owner.ops) - 1)

    def _extra(
        self, name: str, reads: tuple[TensorId, ...], writes: tuple[TensorId, ...], mutates: tuple[TensorId, ...], moved: float
    ) -> OpId:
        """An op that the module itself does not have."""
        like = self.back[0] if self.owner.is_backward else self.values[0]
        site = Site(phase=like.site.phase, module=self.region.module, op=name, nth=len(self.owner.ops))
        return self.owner.add(
            Op(
                id=0,
                site=site,
                reads=reads,
                writes=writes,
                mutates=mutates,
                seconds=self.rate * moved,
                moved=int(moved),
                dtype=like.dtype,
            )
        )

    def _end(self, tensor: TensorId, at: OpId) -> None:
        self.owner.tensors[tensor] = replace(self.owner.tensors[tensor], freed=at)


def _latest(at: Mapping[OpId, OpId], moment: OpId | None) -> OpId:
    """The op of a piece after which the same has happened as after an op of the whole."""
    done = [new for old, new in at.items() if moment is None or old <= moment]
    return max(done)


def _shortened(shape: tuple[int, ...], tokens: int, rows: int) -> tuple[int, ...]:
    """The shape with so many rows in the place of one per position."""
    count = 1
    for n, size in enumerate(shape):
        count *= size
        if count == tokens:
            return (rows, *shape[n + 1 :])
    raise AssertionError(shape)
