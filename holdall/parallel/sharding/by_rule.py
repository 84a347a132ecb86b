"""The step of one rank of a sharded model, by rule: made of the trace of the unsharded model, for any number of ranks.

Recording a sharded model (`tracing/shards.py`) needs torch's engine, which runs where its devices are. This needs the plain
trace alone, so a laptop plans for hundreds of GPUs. What is put in is what the engine of torch 2.13 does, moment by moment, as
recordings show it:

    forward of a group        gather its parameters into one buffer, copy them out of it; the buffer lives until the next
                              group's are copied out; the parameters go after the group (zero3; fsdp, but for the root), or stay
    backward of a group       copy its parameters out of the buffer that was filled ahead, free that, fill the next group's
    after it                  free its parameters, copy its gradients into one buffer, reduce and scatter that into the shards'
                              gradients; the buffer lives until the next group is that far
    ddp                       parameters are copied, not gathered, and gradients all-reduced

Parameters are cut along their first dimension; this is the rank with the largest parts. `tests/parallel/test_by_rule.py` holds
peaks and collectives against recordings, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from holdall.errors import Unsupported
from holdall.parallel.sharding.build import RULED
from holdall.types import Block, Kind, Mesh, MeshDim, Op, Phase, Save, Site, TensorInfo, Trace
from holdall.types.info import CollectiveOp, ShardedStep
from holdall.types.layout import round_up

WIDTHS = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int8": 1,
    "int64": 8,
    "bool": 1,
}
_ALIGN = {"cuda": 512}  # the allocator's grain
HINT = "trace with holdall.trace(..., mesh=...), which records what torch's own engine does"


def sharded_by_rule(
    trace: Trace, mesh: Mesh, way: str, groups: Sequence[str], *, replicate: Sequence[str] = (), held: str | None = None
) -> Trace:
    """The trace of one rank of `mesh`.

    `groups`: modules with collectives of their own, as `tracing.groups_of` finds them. `replicate`: dimensions over which
    shards are repeated, not cut further. `held`: the dtype of shards, their gradients and states where the traced one is only
    what modules compute in, as under FSDP's `MixedPrecisionPolicy`; None: the traced one.
    """
    if way not in RULED:
        raise Unsupported(f"{way} is not known by rule", hint=HINT)
    if trace.about.shards is not None:
        raise Unsupported("the trace is of a sharded model already", hint="shard the trace of the plain model")
    if trace.about.precision is not None:
        raise Unsupported("the trace has working copies of its weights", hint="trace in the dtype that modules compute in")
    return _Sharding(trace, mesh, way, tuple(groups), tuple(replicate), held).made()


@dataclass
class _Group:
    path: str  # of its module; empty: the rest of the model
    params: list[TensorInfo]
    first: int  # its forward: the first op, and the last
    last: int
    backward: int | None  # its backward begins after this op
    over: int  # and is over after this one
    grads: list[int] = field(default_factory=list)  # of its parameters, in their order
    filled: dict[int, list[int]] = field(default_factory=dict)  # parameter -> the tensors of the times it is gathered


class _Sharding:
    def __init__(
        self, trace: Trace, mesh: Mesh, way: str, groups: tuple[str, ...], replicate: tuple[str, ...], held: str | None
    ) -> None:
        self.trace, self.mesh, self.way, self.paths = trace, mesh, way, groups
        self.replicate, self.held = replicate, held
        copies = [mesh.dim(name) for name in replicate] if way != "ddp" else list(mesh.dims)
        self.cut = tuple(d for d in mesh.dims if d not in copies)
        self.copies = tuple(copies)
        self.ranks = prod(d.size for d in self.cut)
        self.align = _ALIGN.get(trace.about.device, 1)
        self.tensors: dict[int, TensorInfo] = dict(trace.tensors)
        self.next_id = trace.next_id
        self.before: dict[int, list[Op]] = {}  # ops put before one of the trace
        self.after: dict[int, list[Op]] = {}  # ops put after one
        self.ends: dict[int, Op | int] = {}  # tensor -> the op after which it is freed: one of the new ones, or an old number
        self.kinds: list[tuple[Op, str, int, str]] = []  # collectives: (op, kind, bytes, dimensions)
        self.step = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
        self.groups = self._find_groups()

    def _find_groups(self) -> list[_Group]:
        """The root first, then the others in the order of their forward."""
        trace = self.trace
        backwards = [op.id for op in trace.ops if op.site.phase is Phase.BACKWARD]
        if trace.whole is None or trace.whole.backward is None or not backwards:
            raise Unsupported("the model is not called once in a step with a backward", hint=HINT)
        params = [t for t in trace.tensors.values() if t.kind is Kind.PARAM and t.born < 0]
        owner = {t.id: next((p for p in self.paths if t.name.startswith(f"{p}.")), "") for t in params}
        found = [_Group("", [], trace.whole.first, trace.whole.last, trace.whole.backward, backwards[-1])]
        for path in self.paths:
            blocks = [b for b in trace.blocks if b.module == path]
            mine = trace.backward_of(path)
            if len(blocks) != 1 or not mine:
                raise Unsupported(f"`{path}` is not called once in the step", hint=HINT)
            over = mine[-1].id if self._returns_gradient(blocks[0]) else backwards[-1]
            found.append(_Group(path, [], blocks[0].first, blocks[0].last, blocks[0].backward, over))
        found[1:] = sorted(found[1:], key=lambda g: g.first)
        by_path = {g.path: g for g in found}
        named = {t.name: t.id for t in trace.tensors.values() if t.kind is Kind.GRAD}
        for t in params:
            group = by_path[owner[t.id]]
            group.params.append(t)
            if f"{t.name}.grad" in named:
                group.grads.append(named[f"{t.name}.grad"])
        for group in found:
            if len({t.dtype for t in group.params}) > 1:
                raise Unsupported(f"parameters of `{group.path or 'the model'}` have several dtypes", hint=HINT)
        return [g for g in found if g.params]

    def _returns_gradient(self, block: Block) -> bool:
        """Do gradients leave the block by its inputs? Else the engine learns at the end of backward that it is over."""
        inputs = [self.trace.tensors[x] for x in block.inputs]
        return any("float" in t.dtype and t.kind not in (Kind.INPUT, Kind.BUFFER, Kind.PARAM) for t in inputs)

    def _rows(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return (-(-shape[0] // self.ranks), *shape[1:]) if shape else shape

    def _size(self, shape: tuple[int, ...], dtype: str) -> int:
        if dtype not in WIDTHS:
            raise Unsupported(f"a parameter has the dtype {dtype}", hint=HINT)
        return prod(shape) * WIDTHS[dtype]

    def _dtype(self, info: TensorInfo) -> str:
        return self.held if self.held is not None and info.dtype in ("bfloat16", "float16", "float32") else info.dtype

    def _part(self, info: TensorInfo) -> TensorInfo:
        """A model state, as this rank has it."""
        shape, dtype = self._rows(info.shape), self._dtype(info)
        return replace(info, shape=shape, dtype=dtype, nbytes=round_up(self._size(shape, dtype), self.align))

    def _flat(self, group: _Group, dtype: str | None = None) -> int:
        """Bytes of this rank's parts of a group, one after the other."""
        return sum(self._size(self._rows(t.shape), dtype or t.dtype) for t in group.params)

    def _add(self, name: str, kind: Kind, nbytes: int, like: TensorInfo | None = None) -> int:
        new, self.next_id = self.next_id, self.next_id + 1
        shape, dtype = ((nbytes,), "uint8") if like is None else (like.shape, like.dtype)
        self.tensors[new] = TensorInfo(
            id=new, name=name, kind=kind, shape=shape, dtype=dtype, nbytes=round_up(nbytes, self.align), born=0, freed=None
        )
        return new

    def _op(self, name: str, phase: Phase, path: str, **given: object) -> Op:
        made: dict[str, object] = {"reads": (), "writes": (), "mutates": (), **given}
        return Op(id=-1, site=Site(phase=phase, module=path, op=name, nth=0), **made)  # type: ignore[arg-type]

    def _gather(self, group: _Group, phase: Phase) -> tuple[Op, int]:
        """The collective that fills the buffer, and that."""
        size = self.ranks * self._flat(group)
        buffer = self._add(f"{group.path or 'model'}: gathered", Kind.TEMP, size)
        op = self._op("c10d._allgather_base_.default", phase, group.path, writes=(buffer,))
        self.kinds.append((op, "all_gather", size, _joined(self.cut)))
        return op, buffer

    def _copy_out(self, group: _Group, phase: Phase, buffer: int | None) -> Op:
        """Fill the parameters: from the buffer, or from those that every rank has."""
        made = []
        for t in group.params:
            size = self.ranks * self._size(self._rows(t.shape), t.dtype)  # with the padding of parts that are smaller elsewhere
            made.append(self._add("gathered parameter", Kind.PARAM, size, t))
            group.filled.setdefault(t.id, []).append(made[-1])
        reads = (buffer,) if buffer is not None else tuple(t.id for t in group.params)
        moved = 2 * sum(self.tensors[x].nbytes for x in made)
        name = "aten.copy_.default" if buffer is None else "fsdp.split_with_sizes_copy.default"
        return self._op(name, phase, group.path, reads=reads, writes=tuple(made), moved=moved, dtype=group.params[0].dtype)

    def _forward(self) -> None:
        """In the order of calls: the root's come first."""
        held: int | None = None
        for group in self.groups:
            ops = []
            buffer = None
            if self.way != "ddp":
                gather, buffer = self._gather(group, Phase.FORWARD)
                ops.append(gather)
            out = self._copy_out(group, Phase.FORWARD, buffer)
            self.before.setdefault(group.first, []).extend([*ops, out])
            if held is not None:
                self.ends[held] = out
            held = buffer
            leaves = self.way == "zero3" or (self.way == "fsdp" and bool(group.path))
            for row in group.filled.values():
                self.ends[row[-1]] = group.last if leaves else group.over
        if held is not None and self.trace.whole is not None:
            self.ends[held] = self.trace.whole.last

    def _backward(self) -> None:
        """Gather again, one group ahead."""
        if self.way in ("ddp", "zero2"):
            return
        ahead: dict[str, tuple[Op, int]] = {}
        order = [g for g in sorted(self.groups, key=lambda g: (g.path != "", -g.first)) if g.backward is not None]
        for n, group in enumerate(order):
            assert group.backward is not None
            put = self.after.setdefault(group.backward, [])
            if self.way == "zero3" or group.path:
                if group.path not in ahead:
                    ahead[group.path] = self._gather(group, Phase.BACKWARD)
                    put.append(ahead[group.path][0])
                out = self._copy_out(group, Phase.BACKWARD, ahead[group.path][1])
                put.append(out)
                self.ends[ahead[group.path][1]] = out
                for row in group.filled.values():
                    self.ends[row[-1]] = group.over
            if n + 1 < len(order):
                following = order[n + 1]
                ahead[following.path] = self._gather(following, Phase.BACKWARD)
                put.append(ahead[following.path][0])

    def _reduce(self) -> dict[int, int]:
        """Reduce the gradients of each group when its backward is over; parameter's gradient -> the shard's."""
        new: dict[int, int] = {}
        held: int | None = None
        there: dict[int, int] = {}  # op -> how many were put after it here
        last: Op | None = None
        order = sorted((g for g in self.groups if g.grads), key=lambda g: g.over)  # of several at the end, the root is first
        for group in order:
            names = {self.trace.tensors[x].name for x in group.grads}
            with_grad = replace(group, params=[t for t in group.params if f"{t.name}.grad" in names])
            held_dtype = self._dtype(group.params[0])
            size = self.ranks * self._flat(with_grad, held_dtype)
            whole = self._add(f"{group.path or 'model'}: gradients", Kind.TEMP, size)
            part = self._add(f"{group.params[-1].name}.grad", Kind.GRAD, self._flat(with_grad, held_dtype))
            cat = self._op(
                "fsdp.chunk_cat.default",
                Phase.BACKWARD,
                group.path,
                reads=tuple(group.grads),
                writes=(whole,),
                moved=2 * size,
                dtype=group.params[0].dtype,
            )
            name, copied = ("c10d._reduce_scatter_base_.default", size) if self.way != "ddp" else ("aten.copy_.default", 0)
            given = {"workspace": copied if self.trace.about.device == "cpu" else 0}  # gloo makes a copy
            scatter = self._op(name, Phase.BACKWARD, group.path, reads=(whole,), writes=(part,), **given)
            put = [cat, scatter]
            if self.way != "ddp":
                self.kinds.append((scatter, "reduce_scatter", size, _joined(self.cut)))
            if self.copies:
                self.kinds.append((scatter, "all_reduce", self._flat(with_grad, held_dtype), _joined(self.copies)))
            count = there.get(group.over, 0)
            if held is not None:
                self.ends[held] = last if count and last is not None else group.over
            held, last = whole, put[-1]
            place = self.after.setdefault(group.over, [])
            self.after[group.over] = [*place[:count], *put, *place[count:]]  # before the next group's parameters are copied out
            there[group.over] = count + len(put)
            self.ends.update(dict.fromkeys(group.grads, cat))
            if self.way != "ddp":
                self.ends[group.grads[-1]] = scatter  # torch's loop variable
            self.ends[whole] = put[-1]
            new.update(dict.fromkeys(group.grads, part))
            freed = [self.trace.tensors[x].freed for x in group.grads]
            if all(k is not None for k in freed):
                self.ends[part] = max(k for k in freed if k is not None)
        return new

    def made(self) -> Trace:
        self._forward()
        self._backward()
        new = self._reduce()
        self._shrink()
        number: dict[int, int] = {}  # op of the trace -> its number now
        last: dict[int, int] = {-1: -1}  # and that of the last op that was put after it
        ops: list[Op] = []
        made: dict[int, int] = {}  # new op (by identity) -> its number

        def put(inserted: Iterable[Op]) -> None:
            for op in inserted:
                made[id(op)] = len(ops)
                ops.append(replace(op, id=len(ops)))

        filling = {x: g.filled[x] for g in self.groups for x in g.filled}
        for op in self.trace.ops:
            put(self.before.get(op.id, ()))
            number[op.id] = len(ops)
            ops.append(self._moved(replace(op, id=len(ops)), filling, new))
            put(self.after.get(op.id, ()))
            last[op.id] = len(ops) - 1
        self._place(ops, number, made)
        gone = set(filling)
        kept = [n for n, s in enumerate(self.trace.saves) if s.tensor not in gone]
        renumbered = {old: at for at, old in enumerate(kept)}
        saves = tuple(_save(self.trace.saves[n], number, last, len(ops)) for n in kept)
        found = [CollectiveOp(op=made[id(op)], kind=kind, nbytes=size, dim=dim) for op, kind, size, dim in self.kinds]
        shards = ShardedStep(
            mesh=self.mesh,
            way=self.way,
            groups=self.paths,
            replicate=self.replicate,
            collectives=tuple(sorted(found, key=lambda c: c.op)),
            fillings=tuple(tuple(row) for row in filling.values()),
        )
        whole = self.trace.whole
        return replace(
            self.trace,
            ops=tuple(ops),
            tensors=self.tensors,
            blocks=tuple(_block(b, number, last, renumbered).with_engine(ops, made.values()) for b in self.trace.blocks),
            whole=None if whole is None else _block(whole, number, last, renumbered),
            saves=saves,
            units=(),
            about=replace(self.trace.about, shards=shards),
        )

    def _moved(self, op: Op, filling: Mapping[int, list[int]], new: Mapping[int, int]) -> Op:
        """An op of the trace with the tensors of this rank."""
        if op.site.phase is Phase.STEP:
            reads, mutates = _mapped(op.reads, new), _mapped(op.mutates, new)
            before = sum(self.trace.tensors[x].nbytes for x in (*op.reads, *op.writes))
            now = sum(self.tensors[x].nbytes for x in (*op.reads, *op.writes))
            share = now / before if before else 1.0
            return replace(
                op,
                reads=reads,
                mutates=mutates,
                moved=int(op.moved * share),
                seconds=op.seconds * share,
                flops=int(op.flops * share),
            )
        n = -1 if op.site.phase is Phase.BACKWARD else 0
        return replace(op, reads=tuple(filling[x][n] if x in filling else x for x in op.reads))

    def _shrink(self) -> None:
        """Model states, and what the optimizer computes with them, to this rank's part."""
        if self.way == "ddp" and self.held is None:
            return
        shapes: dict[str, tuple[int, ...]] = {}
        for group in self.groups:
            for t in group.params:
                shapes[t.name] = t.shape
                self.tensors[t.id] = self._part(t)
        for t in self.trace.tensors.values():
            if t.kind is Kind.STATE and t.born < 0:
                owner = max((name for name in shapes if t.name.startswith(f"{name}.")), key=len, default="")
                if owner and t.shape == shapes[owner]:
                    self.tensors[t.id] = self._part(t)
                elif prod(t.shape) > 1:
                    raise Unsupported(f"the optimizer's state `{t.name}` has another shape than its parameter", hint=HINT)
        for op in self.trace.ops[self.step :]:
            cut = {self.trace.tensors[x].shape for x in (*op.reads, *op.mutates) if self._is_cut(x)}
            for x in op.writes:
                if self.trace.tensors[x].shape in cut:
                    self.tensors[x] = self._part(self.trace.tensors[x])

    def _is_cut(self, x: int) -> bool:
        was = self.trace.tensors[x]
        return was.kind in (Kind.GRAD, Kind.PARAM) or self.tensors[x].shape != was.shape or self.tensors[x].dtype != was.dtype

    def _place(self, ops: Sequence[Op], number: Mapping[int, int], made: Mapping[int, int]) -> None:
        """Births and ends by the new numbers."""
        born = {x: op.id for op in ops for x in op.writes}
        end = len(ops)
        for x, t in self.tensors.items():
            until = self.ends.get(x, t.freed)
            freed = made[id(until)] if isinstance(until, Op) else None if until is None else number.get(until, end)
            freed = -1 if until == -1 else freed
            kind = t.kind if t.kind is not Kind.GRAD or x not in self.trace.tensors else Kind.TEMP
            self.tensors[x] = replace(t, kind=kind, born=born.get(x, -1), freed=freed)


def _joined(dims: Iterable[MeshDim]) -> str:
    return "+".join(d.name for d in dims)


def _mapped(tensors: Iterable[int], new: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(new.get(x, x) for x in tensors))


def _save(save: Save, number: Mapping[int, int], last: Mapping[int, int], end: int) -> Save:
    """What backward asks for, it asks for after the engine has done its part."""
    unpacked = None if save.unpacked is None else last[save.unpacked]
    released = None if save.released is None else max(number.get(save.released, end), unpacked or 0)
    return replace(save, packed=number.get(save.packed, -1), unpacked=unpacked, released=released)


def _block(block: Block, number: Mapping[int, int], last: Mapping[int, int], saves: Mapping[int, int]) -> Block:
    return replace(
        block,
        first=number[block.first],
        last=number[block.last],
        backward=None if block.backward is None else last[block.backward],
        saves=tuple(saves[n] for n in block.saves if n in saves),
        beside=tuple(number[k] for k in block.beside),
    )
