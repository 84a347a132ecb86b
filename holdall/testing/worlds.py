"""Small worlds: synthetic chains for planners, tiny models of every family for the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdall.runtime.harness import Harness
from holdall.types import Block, Hardware, Kind, Op, Phase, Save, Site, TensorInfo, Tier, Trace, TraceInfo


def machine(*, overlap: bool = False, read: float = 1e9, write: float = 1e9, far: int = 2**50) -> Hardware:
    """A small machine with a far tier."""
    return Hardware(
        name="test machine",
        device="cpu",
        tiers=(
            Tier(name="cpu", capacity=2**50, read=1e12, write=1e12),
            Tier(name="far", capacity=far, read=read, write=write),
        ),
        flops={"float32": 1e9},
        bandwidth=1e9,
        overhead=1e-6,
        overlap=overlap,
    )


def chain(sizes: list[int], seconds: list[float] | None = None, *, state: int = 100) -> Trace:
    """A synthetic step: block i makes an inner tensor of sizes[i] bytes and an output of 10, and saves its input and the
    inner one."""
    n = len(sizes)
    times = seconds or [1.0] * n
    ops: list[Op] = []
    tensors: dict[int, TensorInfo] = {}
    saves: list[Save] = []

    def tensor(name: str, kind: Kind, nbytes: int, born: int, *, saved: bool = False) -> int:
        x = len(tensors)
        tensors[x] = TensorInfo(
            id=x, name=name, kind=kind, shape=(nbytes,), dtype="uint8", nbytes=nbytes, born=born, freed=None, saved=saved
        )
        return x

    def op(phase: Phase, module: str, name: str, reads: tuple[int, ...], writes: tuple[int, ...], time: float) -> int:
        k = len(ops)
        ops.append(Op(id=k, site=Site(phase=phase, module=module, op=name, nth=0), reads=reads, writes=writes, seconds=time))
        return k

    tensor("weights", Kind.PARAM, state, -1)
    x = tensor("batch", Kind.INPUT, 10, -1)
    inputs, inners, outputs = [], [], []
    for i in range(n):
        k = len(ops)
        inner = tensor(f"b{i}.inner", Kind.ACTIVATION, sizes[i], k, saved=True)
        op(Phase.FORWARD, f"b{i}", "work", (0, x), (inner,), times[i] / 2)
        out = tensor(f"b{i}.out", Kind.ACTIVATION, 10, k + 1, saved=True)
        op(Phase.FORWARD, f"b{i}", "end", (inner,), (out,), times[i] / 2)
        inputs.append(x)
        inners.append(inner)
        outputs.append(out)
        x = out
    loss = tensor("loss", Kind.TEMP, 1, len(ops))
    op(Phase.FORWARD, "", "loss", (x,), (loss,), 0.0)
    gradient = tensor("grad", Kind.TEMP, 10, len(ops))
    op(Phase.BACKWARD, "", "start", (loss, x), (gradient,), 0.0)
    blocks: list[Block] = []
    freed: dict[int, int] = {outputs[-1]: len(ops) - 1, loss: len(ops) - 1}
    for i in range(n):
        freed.setdefault(inners[i], 2 * i + 1)
        if i + 1 < n:
            freed.setdefault(outputs[i], 2 * i + 3)
    first_save = {}
    for i in reversed(range(n)):
        begin = len(ops) - 1
        new = tensor(f"b{i}.grad", Kind.TEMP, 10, begin + 1)
        op(Phase.BACKWARD, f"b{i}", "work_backward", (gradient, inners[i], inputs[i]), (new,), 2 * times[i])
        freed[gradient] = begin + 1
        gradient = new
        first_save[i] = len(saves)
        saves.append(Save(tensor=inners[i], packed=2 * i, unpacked=begin, released=begin + 1))
        saves.append(Save(tensor=inputs[i], packed=2 * i - 1, unpacked=begin, released=begin + 1))
    freed[gradient] = len(ops) - 1
    for i in range(n):
        blocks.append(
            Block(
                id=i,
                module=f"b{i}",
                nth=0,
                first=2 * i,
                last=2 * i + 1,
                backward=saves[first_save[i]].unpacked,
                inputs=(inputs[i],),
                outputs=(outputs[i],),
                saves=(first_save[i], first_save[i] + 1),
                kind="Synthetic",
            )
        )
    infos = {x: TensorInfo(**{**{f: getattr(t, f) for f in t.__slots__}, "freed": freed.get(x)}) for x, t in tensors.items()}
    return Trace(
        ops=tuple(ops), tensors=infos, blocks=tuple(blocks), saves=tuple(saves), about=TraceInfo(model="chain", device="cpu")
    )


TimedLayer = tuple[float, float, int]  # seconds of forward, seconds of backward, bytes of its input


def layered(layers: Sequence[TimedLayer], *, convolutions: Collection[int] = (), state: int = 100) -> Trace:
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


# models without Hugging Face


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return self.act(x + y)  # type: ignore[no-any-return]


class Convnet(nn.Module):
    """BatchNorm, residuals, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(*[_Residual(8) for _ in range(4)])
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.stem(images)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embed(ids))
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class DropoutBlock(nn.Module):
    """A normalised two-layer perceptron beside the residual stream, with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.down(self.drop(nn.functional.gelu(self.up(self.norm(x))))))
        return x + y  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One module used twice, so that its weights receive two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.shared, self.other = DropoutBlock(32, 0.1), DropoutBlock(32, 0.1)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.other(self.shared(self.embed(ids))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class DeepNet(nn.Module):
    """Equal layers with residuals around them and dropout inside; any number of rows."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Tied(nn.Module):
    """The head is the embedding; dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([DropoutBlock(32, 0.2) for _ in range(4)])
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class SharedTwice(nn.Module):
    """A tied embedding, a middle layer used twice, dropout; `reentrant`: that layer by torch's own checkpoints of this kind."""

    def __init__(self, reentrant: bool | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.drop, self.reentrant = nn.Embedding(40, 16), nn.Dropout(dropout), reentrant
        self.middle, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.middle(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Branching(nn.Module):
    """Decides by its own activations; cannot be traced on fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([DropoutBlock(32, 0.1) for _ in range(3)])
        self.head = nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
            if x.abs().sum() > 1e9:
                x = x / 2
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _ids(rows: int = 2, length: int = 16, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length))


PLAIN: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "convnet": lambda: (Convnet(), (torch.randn(2, 3, 12, 12), torch.randint(0, 10, (2,)))),
    "recurrent": lambda: (Recurrent(), (_ids(),)),
    "twice": lambda: (Twice(), (_ids(),)),
    "tied": lambda: (Tied(), (_ids(),)),
    "branching": lambda: (Branching(), (_ids(),)),
}
"""Families that need nothing but torch: name -> (model, batch)."""

HUGGING_FACE = ("tiny-gpt2", "tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mixtral", "tiny-bert", "tiny-t5", "tiny-vit")
"""Families that need transformers; see `holdall.models`."""


def family(name: str, *, padded: bool = False) -> tuple[nn.Module, Any]:
    """A tiny model of a family with a batch for it, in training mode; seeded."""
    torch.manual_seed(0)
    if name in PLAIN:
        model, batch = PLAIN[name]()
    else:
        from holdall import models

        source = models.describe(name)
        model = models.build(source, device="cpu", seed=0)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = True  # as users have it: the library's default
        batch = models.sample_batch(source, batch=2, seq=16)
        if padded:
            mask = torch.ones_like(batch["input_ids"])
            mask[0, -5:] = 0
            batch["attention_mask"] = mask
    return model.train(), batch


def far_used(harness: Harness) -> int:
    """Bytes in the farther tier of a harness; 0 where its plan uses none."""
    return harness.store.used if harness.store is not None else 0


def far_peak(harness: Harness) -> int:
    """The most bytes that were in the farther tier of a harness; 0 where its plan uses none."""
    return harness.store.peak if harness.store is not None else 0
