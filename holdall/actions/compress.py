"""Compress: a block's saved tensors are quantised to a few bits after its forward and decoded in backward, one by one.

ActNN (Chen et al., ICML 2021, arXiv 2104.14129) and GACT (Liu et al., ICML 2022, arXiv 2206.11357) as an action on a block.
Forward values are bit-identical to the untouched model; gradients are approximate. Where a gradient is linear in a saved tensor
(weights of linear and convolution layers), a stochastic codec leaves the expected gradient unchanged.

Tolerance: with every block compressed, the gradient's cosine with the exact one is above 0.999 at 8 bits, 0.98 at 4, 0.75 at 2
(tests/unit/test_compress.py, on the tiny families). Never compressed: parameters, the block's outputs, integers and masks,
statistics of norms and of attention, and tensors that would not get smaller.

Over ranks that have batches of their own, each draws roundings of its own. Where ranks divide a model, whose copies must stay
the same, nothing is compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.offload import own_inputs
from holdall.actions.shard import Shard
from holdall.errors import InvalidInput, Unsupported
from holdall.types import (
    Block,
    Choice,
    Copy,
    Facts,
    Hardware,
    Kind,
    Problem,
    Run,
    Save,
    Schedule,
    Step,
    TensorInfo,
    Trace,
    Wait,
)
from holdall.types.layout import BLOCK, allocated_bytes
from holdall.types.mesh import Mesh

if TYPE_CHECKING:
    # torch is loaded when a tensor is encoded, not when actions are listed
    from holdall.codecs import Codec
    from holdall.runtime.harness import Harness

SIGN = 0  # used instead of a number of bits: store only whether each value is above zero
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_PASSES = {
    "encode": 150,
    "decode": 40,
}  # time relative to a copy, by plain ops on one core (benchmarks/codecs.py); half of it is random
_GPU_PASSES = 10  # the same with plain ops on a GPU: estimated, not measured; the group codec is one kernel
_OFFERED = (8, 4)  # bits that planners may choose
_RELU_BACKWARD = "aten.threshold_backward.default"


@dataclass(frozen=True, kw_only=True)
class Compress(Facts):
    block: str
    codec: str = "group"
    saves: tuple[int, ...] = ()  # which of the block's saved tensors are compressed, numbered in autograd's order
    bits: tuple[int, ...] = ()  # bits of each of them; 0: its sign
    swap: bool = False  # also offload the codes to the next tier
    lag: bool = False  # as in offload: free the device's copy when the next block's forward has ended
    fetch: str = ""  # as for offload: start fetching when the backward of this block begins
    seed: int = 0

    name: ClassVar[str] = "compress"
    exact: ClassVar[bool] = False
    rank: ClassVar[int] = 25
    alone: ClassVar[bool] = True  # a compressed block is neither recomputed nor offloaded; `swap` offloads the codes
    spares_activations: ClassVar[bool] = True
    on_shards: ClassVar[bool] = True
    only_by_fit: ClassVar[bool] = True
    what: ClassVar[str] = "saved tensors are stored as 8-bit codes"

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({""} if self.swap else ())

    @staticmethod
    def of(
        trace: Trace,
        block: Block,
        *,
        bits: int | Mapping[int, int] = 4,
        codec: str = "group",
        swap: bool = False,
        overlap: bool = False,
    ) -> Compress:
        """The action for a block of a trace. `bits`: one number for every `codable` tensor, or one per tensor to compress;
        `overlap`: copies of offloaded codes overlap computation."""
        width = bits if isinstance(bits, Mapping) else dict.fromkeys(codable(trace, block, codec=codec, bits=bits), bits)
        pairs = [
            (n, SIGN if asks_for_sign(trace, trace.saves[i]) else width[trace.saves[i].tensor])
            for n, i in enumerate(block.saves)
            if trace.saves[i].tensor in width
        ]
        after = trace.blocks[block.id + 1] if block.id + 1 < len(trace.blocks) else None
        ahead = after is not None and after.backward is not None
        return Compress(
            block=block.name,
            codec=codec,
            saves=tuple(n for n, _ in pairs),
            bits=tuple(b for _, b in pairs),
            swap=swap,
            lag=swap and overlap and after is not None,
            fetch=after.name if swap and overlap and ahead and after is not None else "",
        )

    @staticmethod
    def samples(trace: Trace) -> list[Compress]:
        """One block at 4 bits, and one with an odd number of bits whose codes are offloaded."""
        can = [b for b in trace.blocks if b.backward is not None and codable(trace, b)]
        if not can:
            return []
        second = can[min(1, len(can) - 1)]
        return [
            Compress.of(trace, can[0], bits=4),
            Compress.of(trace, second, bits=3, swap=True, overlap=True),
        ]

    @classmethod
    def choices(cls, problem: Problem, block: Block) -> Iterable[Choice]:
        if codable(problem.trace, block):
            for bits in _OFFERED:
                yield Choice(label=f"compress to {bits} bits (not exact)", make=_coded, given=(bits,), exact=False)

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace = problem.trace
        block = trace.block(self.block)
        items = self._items(trace, block)
        if not items:
            return schedule
        schedule = schedule.copy()
        hardware = problem.hardware
        coded: list[int] = []
        runs: list[Run] = []
        for (x, codec), saves in items.items():
            info = trace.tensors[x]
            codes = schedule.add(
                info,
                name=f"{info.name} in {codec.bits} bits",
                kind=Kind.ACTIVATION,
                dtype="uint8",
                nbytes=allocated_bytes(codec.nbytes(_numel(info)), hardware.device),
                born=block.last,
            )
            coded.append(codes)
            runs.append(_codec_run("encode", (x,), (codes,), info, codec, hardware))
            schedule.unhold(x, saves)
            self._decode(schedule, trace, info, codes, codec, saves, hardware)
        reads = dict.fromkeys((*runs[-1].reads, *held_outside(schedule, block)))
        steps: list[Step] = [*runs[:-1], replace(runs[-1], reads=tuple(reads))]
        if self.swap:
            steps += self._move(schedule, problem, block, tuple(coded), [s for saves in items.values() for s in saves])
        schedule.insert(block.last, steps, first=True)  # before the waits for an earlier block's copies
        return schedule

    def _decode(
        self,
        schedule: Schedule,
        trace: Trace,
        info: TensorInfo,
        codes: int,
        codec: Codec,
        saves: Sequence[Save],
        hardware: Hardware,
    ) -> None:
        """Decode each saved tensor at its first use in backward, then hold it as long as the original would be held."""
        end = len(trace.ops)
        asked = [s.unpacked for s in saves if s.unpacked is not None]
        releases = [(end if s.released is None else s.released, 0) for s in saves]
        if not asked:
            schedule.hold(codes, *releases)
            return
        back = schedule.add(info, name=f"{info.name} decoded", born=min(asked))
        schedule.hold(back, *releases)
        schedule.insert(min(asked), [_codec_run("decode", (codes,), (back,), info, codec, hardware)])
        for save in saves:
            if save.unpacked is None:
                continue
            until = end if save.released is None else save.released
            for op in trace.uses(info.id):
                if save.unpacked < op <= until:
                    run = schedule.run(op)
                    schedule.runs[op] = replace(run, reads=tuple(back if x == info.id else x for x in run.reads))

    def _move(
        self, schedule: Schedule, problem: Problem, block: Block, codes: tuple[int, ...], saves: Iterable[Save]
    ) -> list[Step]:
        """Copy the codes to the tier after the block's forward and fetch them together, as offload does with tensors."""
        trace, tier = problem.trace, problem.other()
        asked = [s.unpacked for s in saves if s.unpacked is not None]
        if not asked:
            return []
        needed = min(asked)
        wait = Wait(tensors=codes)
        leave: list[Step] = [Copy(tensors=codes, src=schedule.home, dst=tier, name=self.block)]
        if self.lag and block.id + 1 < len(trace.blocks):
            schedule.insert(trace.blocks[block.id + 1].last, [wait])
        else:
            leave.append(wait)
        back = Copy(tensors=codes, src=tier, dst=schedule.home, name=self.block)
        begins = trace.block(self.fetch).backward if self.fetch else None
        if begins is not None and begins < needed:
            schedule.insert(needed, [wait], first=True)
            schedule.insert(begins, [back], first=True)
        else:
            schedule.insert(needed, [back, wait], first=True)
        return leave

    def _items(self, trace: Trace, block: Block) -> dict[tuple[int, Codec], list[Save]]:
        """Tensors to encode, in the runtime's order: (tensor, codec) -> the saves that read it."""
        items: dict[tuple[int, Codec], list[Save]] = {}
        codecs = self._codecs()
        for n, i in enumerate(block.saves):
            save = trace.saves[i]
            info = trace.tensors[save.tensor]
            if n in codecs and save.tensor not in block.outputs and _is_worth(info, codecs[n]):
                items.setdefault((save.tensor, codecs[n]), []).append(save)
        return items

    def _codecs(self) -> dict[int, Codec]:
        """The codec of each compressed save, by its number."""
        if len(self.bits) != len(self.saves):
            raise InvalidInput(
                f"`{self.block}`: {len(self.saves)} saves, but {len(self.bits)} bits", hint="give one number of bits per save"
            )
        from holdall.codecs import codec_for

        codecs = {b: codec_for("sign" if b == SIGN else self.codec, b) for b in self.bits}
        return {n: codecs[b] for n, b in zip(self.saves, self.bits, strict=True)}

    def install(self, harness: Harness) -> None:
        policy = harness.policy(self.block)
        if policy.recompute or policy.offloads:
            other = "recompute" if policy.recompute else "offload"
            raise InvalidInput(
                f"`{self.block}` cannot have both {other} and compress", hint="plan the block with one of the two actions"
            )
        if self.swap and not harness.stores:
            raise Unsupported("the plan offloads codes, but this machine has no second tier", hint="plan with swap=False")
        from holdall.runtime.activations.compress import Compression, seed_of
        from holdall.runtime.activations.offload import OffloadedPart

        mesh = next((Mesh.of(dict(a.mesh)) for a in harness.plan.actions if isinstance(a, Shard)), None)
        policy.compress = Compression(codecs=self._codecs(), seed=seed_of(self.block, self.seed, mesh))
        policy.offloads = [OffloadedPart(lag=self.lag, fetch=self.fetch)] if self.swap else []


