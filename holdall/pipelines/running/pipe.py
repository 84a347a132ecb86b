"""Trains a model in a pipeline of ranks: cuts it, keeps this rank's stages, and does a whole step per call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from holdall.errors import InvalidInput, Unsupported
from holdall.parallel.agree import together
from holdall.pipelines.cuts import check_bounds, even_cut
from holdall.pipelines.lowering import lower
from holdall.pipelines.pipeline import ONE, PREDICTED, Pipeline
from holdall.pipelines.running.choosing import Some, Wishes, named
from holdall.pipelines.running.clipping import clip_over_stages
from holdall.pipelines.running.faults import ends_with_the_others
from holdall.pipelines.running.host.memory import host_of
from holdall.pipelines.running.host.states import PlacedStates, parameters_of
from holdall.pipelines.running.mesh import PipeMesh
from holdall.pipelines.running.pieces import check_whole, pieces_of
from holdall.pipelines.running.saving import StageSaving
from holdall.pipelines.running.stage_ranks.by_context import ByContext
from holdall.pipelines.running.stage_ranks.by_experts import ByExperts
from holdall.pipelines.running.stage_ranks.by_tensors import ByTensors
from holdall.pipelines.running.stage_ranks.copies import Tied, add_tied, add_twins, holders_of, refuse_divided, tied_over_ranks
from holdall.pipelines.running.stage_ranks.divided import Divider, Sample, evaluated, sample_of
from holdall.pipelines.running.stage_ranks.sharing import ZERO3
from holdall.pipelines.running.stage_ranks.unequal import ROWS, ByRows, RowsRuntime, UnequalMesh, borders_of
from holdall.pipelines.running.torch_names import ChainedStage, ListRuntime, ShardedStage
from holdall.pipelines.running.versions import VersionedStage, check_predictable
from holdall.pipelines.schedules import pipeline
from holdall.types.mesh import Mesh

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Runtime = ListRuntime | RowsRuntime
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
_DIVIDERS: dict[str, Callable[..., Divider]] = {"tp": ByTensors, "cp": ByContext, "ep": ByExperts, ROWS: ByRows}


@dataclass(frozen=True, kw_only=True)
class PipePlan:
    """What a run is to be; making it takes no other rank."""

    made: Pipeline
    mesh: PipeMesh
    pieces: list[torch.nn.Module]
    bounds: tuple[int, ...]
    tied: list[Tied]
    wishes: Wishes
    place: frozenset[int]  # layers whose optimizer states are at the host
    sample: Sample | None  # a micro-batch
    device: torch.device

    def cut(self, stage: int) -> tuple[int, int]:
        """The first layer of a stage, and the one after its last."""
        place = stage % self.made.chain
        return self.bounds[place], self.bounds[place + 1]


class PipeRun:
    """This rank's part of a pipeline. `step` computes gradients, and updates in pipelines that never flush."""

    holdall_stages = True  # for checkpoints, which take it for a model

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        plan: PipePlan,
        loss: Loss,
        optimizer: MakeOptimizer | None,
    ) -> None:
        self.pipeline, self.mesh, self.bounds = plan.made, plan.mesh, plan.bounds
        made, mesh = plan.made, plan.mesh
        self._group = mesh.pipe_group
        self.rank = mesh.place_in_pipe
        self.replica, self.replicas = mesh.replica, mesh.replicas
        pieces = plan.pieces
        before: Sequence[Any] | None = evaluated(pieces, plan.sample[0]) if plan.sample is not None else None  # what pieces get
        divider = _DIVIDERS[mesh.dividing](pieces, plan.sample, before, loss, mesh) if mesh.dividing else None
        self._before = tree_map_only(torch.Tensor, lambda t: t.to("meta"), before)  # for shapes
        if divider is not None:
            before = divider.before
        root = model if isinstance(model, torch.nn.Module) else torch.nn.ModuleList(pieces)
        names: dict[int, list[str]] = {}  # several, where modules of the model share it
        for name, t in [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]:
            names.setdefault(id(t), []).append(name)
        self._tied = plan.tied
        self.modules: dict[int, torch.nn.Module] = {}  # stage of this rank -> its layers
        self._names: dict[int, dict[str, list[str]]] = {}  # stage -> name of a parameter or buffer in it -> in the model
        for stage in made.stages_of(self.rank):
            module = torch.nn.Sequential(*pieces[slice(*plan.cut(stage))])
            own = module if stage < made.chain else copy.deepcopy(module)
            there = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            self._names[stage] = {path: names[id(t)] for path, t in there}
            self.modules[stage] = own
        self._forget_others(root)
        for stage, whole in self.modules.items() if divider is not None else ():
            divider.divide(whole, *plan.cut(stage))  # type: ignore[union-attr]
        self._fused = divider.fused if divider is not None else ""
        known = before if mesh.dividing != "ep" else None  # other batches give experts other loads
        rows = replace(plan, sample=mesh.rows(plan.sample))
        self.saving = StageSaving(rows, self.modules, self.rank, known, loss) if plan.wishes.are_any else None
        for stage, whole in self.modules.items() if not mesh.sharing.is_whole else ():
            mesh.sharing.share(whole, mesh.sharing.of(*plan.cut(stage)), mesh.on["dp"])
        ways = {stage: mesh.sharing.of(*plan.cut(stage)) for stage in self.modules}
        self._again = {s: [n for n, way in enumerate(own) if way == ZERO3] for s, own in ways.items()}
        self.optimizers = {s: optimizer(m.parameters()) for s, m in self.modules.items()} if optimizer is not None else {}
        for rule in self.optimizers.values() if made.weights == PREDICTED else ():
            check_predictable(rule)
        self._place = parameters_of(plan.place, {plan.cut(stage)[0]: module for stage, module in self.modules.items()})
        self.placed: PlacedStates | None = None  # by `optimizer`
        self._loss = loss if self.saving is None else self.saving.counted(loss)
        self._device, self._lists = plan.device, lower(made)
        self._runtimes: dict[Any, Runtime] = {}  # by shapes of a batch: a runtime knows one size of messages
        self.stages: dict[int, Any] = {}  # of the last step

    def optimizer(self, rule: MakeOptimizer) -> torch.optim.Optimizer:
        """The optimizer that `rule` makes of this rank's parameters, with the states of the layers in `place` at the host."""
        made = rule(list(self.parameters()))
        if self._place:
            self.placed = PlacedStates(made, self._place, host_of(self._device))
        return made

    def _made_runtime(self, inputs: torch.Size) -> Runtime:
        if isinstance(self.mesh, UnequalMesh):
            assert self._before is not None
            borders = borders_of(self.bounds, self._before, inputs, self.pipeline.micro_batches)
            return RowsRuntime(self.pipeline, self._lists, self.modules, self._loss, self.mesh, borders)
        update = None
        if not self.mesh.sharing.is_whole:
            made: list[ChainedStage] = [
                ShardedStage(m, s, self.pipeline, self._device, self._group, again=self._again[s])
                for s, m in self.modules.items()
            ]
        elif self.pipeline.weights == ONE:
            made = [ChainedStage(m, s, self.pipeline, self._device, self._group) for s, m in self.modules.items()]
        else:
            made = [
                VersionedStage(m, s, self.pipeline, self._device, self._group, self.optimizers[s])
                for s, m in self.modules.items()
            ]
            update = self._update
        return ListRuntime(self.pipeline, self._lists, made, self._loss, update)

    def _runtime(self, shapes: Any) -> Runtime:
        if shapes not in self._runtimes:
            self._runtimes[shapes] = self._made_runtime(shapes[0])
        runtime = self._runtimes[shapes]
        self.stages = {stage.stage_index: stage for stage in runtime.own_stages}
        return runtime

    def _update(self, stage: int, _: int) -> None:
        self.stages[stage].update()

    def _forget_others(self, root: torch.nn.Module) -> None:
        """Parameters of other ranks' stages give their memory back: they go to the meta device."""
        kept = {id(p) for p in self.parameters()}
        for module in root.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) not in kept:
                    module._parameters[name] = torch.nn.Parameter(p.to("meta"), requires_grad=p.requires_grad)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank's stages, for an optimizer."""
        yield from torch.nn.ModuleList(self.modules.values()).parameters()  # each once

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Of this rank's stages, by their names in the model; two chains have two parameters of a name."""
        seen: set[int] = set()  # what stages of this rank share is there once
        for stage, module in self.modules.items():
            for path, p in module.named_parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield self._names[stage][path][0], p

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank's stages by their names in the model, for `holdall.save_checkpoint`."""
        if self.pipeline.copies > 1:
            raise Unsupported(
                f"`{self.pipeline.name}` has two copies of every stage, which checkpoints do not hold",
                hint="save `pipe.named_parameters()` of each rank yourself, or use a schedule with one copy",
            )
        if self._fused:
            raise Unsupported(
                f"`{self._fused}` is several matrices side by side, whose parts on tensor ranks checkpoints do not hold",
                hint="save `p.full_tensor()` of `pipe.named_parameters()` yourself, or leave `tp` out of the mesh",
            )
        states = ((self._names[stage][path], t) for stage, m in self.modules.items() for path, t in m.state_dict().items())
        return {name: t for names, t in states for name in names}

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """All micro-batches of a batch, forward and backward; returns the mean loss, on every rank.

        All ranks of a pipeline call this with the same batch, and replicas each with their own: the first batch is compared.
        Gradients are means over the micro-batches and the replicas, added to those that are there.
        """
        inputs, targets = inputs.to(self._device), targets.to(self._device)
        count = self.pipeline.micro_batches
        if len(inputs) % count or len(targets) % count:
            raise InvalidInput(
                f"a batch of {len(inputs)} rows does not split into {count} equal micro-batches",
                hint=f"use a multiple of {count} rows, or other `micro_batches`",
            )
        for given in (inputs, targets):
            self.mesh.check_rows(len(given) // count)
        if not self._runtimes:
            with ends_with_the_others(self._group):
                self.mesh.refuse_other_batches((inputs, targets))
        if self._place and self.placed is None:
            raise InvalidInput(
                "`place` names layers of this rank, but no optimizer has been made that keeps their states at the host",
                hint="use optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters))",
            )
        before = [p.grad for p in self.parameters()]
        for p in self.parameters():
            p.grad = None
        runtime = self._runtime((inputs.shape, inputs.dtype, targets.shape, targets.dtype))
        runtime.losses.clear()
        if self.saving is not None:
            self.saving.held.restart()
        firsts = any(stage.is_first for stage in self.stages.values())
        lasts = any(stage.is_last for stage in self.stages.values())
        for stage in self.stages.values():
            if isinstance(stage, VersionedStage):
                stage.begin()
        with ends_with_the_others(self._group):
            runtime.step(*([inputs] if firsts else []), target=targets if lasts else None, return_outputs=False)
            if self.pipeline.weights == ONE:
                self._finish(before)
            return self._mean_loss(runtime.losses)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As torch's function of that name, by the norm over all stages, which it returns; all ranks call it."""
        if self.pipeline.weights != ONE:
            raise Unsupported(f"`{self.pipeline.name}` updates inside a step", hint="use a schedule that flushes, such as 1f1b")
        group = self._group if self.mesh.is_alone else None
        with ends_with_the_others(group):
            holders = self.mesh.holders * self.pipeline.copies
            every = list(self.parameters())
            return clip_over_stages(every, max_norm, holders=holders, again=holders_of(self._tied), group=group)

    def _finish(self, before: list[torch.Tensor | None]) -> None:
        """Add the copies' gradients, divide by the micro-batches, and add what was there before."""
        if self.pipeline.copies > 1:
            add_twins(self.modules, self.pipeline, self.rank, self._group)
        add_tied(self._tied, self.rank, self._group)
        for stage in self.stages.values():
            if isinstance(stage, ShardedStage):
                stage.reduce()
        self.mesh.reduce(list(self.parameters()))
        for module in self.modules.values():
            self.mesh.same_buffers(module)
        for p, old in zip(self.parameters(), before, strict=True):
            if p.grad is not None:
                p.grad.div_(self.pipeline.micro_batches)
            if old is not None:
                p.grad = old if p.grad is None else old.add_(p.grad)

    def _mean_loss(self, losses: dict[int, torch.Tensor]) -> torch.Tensor:
        """Losses of all micro-batches, added in their order, whichever rank has them."""
        each = torch.zeros(self.pipeline.micro_batches, dtype=torch.float64, device=self._device)
        for batch, value in losses.items():
            each[batch] = value.double().item()
        dist.all_reduce(each, group=self._group)
        return self.mesh.mean(each.mean()).float()


def _device_of(pieces: Sequence[torch.nn.Module]) -> torch.device:
    """The device of the model, all of which is on one."""
    found = list(dict.fromkeys(p.device for piece in pieces for p in piece.parameters()))
    if any(device.type == "meta" for device in found):
        raise InvalidInput("parameters of the model are on the meta device, as after a cut", hint="build the model again")
    if len(found) > 1:
        raise InvalidInput(
            f"the model's parameters are on {found[0]} and {found[1]}", hint="put all of it on this rank's device"
        )
    return found[0] if found else torch.device("cpu")


def _check_backend(device: torch.device, group: Any) -> None:
    """Refuse a process group that sends nothing from the model's device."""
    kind = "nccl" if device.type == "cuda" else "gloo"
    backends = dist.get_backend_config(group)
    if f"{device.type}:{kind}" not in backends.split(","):
        raise InvalidInput(
            f"the model is on {device}, but the process group is of {backends}",
            hint=f'use torch.distributed.init_process_group("{device.type}:{kind}"), or put the model elsewhere',
        )


def start(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    schedule: str = "1f1b",
    micro_batches: int,
    loss: Loss,
    cut: Sequence[int] | None = None,
    optimizer: MakeOptimizer | None = None,
    group: Any = None,
    mesh: Mapping[str, int] | Mesh | None = None,
    shard: str | Sequence[str] = "ddp",
    replicas: Sequence[int] | None = None,
    sample: Any = None,
    recompute: Some = None,
    offload: Some = None,
    place: Some = None,
    budget: str | int | None = None,
    **options: Any,
) -> PipeRun:
    """See `holdall.pipelines.start`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInput(
            "there is no process group to run a pipeline on",
            hint='start with `torchrun --nproc-per-node 4` and `torch.distributed.init_process_group("gloo")`',
        )

    def make() -> PipePlan:
        if replicas is not None and (mesh is not None or shard != "ddp"):
            raise InvalidInput("`replicas` lays out all ranks, without `mesh` and `shard`", hint="leave one of them out")
        on = PipeMesh(mesh, shard, group) if replicas is None else UnequalMesh(replicas, group)
        made = pipeline(schedule, ranks=on.sizes["pp"], micro_batches=micro_batches, **options)
        on.check(made)
        if made.weights != ONE and optimizer is None:
            raise InvalidInput(
                f"`{made.name}` updates weights inside a step, so it makes the optimizer itself",
                hint="pass optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
            )
        if made.weights == ONE and optimizer is not None:
            raise InvalidInput(
                f"`{made.name}` ends a step with gradients: make the optimizer yourself",
                hint="use torch.optim.AdamW(pipe.parameters())",
            )
        pieces = pieces_of(model)
        on.sharing.check_pieces(len(pieces))
        sizes = [sum(p.numel() * p.element_size() for p in piece.parameters()) for piece in pieces]
        bounds = check_bounds(cut, len(pieces), made.chain) if cut is not None else even_cut(sizes, made.chain)
        tied = tied_over_ranks(pieces, bounds, made)
        refuse_divided(tied, is_whole=on.sharing.is_whole, dividing=on.dividing)
        wishes = Wishes.of(recompute, offload, budget, len(pieces))
        if made.weights != ONE and wishes.are_any:
            raise Unsupported(
                f"`{made.name}` computes with several versions of weights, and a recomputed layer would take the newest",
                hint="leave `recompute`, `offload` and `budget` out, or use a schedule that flushes, such as 1f1b",
            )
        placed = named("place", place, len(pieces))
        if placed and (made.weights != ONE or not on.sharing.is_whole or on.dividing or replicas is not None):
            raise Unsupported(
                "`place` keeps states of whole parameters at the host, and updates them between steps",
                hint='use shard="ddp", a mesh of `pp` and `dp`, and a schedule that flushes, such as 1f1b',
            )
        if wishes.budget is not None and on.dividing == "ep":
            raise Unsupported(
                "what a rank holds for its experts differs from batch to batch, so that no budget of it can be kept",
                hint="name the layers: recompute=True, or offload=[...]",
            )
        asks = replicas is not None or on.dividing in ("tp", "cp") or wishes.budget is not None
        device = _device_of(pieces)
        _check_backend(device, group)
        check_whole(model, pieces)
        on.check_pieces(pieces, device)
        part = sample_of(sample, micro_batches, device) if asks or sample is not None else None
        if part is not None:
            on.check_rows(len(part[0]))
        how: dict[str, Any] = {"tied": tied, "wishes": wishes, "place": placed, "sample": part, "device": device}
        return PipePlan(made=made, mesh=on, pieces=pieces, bounds=tuple(bounds), **how)

    plan = together(make)
    plan.mesh.connect(plan.device)
    run = together(lambda: PipeRun(model, plan, loss, optimizer))
    if run.saving is not None:
        run.saving.agree()
    return run
