"""What one training step does: its ops, the tensors they make, and who holds each tensor for how long."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from holdall.errors import unknown_name
from holdall.types import _json
from holdall.types.info import TraceInfo

TensorId = int
OpId = int
Bytes = int
Seconds = float

FORMAT = "holdall-trace-1"


class Kind(str, Enum):
    """What a tensor is for. The survey's three classes: M_p = param; M_s = grad + state; M_a = the rest."""

    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
    ACTIVATION = "activation"
    INPUT = "input"
    BUFFER = "buffer"
    TEMP = "temp"


class Phase(str, Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The address of an op, the same in a fake trace and in a real run."""

    phase: Phase
    module: str
    op: str
    nth: int

    def __str__(self) -> str:
        return f"{self.phase.value} of `{self.module or 'model'}` ({self.op} #{self.nth})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor that owns bytes. Its views are folded into it."""

    id: TensorId
    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    nbytes: Bytes
    born: OpId  # op that made it; -1: there before the step
    freed: OpId | None  # op after which the last reference other than autograd's went; None: outlives the step
    saved: bool = False  # autograd holds it for backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One reference autograd took: packed in forward, unpacked and released in backward (each "after op k")."""

    tensor: TensorId
    packed: OpId
    unpacked: OpId | None  # None: its backward never ran
    released: OpId | None  # None: still held at the end of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    id: OpId
    site: Site
    reads: tuple[TensorId, ...]
    writes: tuple[TensorId, ...]  # tensors that come into being here
    mutates: tuple[TensorId, ...] = ()  # tensors there before that are changed in place
    seconds: Seconds = 0.0
    flops: int = 0
    moved: Bytes = 0  # bytes read and written
    workspace: Bytes = 0  # bytes a kernel takes and gives back inside the op
    random: bool = False
    dtype: str = ""  # of the largest float taking part; the roofline's row
    accumulates: bool = False  # autograd's own: puts a gradient that is there into its `.grad`


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One call of one module, a unit of the plan. Blocks of a trace are disjoint and in forward order."""

    id: int
    module: str
    nth: int  # which call of this module in the step
    first: OpId
    last: OpId  # forward ops first..last, both included
    backward: OpId | None  # its backward begins after this op; None: it has none
    inputs: tuple[TensorId, ...]  # tensors it was called with
    outputs: tuple[TensorId, ...]
    saves: tuple[int, ...]  # indices into Trace.saves packed during its forward
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors it was called with
    same_as: int | None = None  # the earlier block that it repeats
    kind: str = ""  # class name of the module
    odd: str = ""  # class of an argument that is neither a tensor nor a plain value, such as a cache
    quiet: bool = False  # called without gradients
    wanted: tuple[int, ...] | None = None  # of what it returns, by leaf: what got a gradient; None: not known
    beside: tuple[OpId, ...] = ()  # in its backward, of others: sums with what those gave, what an engine of shards does
    apart: str = ""  # why its ops, captured by themselves, are not those of the trace
    alters: tuple[str, ...] = ()  # Python attributes that its forward changes, by their paths in its module
    once: str = ""  # why its forward must not run a second time

    @property
    def name(self) -> str:
        return self.module if self.nth == 0 else f"{self.module}#{self.nth}"

    def spoils(self, tensor: TensorInfo) -> bool:
        """Is this tensor, which its forward changes in place without having made it, other than a buffer of its module?"""
        return tensor.kind is not Kind.BUFFER or not tensor.name.startswith(f"{self.module}." if self.module else "")

    def with_engine(self, ops: Sequence[Op], engine: Iterable[OpId]) -> Block:
        """The block, which knows which ops of backward count as its own, and are an engine's of shards, by hooks of modules."""
        inside = f"{self.module}." if self.module else ""
        back = (ops[k] for k in sorted(engine) if ops[k].site.phase is Phase.BACKWARD)
        return replace(self, beside=(*self.beside, *(op.id for op in back if f"{op.site.module}.".startswith(inside))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that move and are updated together: those of one block, or of one module outside of every block."""

    id: int
    name: str  # path of the module
    params: tuple[str, ...]  # names, in the model's order; a tied one under its first
    weights: tuple[TensorId, ...]  # what the module computes with
    grads: tuple[TensorId, ...]
    states: tuple[TensorId, ...]  # the optimizer's, and the master copy where the weights are a narrower one
    numel: int  # parameters that are trained
    moved: Bytes  # bytes that its update reads and writes
    workspace: Bytes  # bytes that its update takes and gives back
    same_as: int | None = None  # the earlier unit that it repeats
    host_moved: Bytes = 0  # bytes that its update moves where a CPU makes it, which may have no kernel for it; 0: as many
    host_seconds: Seconds = 0.0  # that its update took on the host where the trace was made; 0: not measured
    products: bool = False  # its update multiplies matrices, for which libraries keep room on every stream


@dataclass(frozen=True, kw_only=True)
class Trace:
    ops: tuple[Op, ...]
    tensors: Mapping[TensorId, TensorInfo]
    blocks: tuple[Block, ...]
    saves: tuple[Save, ...]
    units: tuple[Unit, ...] = ()  # in the order of their first use
    whole: Block | None = None  # the model's call as one block, named ""; for plans that look across blocks
    about: TraceInfo = field(default_factory=TraceInfo)  # how it was traced, and for what

    @cached_property
    def _uses(self) -> dict[TensorId, tuple[OpId, ...]]:
        uses: dict[TensorId, list[OpId]] = {}
        for op in self.ops:
            for x in (*op.reads, *op.writes, *op.mutates):
                at = uses.setdefault(x, [])
                if not at or at[-1] != op.id:
                    at.append(op.id)
        return {x: tuple(at) for x, at in uses.items()}

    def uses(self, tensor: TensorId) -> tuple[OpId, ...]:
        """Ops that make, read or change the tensor, in order."""
        return self._uses.get(tensor, ())

    def lifetime(self, tensor: TensorId) -> tuple[OpId, OpId | None]:
        """(born, last op after which it is gone) in plain eager execution; None: it outlives the step."""
        info = self.tensors[tensor]
        if info.freed is None:
            return info.born, None
        ends = [info.freed]
        for save in self.saves_of(tensor):
            if save.released is None:
                return info.born, None
            ends.append(save.released)
        return info.born, max(ends)

    @cached_property
    def _saves_of(self) -> dict[TensorId, tuple[Save, ...]]:
        found: dict[TensorId, list[Save]] = {}
        for save in self.saves:
            found.setdefault(save.tensor, []).append(save)
        return {x: tuple(saves) for x, saves in found.items()}

    @cached_property
    def last_held(self) -> dict[TensorId, OpId]:
        """Tensor -> the op until which something refers to it in plain execution; the number of ops: beyond the step."""
        end = len(self.ops)
        last = {x: end if t.freed is None else t.freed for x, t in self.tensors.items()}
        for save in self.saves:
            last[save.tensor] = max(last[save.tensor], end if save.released is None else save.released)
        return last

    @cached_property
    def node_ends(self) -> dict[OpId, OpId]:
        """Op of backward -> the last op of its node of the graph, which hands its gradients on when it is over.

        A node lets go of what it had saved when it is over, so what it asked for before and let go after tells its end. Unless
        what it had saved lives on, as a gradient that was made in forward does: then others ask and let go in between.
        """
        last = next((op.id for op in self.ops if op.site.phase is Phase.STEP), len(self.ops)) - 1
        handed_on = {x for op in self.ops if op.site.phase is Phase.BACKWARD for x in op.mutates}  # a gradient made in forward
        known = [
            (s.unpacked, min(s.released, last))
            for s in self.saves
            if s.unpacked is not None and s.released is not None and s.tensor not in handed_on
        ]
        ends: dict[OpId, OpId] = {}
        soonest = last + 1  # end of a save that was asked for at the same op or later
        for unpacked, released in sorted(known, key=lambda k: (-k[0], k[1])):
            if released <= soonest:
                for op in range(unpacked + 1, released + 1):
                    ends[op] = max(ends.get(op, 0), released)
                soonest = released
        return ends

    @cached_property
    def next_id(self) -> TensorId:
        """The first id that no tensor has."""
        return max(self.tensors, default=-1) + 1

    def saves_of(self, tensor: TensorId) -> tuple[Save, ...]:
        return self._saves_of.get(tensor, ())

    @cached_property
    def _backward_of(self) -> dict[str, list[OpId]]:
        found: dict[str, list[OpId]] = {}
        for op in self.ops:
            if op.site.phase is Phase.BACKWARD:
                path = op.site.module
                while path:
                    found.setdefault(path, []).append(op.id)
                    path = path.rpartition(".")[0]
                found.setdefault("", []).append(op.id)
        return found

    def backward_of(self, module: str) -> tuple[Op, ...]:
        """The ops of backward that belong to a module and what is inside it, in order."""
        return tuple(self.ops[k] for k in self._backward_of.get(module, ()))

    @cached_property
    def _block_names(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks}

    def block(self, name: str) -> Block:
        """The block of that name; the empty name is the whole model's."""
        if not name and self.whole is not None:
            return self.whole
        if name not in self._block_names:
            raise unknown_name("block", name, self._block_names)
        return self._block_names[name]

    def unit(self, name: str) -> Unit:
        """The unit of that name."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise unknown_name("unit", name, [u.name for u in self.units])

    @cached_property
    def fingerprint(self) -> str:
        """The same for two traces of the same program on the same shapes; the timing does not enter."""
        digest = hashlib.blake2b(digest_size=16)
        for op in self.ops:
            digest.update(f"{op.site.phase.value}|{op.site.module}|{op.site.op}|{op.reads}|{op.writes};".encode())
        for t in self.tensors.values():
            digest.update(f"{t.id}|{t.kind.value}|{t.shape}|{t.dtype}|{t.nbytes};".encode())
        return digest.hexdigest()

    def bytes_by_kind(self) -> dict[Kind, Bytes]:
        """Bytes of every tensor that is there before the step, or that backward needs, by kind."""
        total = dict.fromkeys(Kind, 0)
        for t in self.tensors.values():
            if t.born < 0 or t.saved or t.kind is Kind.GRAD:
                total[t.kind] += t.nbytes
        return total

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON; whole or not at all."""
        _json.write(path, {"format": FORMAT, **_json.pack(self)})

    @staticmethod
    def load(path: str | Path) -> Trace:
        read: Trace = _json.unpack(Trace, _json.read(path, FORMAT), str(path))
        return read

    def __repr__(self) -> str:
        model = self.about.model or "?"
        return f"Trace({model}: {len(self.ops)} ops, {len(self.tensors)} tensors, {len(self.blocks)} blocks)"


def digest_of(value: object) -> str:
    """A short stable digest of plain data."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def signature_of(parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """The identity of a model for a plan: (name, shape, dtype) of its parameters."""
    return digest_of([[name, list(shape), dtype] for name, shape, dtype in parameters])


T = TypeVar("T")


def once_per_trace(trace: Trace, name: str, make: Callable[[Trace], T]) -> T:
    """What follows from a trace alone: made when it is first asked for. Nobody changes it."""
    known = trace.__dict__
    if name not in known:
        known[name] = make(trace)
    found: T = known[name]
    return found