def _coded(trace: Trace, block: Block, bits: int) -> tuple[Compress]:
    return (Compress.of(trace, block, bits=bits),)


def codable(trace: Trace, block: Block, *, codec: str = "group", bits: int = 8) -> tuple[int, ...]:
    """The block's saved tensors that may be compressed, in the order of their first save.

    A tensor qualifies if the block makes it, or if it is an input that no other block needs; outputs do not. Excluded are
    statistics, i.e. results of an op after its first (mean and deviation of a norm, log-sum-exp of attention) and reductions
    to one column; and masks, which on a CPU are floats filled by a random op.
    """
    from holdall.codecs import codec_for

    one = codec_for(codec, bits)
    saved: dict[int, list[Save]] = {}
    for i in block.saves:
        saved.setdefault(trace.saves[i].tensor, []).append(trace.saves[i])
    own = {block.inputs[i] for i in own_inputs(trace, block)}
    found = []
    for x, saves in saved.items():
        info = trace.tensors[x]
        inside = block.first <= info.born <= block.last and x not in block.outputs
        elsewhere = len(saves) < len(trace.saves_of(x))  # another block holds it anyway: compressing saves nothing
        if (inside or x in own) and not elsewhere and _is_worth(info, one) and not _is_special(trace, info):
            found.append(x)
    return tuple(found)


