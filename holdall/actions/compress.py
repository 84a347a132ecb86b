"""Compress: what a block holds for backward waits as codes of a few bits; backward decodes each tensor as it asks for it.

ActNN (Chen et al., ICML 2021, arXiv 2104.14129) and GACT (Liu et al., ICML 2022, arXiv 2206.11357) as an action on a block.
Forward values are those of the untouched model to the bit; gradients are approximate. Where a gradient is linear in what was
saved (weights of linear and convolution layers) a stochastic codec leaves its mean as it was.

Tolerance: with every block coded, the gradient's cosine with the exact one is above 0.999 at 8 bits, 0.98 at 4 and 0.75 at 2
(tests/unit/test_compress.py, on the tiny families). Never coded: parameters, what the block gives on, integers and masks,
statistics of norms and of attention, and whatever would not get smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.offload import own_inputs
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

if TYPE_CHECKING:
    # torch is loaded when something is coded, not when actions are listed
    from holdall.codecs import Codec
    from holdall.runtime.harness import Harness

SIGN = 0  # in the place of bits: only whether a value is above zero is needed
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_PASSES = {"encode": 150, "decode": 40}  # of a copy's time, by plain ops on one core (benchmarks/codecs.py); chance is half
_GPU_PASSES = 10  # by plain ops on a GPU: counted, not measured; the group codec is one kernel
_OFFERED = (8, 4)  # bits on the menus of planners
_RELU_BACKWARD = "aten.threshold_backward.default"


@dataclass(frozen=True, kw_only=True)
class Compress(Facts):
    block: str
    codec: str = "group"
    saves: tuple[int, ...] = ()  # which of the block's saves are coded, counted as autograd makes them
    bits: tuple[int, ...] = ()  # of each of them; 0: its sign
    swap: bool = False  # the codes wait in the next tier
    lag: bool = False  # as for offload: free the device's copy when the next block's forward is over
    fetch: str = ""  # as for offload: start fetching when the backward of this block begins
    seed: int = 0

    name: ClassVar[str] = "compress"
    exact: ClassVar[bool] = False
    rank: ClassVar[int] = 25
    alone: ClassVar[bool] = True  # what it codes is neither recomputed nor offloaded; `swap` offloads the codes
    spares_activations: ClassVar[bool] = True
    what: ClassVar[str] = "what a block holds for backward waits as codes of 8 bits"

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
        """The action for a block of a trace. `bits`: for all that is `codable`, or of each tensor that is to be coded;
        `overlap`: where codes are swapped, copies run beside computation."""
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
        """A block at 4 bits, and one with an odd number of bits whose codes are swapped."""
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
        reads = dict.fromkeys((*runs[-1].reads, *_held_outside(schedule, block)))
        steps: list[Step] = [*runs[:-1], replace(runs[-1], reads=tuple(reads))]
        if self.swap:
            steps += self._move(schedule, problem, block, tuple(coded), [s for saves in items.values() for s in saves])
        schedule.insert(block.last, steps, first=True)  # before an earlier block's copies are waited for
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
        """What backward reads is decoded where it first asks, and held as the tensor would have been."""
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
        """The codes leave when the block is over and come back together, as an offloaded block's tensors do."""
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
        """What is coded, in the order in which the runtime comes to it: (tensor, codec) -> the saves that ask for it."""
        items: dict[tuple[int, Codec], list[Save]] = {}
        codecs = self._codecs()
        for n, i in enumerate(block.saves):
            save = trace.saves[i]
            info = trace.tensors[save.tensor]
            if n in codecs and save.tensor not in block.outputs and _is_worth(info, codecs[n]):
                items.setdefault((save.tensor, codecs[n]), []).append(save)
        return items

    def _codecs(self) -> dict[int, Codec]:
        """Which save gets which codec."""
        if len(self.bits) != len(self.saves):
            raise InvalidInput(
                f"`{self.block}`: {len(self.saves)} saves and {len(self.bits)} bits", hint="give bits for every save"
            )
        from holdall.codecs import codec_for

        codecs = {b: codec_for("sign" if b == SIGN else self.codec, b) for b in self.bits}
        return {n: codecs[b] for n, b in zip(self.saves, self.bits, strict=True)}

    def install(self, harness: Harness) -> None:
        policy = harness.policy(self.block)
        if policy.recompute or policy.park:
            other = "recompute" if policy.recompute else "offload"
            raise InvalidInput(f"`{self.block}` cannot have both {other} and compress", hint="choose one of them")
        if self.swap and not harness.stores:
            raise Unsupported("codes are to be swapped, and there is no tier to swap them to", hint="plan with swap=False")
        from holdall.runtime.activations.compress import Compression, seed_of

        policy.compress = Compression(codecs=self._codecs(), seed=seed_of(self.block, self.seed))
        policy.park = self.swap
        policy.lag = self.lag
        policy.fetch = self.fetch


def _coded(trace: Trace, block: Block, bits: int) -> tuple[Compress]:
    return (Compress.of(trace, block, bits=bits),)


def codable(trace: Trace, block: Block, *, codec: str = "group", bits: int = 8) -> tuple[int, ...]:
    """Tensors that the block holds for backward and that may be coded, in the order of their first save.

    Made in the block, or an input that nobody else needs; not given on. Left alone are statistics: what an op makes beside its
    first result (mean and deviation of a norm, log-sum-exp of attention), and reductions to one column; and masks, on a CPU
    floats that a random op fills.
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
        elsewhere = len(saves) < len(trace.saves_of(x))  # another block holds it anyway
        if (inside or x in own) and not elsewhere and _is_worth(info, one) and not _is_special(trace, info):
            found.append(x)
    return tuple(found)


def _held_outside(schedule: Schedule, block: Block) -> list[int]:
    """Tensors that go when the block's call returns: whoever called it holds them while the codes are made."""
    tensors = schedule.trace.tensors.values()
    return [t.id for t in tensors if t.freed == block.last and t.born < block.first and t.id not in schedule.start]


def numel_of(trace: Trace, tensor: int) -> int:
    """Elements of a tensor's storage."""
    return _numel(trace.tensors[tensor])


def key_of(block: str, n: int) -> str:
    """The name of the n-th tensor that may be coded in a block."""
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
    """Whether the op that asked for it is the backward of a ReLU."""
    if save.unpacked is None or save.unpacked + 1 >= len(trace.ops):
        return False
    asking = trace.ops[save.unpacked + 1]
    return asking.site.op == _RELU_BACKWARD and save.tensor in asking.reads


def _numel(info: TensorInfo) -> int:
    """Elements of the storage. Sizes of a GPU's tensors are rounded up; then those of the shape, if the bytes are its."""
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
