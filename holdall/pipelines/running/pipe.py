"""Trains a model in a pipeline of ranks: cuts it, keeps this rank's stages, and does a whole step per call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from holdall.errors import InvalidInput, Unsupported
from holdall.parallel.agree import together
from holdall.pipelines.lowering import lower
from holdall.pipelines.pipeline import ONE, PREDICTED
from holdall.pipelines.running.auto import choose
from holdall.pipelines.running.budget.metering import STEP, Meter, make_meter, measure_updates
from holdall.pipelines.running.budget.report import PipeReport, made_report
from holdall.pipelines.running.budget.rule_bytes import MakeOptimizer
from holdall.pipelines.running.budget.saving import StageSaving
from holdall.pipelines.running.clipping import clip_over_stages
from holdall.pipelines.running.faults import ends_with_the_others
from holdall.pipelines.running.host.memory import host_of
from holdall.pipelines.running.host.states import PlacedStates, parameters_of
from holdall.pipelines.running.pieces import StagePieces
from holdall.pipelines.running.stage_ranks.by_context import ByContext
from holdall.pipelines.running.stage_ranks.by_experts import ByExperts
from holdall.pipelines.running.stage_ranks.by_tensors import ByTensors
from holdall.pipelines.running.stage_ranks.copies import add_tied, add_twins, holders_of
from holdall.pipelines.running.stage_ranks.divided import Divider, evaluated
from holdall.pipelines.running.stage_ranks.sharing import ZERO3
from holdall.pipelines.running.stage_ranks.unequal import ROWS, ByRows, RowsRuntime, UnequalMesh, borders_of
from holdall.pipelines.running.starting import PipePlan, made_plan
from holdall.pipelines.running.torch_names import ChainedStage, ListRuntime, ShardedStage
from holdall.pipelines.running.versions import VersionedStage, check_predictable
from holdall.types.mesh import Mesh

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Runtime = ListRuntime | RowsRuntime
_DIVIDERS: dict[str, Callable[..., Divider]] = {"tp": ByTensors, "cp": ByContext, "ep": ByExperts, ROWS: ByRows}


class PipeRun:
    """This rank's part of a pipeline. `step` computes gradients, and updates in pipelines that never flush."""

    holdall_stages = True  # for checkpoints, which take it for a model

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        plan: PipePlan,
        loss: Loss,
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
            module = StagePieces(*pieces[slice(*plan.cut(stage))])
            module.hands_on = made.after(stage) is not None
            own = module if stage < made.chain else copy.deepcopy(module)
            there = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            self._names[stage] = {path: names[id(t)] for path, t in there}
            self.modules[stage] = own
        self._forget_others(root)
        for stage, whole in self.modules.items() if divider is not None else ():
            divider.divide(whole, *plan.cut(stage))  # type: ignore[union-attr]
        self._fused = divider.fused if divider is not None else ""
        known = before if mesh.dividing != "ep" else None  # other batches give experts other loads
        wanted = plan.wishes.are_any or (plan.optimizer is not None and plan.sample is not None)
        self.saving = StageSaving(plan, self.modules, self.rank, known, loss) if wanted else None
        for stage, whole in self.modules.items() if not mesh.sharing.is_whole else ():
            mesh.sharing.share(whole, mesh.sharing.of(*plan.cut(stage)), mesh.on["dp"])
        ways = {stage: mesh.sharing.of(*plan.cut(stage)) for stage in self.modules}
        self._again = {s: [n for n, way in enumerate(own) if way == ZERO3] for s, own in ways.items()}
        self._rule = plan.optimizer
        rules = self.modules.items() if made.weights != ONE else ()
        self.optimizers = {s: plan.optimizer(m.parameters()) for s, m in rules}  # type: ignore[misc]
        for rule in self.optimizers.values() if made.weights == PREDICTED else ():
            check_predictable(rule)
        place = self.saving.place if self.saving is not None else plan.wishes.to_place(len(pieces))
        self._place = parameters_of(place, {plan.cut(stage)[0]: module for stage, module in self.modules.items()})
        self.placed: PlacedStates | None = None  # by `optimizer`
        self._budget = plan.wishes.budget
        self._meter: Meter | None = None
        if self.saving is not None and self.saving.parts:
            self._meter = make_meter(plan.device, plan.wishes.budget, self)
        self._updating: list[torch.optim.Optimizer] = list(self.optimizers.values())
        self._loss = loss if self.saving is None else self.saving.counted(loss)
        self._device, self._lists = plan.device, lower(made)
        self._runtimes: dict[Any, Runtime] = {}  # by shapes of a batch: a runtime knows one size of messages
        self.stages: dict[int, Any] = {}  # of the last step

    def part(self, *batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of the rows of all replicas together, those of this one."""
        return tuple(t.chunk(self.replicas)[self.replica] for t in batch)

    def optimizer(self, rule: MakeOptimizer | None = None) -> torch.optim.Optimizer:
        """The optimizer that `rule`, by default that of `start`, makes of this rank's parameters; the states of the layers in
        `place` are at the host."""
        rule = rule or self._rule
        if rule is None:
            raise InvalidInput(
                "there is no rule to make an optimizer by",
                hint="use pipe.optimizer(torch.optim.AdamW), or start(optimizer=...)",
            )
        made = rule(list(self.parameters()))
        if self._place:
            self.placed = PlacedStates(made, self._place, host_of(self._device))
        self._updating = [made]
        if self._meter is not None:
            measure_updates(made, self._meter)
        return made

    def report(self) -> PipeReport:
        """Predicted against measured, of this rank."""
        if self.saving is None:
            raise InvalidInput(
                "nothing is predicted of this pipeline", hint="use start(..., sample=batch, optimizer=torch.optim.AdamW)"
            )
        return made_report(self.saving, self._meter, rank=dist.get_rank(), budget=self._budget)

    def _measured(self, *given: torch.Tensor) -> AbstractContextManager[None]:
        return self._meter.measured(STEP, given) if self._meter is not None else nullcontext()

    def there(self) -> Iterator[torch.Tensor]:
        """What is on the device between steps, as far as it is known here."""
        away = {id(p) for own in self._place.values() for p in own}
        for module in self.modules.values():
            yield from (t for t in (*module.parameters(), *module.buffers()))
        yield from (p.grad for p in self.parameters() if p.grad is not None)
        for rule in self._updating:
            every = ((p, t) for p, state in rule.state.items() for t in state.values() if isinstance(t, torch.Tensor))
            yield from (t for p, t in every if id(p) not in away or not t.dim())

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
        with self._measured(inputs, targets):
            return self._step(inputs, targets)

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self._runtimes:
            with ends_with_the_others(self._group):
                self.mesh.refuse_other_batches((inputs, targets))
                self.mesh.share_random_numbers(self._device)
        if (self._place or self._rule is not None) and not self._updating:
            raise InvalidInput(
                "`start` was told of an optimizer, or of states to `place`, but no optimizer has been made",
                hint="use optimizer = pipe.optimizer(), or pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters))",
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
        with ends_with_the_others(group), self._measured():
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


def start(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    loss: Loss,
    group: Any = None,
    mesh: Mapping[str, int] | Mesh | str | None = None,
    sample: Any = None,
    **asked: Any,
) -> PipeRun:
    """See `holdall.pipelines.start`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInput(
            "there is no process group to run a pipeline on",
            hint='start with `torchrun --nproc-per-node 4` and `torch.distributed.init_process_group("gloo")`',
        )
    if isinstance(mesh, str):
        given = choose(model, loss, mesh, group=group, sample=sample, **asked)
    else:
        given = {**asked, "group": group, "mesh": mesh, "sample": sample}
    plan = together(lambda: made_plan(model, **given))
    plan.mesh.connect(plan.device)
    run = together(lambda: PipeRun(model, plan, loss))
    if run.saving is not None:
        run.saving.agree()
    return run
