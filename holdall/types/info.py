"""What a trace and a plan say about their step besides ops and actions, and a machine about its figures: the fields `about`.

In saved files `about` is an object with one entry per field. Files of older versions may lack entries, which then have their
defaults; an entry that is not a field is refused (`closed`). A planner's own remarks belong in `Plan.why`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from holdall.types.mesh import Mesh

Shapes = tuple[tuple[int, ...], ...]  # of tensors, in the order of the call


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedHead:
    """A vocabulary head whose logits and loss are computed for a few rows at a time."""

    module: str  # its path
    rows: int  # rows of logits at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModules:
    """Modules that run on a piece of the sequence, or of the batch, at a time."""

    modules: tuple[str, ...]  # their paths
    rows: int  # positions, or samples, at a time
    by: str = "positions"  # or "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOp:
    """An op that is a collective over ranks."""

    op: int
    kind: str  # as in `cost.collectives`
    nbytes: int  # of the whole buffer
    dim: str  # dimension of the mesh; several are joined by "+", slowest first


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRegion:
    """Linear layers that are divided over ranks by columns, and the one after them by rows; see `parallel.tensor`."""

    columns: tuple[str, ...]  # paths
    row: str
    parts: int = 1  # matrices side by side in a column
    divided: tuple[str, ...] = ()  # attributes of the module around them that are divided too
    own: tuple[str, ...] = ()  # and its own parameters, along their first dimension: those with a value for each head


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStep:
    """How the model was sharded over ranks when its step was traced, as one of them."""

    mesh: Mesh
    way: str  # as in `parallel.sharding.build`
    groups: tuple[str, ...]  # modules with collectives of their own
    collectives: tuple[CollectiveOp, ...] = ()
    regions: tuple[TensorRegion, ...] = ()  # of a model that is divided by tensors
    vocabulary: tuple[str, ...] = ()  # modules that are divided by words
    attention: tuple[str, ...] = ()  # modules whose attention is over a divided sequence, of a model that is divided by tensors
    experts: tuple[str, ...] = ()  # stacks of experts that are divided, of a model that is divided by tensors or sequence too
    replicate: tuple[str, ...] = ()  # dimensions over which shards are repeated, not cut further
    data_groups: tuple[str, ...] = ()  # modules with collectives of their own over data, of a model that is divided too
    readers: tuple[tuple[str, str], ...] = ()  # modules that read parameters of one inside of them, in a model that is divided
    precision: str = ""  # dtype in which parameters are gathered and modules compute; empty: their own
    casts: tuple[str, ...] = ()  # modules that cast their inputs to it
    fillings: tuple[tuple[int, ...], ...] = ()  # a row per parameter that is gathered: the tensor of each time, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """The plan's decision for one block, with bytes and seconds."""

    module: str
    decision: str  # "keep", "recompute", "offload", or several joined by " + "
    nbytes_held: int  # bytes kept on the device for backward under the plan
    nbytes_plain: int  # the same in plain training
    seconds: float  # predicted, forward and backward
    extra_seconds: float = 0.0  # part of `seconds` that the plan added


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRate:
    """What a plan takes a farther tier to be: bytes per second while both ways are busy, and seconds before the first byte."""

    tier: str
    read: float
    write: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """Where the requests of a step lie in its arena, in the order in which they come."""

    name: str  # of the layout that found it
    reserved: int  # bytes of the arena
    align: int  # sizes and offsets are multiples of it
    smallest: int  # requests of fewer bytes are left to the device's own allocator
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    brief: tuple[int, ...] = ()  # which of them are workspaces of ops: they may come in parts, or not at all


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """What both a trace and the plans made for it say about the step; written by `tracing.trace_step` unless noted."""

    closed: ClassVar[bool] = True  # files with other entries are refused

    # the step
    model: str = ""  # class of the model
    optimizer: str | None = None  # class of the optimizer; None: a step without one
    batch: Shapes | None = None  # shapes of the tensors in the model's first call; None: the model itself was not called
    calls: int = 1  # calls of the model itself in one step
    alters: tuple[str, ...] = ()  # Python attributes that its forward changes, by their paths in the model
    once: str = ""  # why its forward cannot be undone and run again

    # how it was traced
    device: str = ""  # "cpu" or "cuda"; empty: not recorded, so that the model's own counts
    precision: str | None = None  # dtype of working copies of the weights; None: modules compute with the parameters themselves
    casts: tuple[str, ...] = ()  # modules that cast their inputs to `precision`
    recipe: str | None = None  # name and options of the precision recipe, by `api.trace_calls`
    autocast: str | None = ""  # dtype of the loop's autocast; None: the loop has none; empty: not recorded

    # memory outside of the step
    process: int = 0  # bytes of the process in host memory besides the training; not known without a GPU
    context: int = 0  # bytes of driver and kernels on the device: in a cached trace by `fitting`, in a plan the hardware's


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo(StepInfo):
    """What only the trace says; written by `tracing.trace_step` unless noted."""

    device: str = "cpu"
    signature: str = ""  # digest of parameter names, shapes and dtypes; plans are checked against the model by it
    source: str = ""  # "fake" or "eager": the kind of tensors that the step was recorded with
    torch: str = ""  # version
    timed: str | None = None  # the GPU on which ops were timed while tracing; None: the cost model estimates their times
    head: ChunkedHead | None = None  # set by `api.trace_calls` if the step was traced with a chunked head
    pieces: tuple[SplitModules, ...] = ()  # set by actions `pieces` in the step that they make of a trace
    shards: ShardedStep | None = None  # set by `tracing.trace_sharded` if the model was sharded over ranks
    besides: int = 0  # bytes on the GPU of tensors outside the training
    asked: tuple[str, ...] = ()  # names of block calls that read a value, and so cannot run op by op
    looked_at: tuple[int, ...] = ()  # indices of the batch's tensors whose values decide the control flow
    parts: bool = False  # the loss calls submodules directly
    notes: tuple[str, ...] = ()  # warnings for the user

    @staticmethod
    def from_older(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entries of an older file, in which all modules in pieces had pieces of one size, or none were (None)."""
        pieces = data.get("pieces", [])
        return {**data, "pieces": [] if pieces is None else [pieces] if isinstance(pieces, dict) else pieces}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInfo(StepInfo):
    """What only the plan says, for the harness and for reports; written by `planning.finish` unless noted."""

    units: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (name, parameters) of every unit of the trace
    blocks: tuple[tuple[str, Shapes], ...] = ()  # (name, shapes of its inputs) of every planned block call, in forward order
    quiet: tuple[str, ...] = ()  # names of those that were traced without gradients
    rows: tuple[BlockRow, ...] = ()  # the decision for every block, for reports
    rates: tuple[TierRate, ...] = ()  # of the tiers that the step copies to or from
    seconds_if_not_clipped: float | None = None  # of a step without clipping; None: the same as with clipping
    layout: PlannedLayout | None = None  # None: the device's own allocator decides where tensors lie

    @staticmethod
    def from_older(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entries of an older file without `remembered`, which nothing read."""
        return {name: value for name, value in data.items() if name != "remembered"}

    @staticmethod
    def of(step: StepInfo) -> PlanInfo:
        """A plan's info with everything that it shares with its trace."""
        return PlanInfo(**{f.name: getattr(step, f.name) for f in fields(StepInfo)})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The connection between host and GPU as its datasheet states it: PCIe by generation and lanes, others by their rate."""

    kind: str  # "pcie" or "nvlink-c2c"
    generation: int | None = None
    lanes: int | None = None
    bytes_per_second: float | None = None  # each way


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRate:
    """Measured rates of a tier with `depth` requests in flight, in bytes per second."""

    tier: str
    depth: int
    read: float
    write: float
    duplex: float  # the share of each rate that is left when both ways are busy


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareInfo:
    """Where the figures of a machine come from; plans do not depend on it."""

    closed: ClassVar[bool] = True  # files with other entries are refused

    # a measured machine, by `machine.probe` unless noted
    threads: int | None = None  # CPU threads of torch while measuring
    python: str = ""  # version
    notes: tuple[str, ...] = ()  # warnings for the user
    queue: tuple[QueueRate, ...] = ()  # of tiers with a queue, by `machine.more_tiers`

    # a datasheet, by `machine.presets`
    link: HostLink | None = None
    tfloat32: float | None = None  # peak FLOP/s of float32 matmuls with TF32, which is off by default in PyTorch

    @staticmethod
    def from_older(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entries of an older file by today's names: `queue` was one entry per tier, such as "nvme by queue depth"."""
        tables = {name: table for name, table in data.items() if name.endswith(_BY_DEPTH)}
        if not tables:
            return data
        queue = [
            {"tier": name.removesuffix(_BY_DEPTH), "depth": int(depth), **rates}
            for name, table in tables.items()
            for depth, rates in table.items()
        ]
        return {**{name: value for name, value in data.items() if name not in tables}, "queue": queue}


_BY_DEPTH = " by queue depth"
