"""Stages with different numbers of ranks (PipeDream and DAPPLE replicate stages unequally): every micro-batch is split by rows
over the ranks of a stage.

Rank r of the pipeline is `replicas[r]` ranks of the run, one after the other: with [2, 1], ranks 0 and 1 have the first stage
and rank 2 the last. Each has all parameters of its stage, and of every micro-batch an equal part of the rows, in order. At the
border of two stages a rank sends what it has to those that want these rows. Losses are means over rows, and so is their mean
over the ranks of the last stage; gradients are sums over the ranks of a stage, taken after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from holdall.errors import InvalidInput, Unsupported
from holdall.parallel.parts import Division, Fork
from holdall.pipelines.hybrid.starting import is_split
from holdall.pipelines.pipeline import ONE, Pipeline
from holdall.pipelines.running.mesh import PipeMesh, sum_gradients
from holdall.pipelines.running.stage_ranks.divided import Divider
from holdall.pipelines.tasks import FORWARD, RECV_B, RECV_F, SEND_F, PipeTask

ROWS = "rows"
Losses = Callable[[Any, torch.Tensor], torch.Tensor]
Key = tuple[int, str, int]  # of a message that is to come: stage, kind, micro-batch


class UnequalMesh(PipeMesh):
    """This rank's place among stages of different numbers of ranks. All ranks have one batch."""

    in_advance = False

    def __init__(self, replicas: Sequence[int], group: Any) -> None:
        super().__init__(None, "ddp", group)
        wrong = [n for n in replicas if isinstance(n, bool) or not isinstance(n, int) or n < 1]
        if wrong or group is not None or sum(replicas) != dist.get_world_size():
            raise InvalidInput(
                f"`replicas` are {list(replicas)}, and the process group has {dist.get_world_size()} ranks",
                hint="name the ranks of each rank of the pipeline, as in [2, 1]; together they are all there are",
            )
        self.each = tuple(replicas)
        starts = (0, *accumulate(self.each))
        self.ranks_of = [tuple(range(a, a + n)) for a, n in zip(starts, self.each, strict=False)]
        self.sizes["pp"], self.dividing = len(self.each), ROWS
        self._place = next(n for n, own in enumerate(self.ranks_of) if dist.get_rank() in own)
        self.part = self.ranks_of[self._place].index(dist.get_rank())  # of the rows
        self.drawing: Any = None  # for random numbers
        self.group: Any = None  # the ranks of this rank's stages

    @property
    def place_in_pipe(self) -> int:
        return self._place

    @property
    def is_alone(self) -> bool:
        return False

    @property
    def holders(self) -> int:
        return self.count

    @property
    def is_summed(self) -> bool:
        return self.count > 1

    @property
    def count(self) -> int:
        """Ranks that this rank's stages have."""
        return self.each[self._place]

    def connect(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        groups = [dist.new_group(ranks) for ranks in self.ranks_of]
        self.group = groups[self._place]
        self.drawing = Division(DeviceMesh.from_group(self.group, device.type))

    def check(self, made: Pipeline) -> None:
        if made.weights != ONE or made.copies > 1 or is_split(made):
            raise Unsupported(
                f"`{made.name}` splits backward, has copies of stages or versions of weights, which stages of several ranks do "
                "not have",
                hint="use 1f1b, gpipe, interleaved or breadth_first",
            )

    def check_pieces(self, pieces: Sequence[torch.nn.Module], device: torch.device) -> None:
        norms = [path for path, m in torch.nn.Sequential(*pieces).named_modules() if isinstance(m, _BatchNorm)]
        if norms and max(self.each) > 1:
            raise Unsupported(
                f"`{norms[0]}` takes averages over rows, which are split here", hint='use mesh={"pp": 2, "dp": 2}'
            )
        if device.type != "cpu":
            raise Unsupported("stages of different numbers of ranks run on CPUs", hint='use mesh={"pp": 2, "dp": 2} on GPUs')

    def rows(self, value: Any) -> Any:
        def part(t: torch.Tensor) -> torch.Tensor:
            return t.chunk(self.count)[self.part] if t.dim() and len(t) % self.count == 0 else t

        return tree_map_only(torch.Tensor, part, value)

    def check_rows(self, rows: int) -> None:
        odd = next((n for n in self.each if rows % n), None)
        if odd is not None:
            raise InvalidInput(
                f"a micro-batch of {rows} rows does not split over the {odd} ranks of a stage",
                hint="use more rows, or other `micro_batches`",
            )

    def reduce(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        sum_gradients([p for p in parameters if p.requires_grad], self.group)

    def same_buffers(self, module: torch.nn.Module) -> None:
        for name, buffer in module.named_buffers():
            if name in module.state_dict():
                dist.broadcast(buffer, group=self.group, group_src=0)


class ByRows(Divider):
    """Leaves stages as they are, and compares what they compute of this rank's rows."""

    def __init__(
        self,
        pieces: Sequence[torch.nn.Module],  # noqa: ARG002
        sample: Any,  # noqa: ARG002
        before: Sequence[Any],
        loss: Any,  # noqa: ARG002
        mesh: UnequalMesh,
    ) -> None:
        super().__init__([mesh.rows(b) for b in before], mesh.group)


@dataclass(eq=False)
class RowsStage:
    """A stage of this rank, and what it holds of micro-batches: inputs and outputs."""

    submod: torch.nn.Module
    stage_index: int
    is_first: bool
    is_last: bool

    def __post_init__(self) -> None:
        self.held: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}


class RowsRuntime:
    """Runs the lowered lists by sends and receives of rows."""

    def __init__(
        self,
        pipeline: Pipeline,
        lists: tuple[tuple[PipeTask, ...], ...],
        modules: dict[int, torch.nn.Module],
        loss: Losses,
        mesh: UnequalMesh,
        borders: dict[int, Any],
    ) -> None:
        """`borders`: stage -> what it gets of a micro-batch, all rows of it, without values."""
        self._pipeline, self._list, self._loss, self._mesh = pipeline, lists[mesh.place_in_pipe], loss, mesh
        self._borders = borders
        self.own_stages = [RowsStage(m, s, pipeline.before(s) is None, pipeline.after(s) is None) for s, m in modules.items()]
        self._stage_of = {stage.stage_index: stage for stage in self.own_stages}
        self.losses: dict[int, torch.Tensor] = {}
        self._arriving: dict[Key, tuple[list[torch.Tensor], list[Any]]] = {}
        self._leaving: list[tuple[torch.Tensor, Any]] = []  # what is sent stays until the end of a step

    def step(self, *args: torch.Tensor, target: torch.Tensor | None, return_outputs: bool) -> None:  # noqa: ARG002
        count = self._pipeline.micro_batches
        self._inputs = args[0].chunk(count) if args else ()
        self._targets = target.chunk(count) if target is not None else ()
        for task in self._list:
            for work in task.works:
                if work.is_message:
                    self._talk(work)
                elif work.kind == FORWARD:
                    self._forward(self._stage_of[work.stage], work.batch)
                else:
                    self._backward(self._stage_of[work.stage], work.batch)
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()

    def _forward(self, stage: RowsStage, batch: int) -> None:
        if stage.is_first:
            given, inputs = self._mesh.rows(self._inputs[batch]), []
        else:
            inputs = self._received((stage.stage_index, RECV_F, batch))
            for t in inputs:
                t.requires_grad_(t.is_floating_point())
            given = tree_unflatten(inputs, tree_flatten(self._borders[stage.stage_index])[1])
        drawn = Fork(self._mesh.drawing)  # ranks of a stage have other rows
        drawn.begin()
        try:
            found = stage.submod(given)
        finally:
            drawn.end()
        if stage.is_last:
            value = self._loss(found, self._mesh.rows(self._targets[batch])) / self._mesh.count
            self.losses[batch] = value.detach()
            found = value
        outputs = tree_flatten(found)[0]
        stage.held[batch] = inputs, outputs
        if not stage.is_last:
            self._hand_over((stage.stage_index + 1, RECV_F, batch), [t.detach() for t in outputs])

    def _backward(self, stage: RowsStage, batch: int) -> None:
        inputs, outputs = stage.held.pop(batch)
        grads = [None] if stage.is_last else self._received((stage.stage_index, RECV_B, batch))
        wanted = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
        torch.autograd.backward([t for t, _ in wanted], [g for _, g in wanted])
        if not stage.is_first:
            found = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
            self._hand_over((stage.stage_index - 1, RECV_B, batch), found)

    # messages

    def _hand_over(self, key: Key, tensors: list[torch.Tensor]) -> None:
        """For a stage of the same rank at once, for others when the list says so."""
        self._arriving[key] = tensors, []

    def _received(self, key: Key) -> list[torch.Tensor]:
        tensors, works = self._arriving.pop(key)
        for work in works:
            work.wait()
        return tensors

    def _talk(self, task: PipeTask) -> None:
        stage, kind, batch = task.stage, task.kind, task.batch
        if kind in (RECV_F, RECV_B):
            border = stage if kind == RECV_F else stage + 1
            other = stage - 1 if kind == RECV_F else stage + 1
            tensors = [torch.empty(t.shape, dtype=t.dtype) for t in tree_flatten(self._mesh.rows(self._borders[border]))[0]]
            works = [
                dist.irecv(t[own], peer, tag=_tag(n, border, batch, kind == RECV_F))
                for n, t in enumerate(tensors)
                for peer, own in self._overlaps(other, len(t))
            ]
            self._arriving[stage, kind, batch] = tensors, works
            return
        other = stage + 1 if kind == SEND_F else stage - 1
        border = max(stage, other)
        tensors, _ = self._arriving.pop((other, RECV_F if kind == SEND_F else RECV_B, batch))
        for n, t in enumerate(tensors):
            for peer, own in self._overlaps(other, len(t)):
                sent = t[own].contiguous()
                self._leaving.append((sent, dist.isend(sent, peer, tag=_tag(n, border, batch, kind == SEND_F))))

    def _overlaps(self, other: int, rows: int) -> Iterator[tuple[int, slice]]:
        """(rank, which of this rank's `rows` it has too) of the ranks of another stage."""
        peers = self._mesh.ranks_of[self._pipeline.rank_of[other]]
        first, theirs = self._mesh.part * rows, rows * self._mesh.count // len(peers)
        for n, peer in enumerate(peers):
            low, high = max(first, n * theirs), min(first + rows, (n + 1) * theirs)
            if low < high:
                yield peer, slice(low - first, high - first)


def _tag(leaf: int, border: int, batch: int, is_forward: bool) -> int:
    return ((leaf * 256 + border) * 4096 + batch) * 2 + is_forward


def borders_of(bounds: Sequence[int], before: Sequence[Any], shape: torch.Size, micro_batches: int) -> dict[int, Any]:
    """Stage -> what it gets of a micro-batch, without values. `before`: what the pieces get of the sample; `shape`: of the
    inputs of a batch."""
    rows, sample = shape[0] // micro_batches, len(before[0])
    if shape[1:] != before[0].shape[1:]:
        raise InvalidInput(
            f"inputs of shape {tuple(shape)} are not like the sample's, {tuple(before[0].shape)}",
            hint="pass a sample of the shape of batches; the number of rows may differ",
        )

    def without_values(t: Any) -> torch.Tensor:
        if not isinstance(t, torch.Tensor) or t.dim() == 0 or len(t) != sample:
            raise Unsupported(
                "a stage hands on something that has no rows, which cannot be split", hint="let it hand on tensors"
            )
        return torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device="meta")

    return {stage: torch.utils._pytree.tree_map(without_values, before[low]) for stage, low in enumerate(bounds[:-1]) if stage}
