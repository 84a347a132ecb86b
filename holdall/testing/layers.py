"""Synthetic chains of layers with given times, for planners that swap or recompute whole layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdall.types import Block, Kind, Op, Phase, Save, Site, TensorInfo, Trace, TraceInfo

Layer = tuple[float, float, int]  # seconds of forward, seconds of backward, bytes of its input


def layered(layers: Sequence[Layer], *, convolutions: Collection[int] = (), state: int = 100) -> Trace:
    """A step of layers that each read and save one feature map, made by the layer before; gradients take one byte.

    `convolutions`: the layers that are convolutions.
    """
    n = len(layers)
    ops: list[Op] = []
    infos: list[TensorInfo] = []

    def tensor(name: str, kind: Kind, nbytes: int, born: int, freed: int | None, *, saved: bool = False) -> int:
        infos.append(
            TensorInfo(
                id=len(infos),
                name=name,
                kind=kind,
                shape=(1, nbytes, 1),
                dtype="uint8",
                nbytes=nbytes,
                born=born,
                freed=freed,
                saved=saved,
            )
        )
        return len(infos) - 1

    def op(phase: Phase, layer: int, reads: tuple[int, ...], writes: tuple[int, ...], seconds: float) -> None:
        name = "convolution" if layer in convolutions else "work"
        site = Site(phase=phase, module=f"b{layer}", op=name, nth=0)
        ops.append(Op(id=len(ops), site=site, reads=reads, writes=writes, seconds=seconds))

    tensor("weights", Kind.PARAM, state, -1, None)
    maps = [tensor("batch", Kind.INPUT, layers[0][2], -1, None)]
    maps += [tensor(f"x{i}", Kind.ACTIVATION, layers[i][2], i - 1, i, saved=True) for i in range(1, n)]
    gradient = tensor("loss", Kind.TEMP, 1, n - 1, n)
    for i in range(n):
        op(Phase.FORWARD, i, (0, maps[i]), (maps[i + 1] if i + 1 < n else gradient,), layers[i][0])
    saves = tuple(Save(tensor=maps[i], packed=i - 1, unpacked=2 * n - 2 - i, released=2 * n - 1 - i) for i in range(n))
    for i in reversed(range(n)):
        made = tensor(f"g{i}", Kind.TEMP, 1, len(ops), len(ops) + 1 if i else len(ops))
        op(Phase.BACKWARD, i, (gradient, maps[i]), (made,), layers[i][1])
        gradient = made
    blocks = tuple(
        Block(
            id=i,
            module=f"b{i}",
            nth=0,
            first=i,
            last=i,
            backward=2 * n - 2 - i,
            inputs=(maps[i],),
            outputs=(maps[i + 1],) if i + 1 < n else (),
            saves=(i,),
            kind="Layer",
        )
        for i in range(n)
    )
    about = TraceInfo(model="layers", device="cpu")
    return Trace(ops=tuple(ops), tensors={t.id: t for t in infos}, blocks=blocks, saves=saves, about=about)