def held_outside(schedule: Schedule, block: Block) -> list[int]:
    """Tensors that are freed when the block's call returns: its caller holds them while its saved tensors are treated."""
    tensors = schedule.trace.tensors.values()
    return [t.id for t in tensors if t.freed == block.last and t.born < block.first and t.id not in schedule.start]


def numel_of(trace: Trace, tensor: int) -> int:
    """Elements of a tensor's storage."""
    return _numel(trace.tensors[tensor])


def key_of(block: str, n: int) -> str:
    """The name of the n-th codable tensor of a block."""
    return f"{block}:{n}"


def _is_worth(info: TensorInfo, codec: Codec) -> bool:
    item = _ITEM.get(info.dtype, 1)
    from holdall.runtime.activations.compress import worth_coding

    return worth_coding(info.dtype, _numel(info) * item, item, codec)


def _is_special(trace: Trace, info: TensorInfo) -> bool:
    """A statistic or a mask."""
    writes = trace.ops[info.born].writes if info.born >= 0 else ()
    drawn = any(trace.ops[k].random and info.id in trace.ops[k].mutates for k in trace.uses(info.id))
    return drawn or (info.id in writes and writes[0] != info.id) or (len(info.shape) > 1 and info.shape[-1] == 1)


def asks_for_sign(trace: Trace, save: Save) -> bool:
    """Is this save read by the backward of a ReLU, which needs the sign only?"""
    if save.unpacked is None or save.unpacked + 1 >= len(trace.ops):
        return False
    asking = trace.ops[save.unpacked + 1]
    return asking.site.op == _RELU_BACKWARD and save.tensor in asking.reads


def _numel(info: TensorInfo) -> int:
    """Elements of the storage. Byte sizes on a GPU are rounded up, so the shape decides where it agrees with the bytes."""
    item = _ITEM.get(info.dtype, 1)
    count = prod(info.shape)
    return count if 0 <= info.nbytes - count * item < BLOCK else info.nbytes // item


def _codec_run(
    verb: str, reads: tuple[int, ...], writes: tuple[int, ...], info: TensorInfo, codec: Codec, hardware: Hardware
) -> Run:
    numel = _numel(info)
    from holdall.codecs import Group

    passes = _PASSES[verb] if hardware.device != "cuda" else 1 if isinstance(codec, Group) else _GPU_PASSES
    room = codec.workspace(numel, hardware.device)[verb == "decode"]
    moved = passes * info.nbytes + codec.nbytes(numel)
    return Run(
        op=-1,
        reads=reads,
        writes=writes,
        seconds=moved / hardware.bandwidth + hardware.overhead,
        workspace=room,
        name=f"{verb} {info.name}",
    )
