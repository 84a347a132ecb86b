"""Chooses a pipeline for the ranks that run: `start(..., mesh="auto", budget=)`.

Rank 0 tries every piece of the model, for seconds and bytes, and all ranks a sum, for the network. The search of `holdall plan
--search auto` (`pipelines/searches/auto.py`) ranks plans of `pp` x `dp` by simulated seconds; the first of them that `start`
runs, and whose every rank keeps the budget by the prediction that `start` itself makes, is the one for all ranks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import HoldallError, Infeasible, InvalidInput, unknown_name
from holdall.parallel.agree import from_first, together
from holdall.pipelines.hybrid.layers import HybridLayer, HybridModel, StateBytes, Work
from holdall.pipelines.hybrid.plans import HybridPlan
from holdall.pipelines.hybrid.starting import start_arguments
from holdall.pipelines.hybrid.strategies import DDP, Pricing, SearchSpace
from holdall.pipelines.meshes import Cluster
from holdall.pipelines.running.budget.rank_choice import RankChoice
from holdall.pipelines.running.budget.rule_bytes import RuleBytes
from holdall.pipelines.running.budget.saved import KEEP
from holdall.pipelines.running.budget.trial import StageTrial, as_before, try_stage
from holdall.pipelines.running.pieces import check_whole, pieces_of
from holdall.pipelines.running.stage_ranks.divided import evaluated, sample_of
from holdall.pipelines.running.starting import device_of, made_plan
from holdall.pipelines.searches.auto import AutoMesh
from holdall.runtime.budget.meter import bytes_outside
from holdall.types.mesh import Network
from holdall.units import format_bytes, format_seconds, parse_bytes

AUTO = "auto"
_CHOSEN: dict[str, Any] = {"schedule": "1f1b", "cut": None, "shard": "ddp", "replicas": None}  # and what they are by default
log = logging.getLogger("holdall")
_TRIED = 8  # plans whose ranks are predicted, of either kind
_PLENTY = 1 << 60  # bytes
_SENT = 1 << 20  # elements of the sum by which the network is measured


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the search is for."""

    model: Any
    pieces: list[torch.nn.Module]
    loss: Any
    sample: tuple[torch.Tensor, torch.Tensor]  # the batch of all ranks
    optimizer: Any
    budget: int
    micro_batches: int | None  # None: any number
    device: torch.device
    given: dict[str, Any]  # other arguments

    def arguments(self, found: dict[str, Any]) -> dict[str, Any]:
        """With those that were found."""
        rows = len(self.sample[0]) // found["mesh"].get("dp", 1)
        return {**self.given, **found, "sample": tuple(t[:rows] for t in self.sample)}


def choose(model: Any, loss: Any, mesh: str, *, sample: Any, **asked: Any) -> dict[str, Any]:
    """Arguments for a plan, the same on all ranks but for the sample, of which each takes what a replica of the plan has."""
    wanted = together(lambda: _wanted(model, loss, mesh, sample=sample, **asked))
    network = measured_network(wanted.device)
    found, said = from_first(lambda: _search(wanted, network))
    if dist.get_rank() == 0:
        log.warning("holdall: %s", said)
    return wanted.arguments(found)


def _wanted(
    model: Any,
    loss: Any,
    mesh: str,
    *,
    sample: Any,
    budget: str | int | None = None,
    optimizer: Any = None,
    micro_batches: int | None = None,
    **asked: Any,
) -> Wanted:
    if mesh != AUTO:
        raise unknown_name("mesh", mesh, [AUTO])
    named = [name for name in _CHOSEN if asked.get(name, _CHOSEN[name]) != _CHOSEN[name]]
    if named or asked.get("recompute") is not None or asked.get("group") is not None:
        what = named[0] if named else "recompute" if asked.get("recompute") is not None else "group"
        raise InvalidInput(f'mesh="auto" chooses what `{what}` says, for all ranks', hint="leave one of them out")
    if budget is None or optimizer is None or sample is None:
        raise InvalidInput(
            'mesh="auto" looks for a pipeline that keeps a budget, of a batch and an optimizer',
            hint='pass budget="20GiB", sample=(inputs, targets) of all ranks, and optimizer=torch.optim.AdamW',
        )
    pieces = pieces_of(model)
    check_whole(model, pieces)
    device = device_of(pieces)
    whole = sample_of(sample, 1, device)
    if len(whole[0]) < dist.get_world_size():
        raise InvalidInput(
            f"the sample has {len(whole[0])} rows for {dist.get_world_size()} ranks",
            hint="pass the batch of all ranks together",
        )
    given = {**asked, "optimizer": optimizer, "budget": budget}
    return Wanted(
        model=model, pieces=pieces, loss=loss, sample=whole, optimizer=optimizer, budget=parse_bytes(budget),
        micro_batches=micro_batches, device=device, given=given,
    )  # fmt: skip


def _search(wanted: Wanted, network: Network) -> tuple[dict[str, Any], str]:
    model, cluster = _model(wanted), _cluster(wanted, network)
    space = SearchSpace(most_tensor=1, least_pipes=2, ways=(DDP,) if wanted.given.get("place") else SearchSpace().ways)
    smallest: list[int] = []  # of plans that do not fit
    for plan in _plans(wanted, model, cluster, space):
        given = start_arguments(plan, wanted.pieces)
        given.pop("recompute", None)  # the budget decides anew
        need = _needed(given, wanted)
        if need is not None and need <= wanted.budget:
            return given, _said(plan, given, need, wanted, Pricing(model, cluster, space), len(smallest))
        smallest += [need] if need is not None else []
    if not smallest:
        raise Infeasible(
            f"no pipeline of {dist.get_world_size()} ranks was found for {len(wanted.pieces)} pieces and these rows",
            hint="use fewer ranks, another number of rows or `micro_batches`, or name a mesh",
        )
    raise Infeasible(
        f"the {len(smallest)} pipelines that were tried take {format_bytes(min(smallest))} at least on a rank, more than "
        f"{format_bytes(wanted.budget)}",
        hint=f"use a budget of {min(smallest):,} bytes or more, or offload=True, or place=True",
        smallest=min(smallest),
    )


def _plans(wanted: Wanted, model: HybridModel, cluster: Cluster, space: SearchSpace) -> Iterator[HybridPlan]:
    """The fastest of those that fit by the search's formulas, and then the smallest of all."""
    for memory in (cluster.memory, _PLENTY):
        plans = AutoMesh().ranked(Pricing(model, replace(cluster, memory=memory), space), lambda plan: _runs(plan, wanted))
        if memory == _PLENTY:
            plans.sort(key=lambda plan: plan.peak)
        yield from plans[:_TRIED]


def _runs(plan: HybridPlan, wanted: Wanted) -> bool:
    try:
        return wanted.micro_batches in (None, plan.micro_batches) and "mesh" in start_arguments(plan, wanted.pieces)
    except HoldallError:
        return False


def _needed(given: dict[str, Any], wanted: Wanted) -> int | None:
    """The most bytes that a rank of the pipeline needs, when it does all for the budget that it may; None: it does not run."""
    try:
        plan = made_plan(wanted.model, **wanted.arguments(given))
    except HoldallError:
        return None
    assert plan.sample is not None
    before, most = evaluated(plan.pieces, plan.sample[0]), 0
    for rank in range(plan.made.ranks):
        modules = {s: torch.nn.Sequential(*plan.pieces[slice(*plan.cut(s))]) for s in plan.made.stages_of(rank)}
        choice = RankChoice(plan, modules, rank, before, wanted.loss)
        most = max(most, max(choice.parts.values()) + bytes_outside(plan.device) if choice.fits else choice.smallest)
    return most


# what is told


def _mesh_text(given: dict[str, Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in given["mesh"].items())


def _said(plan: HybridPlan, given: dict[str, Any], need: int, wanted: Wanted, pricing: Pricing, refused: int) -> str:
    alone = _one_stage(pricing)
    shard = given.get("shard", "ddp")
    words = [
        f"{_mesh_text(given)} by {given['schedule']}, micro_batches={given['micro_batches']}, stages begin at {given['cut']}",
        *([f"shard={shard if isinstance(shard, str) else 'by piece'}"] if plan.strategies[0].data > 1 else []),
        f"{format_bytes(need)} of {format_bytes(wanted.budget)} on the fullest rank",
        f"simulated {format_seconds(plan.seconds)} a step"
        + (f", the fastest but {refused} that do not fit" if refused else ", the fastest that runs"),
    ]
    if alone is not None and alone.seconds < plan.seconds:
        words.append(
            f'without a pipeline {format_seconds(alone.seconds)} are simulated: try fit(mesh={{"dp": {dist.get_world_size()}}})'
        )
    return "; ".join(words)


def _one_stage(pricing: Pricing) -> HybridPlan | None:
    """The fastest plan without a pipeline that fits by the search's formulas."""
    space = replace(pricing.space, least_pipes=1, most_pipes=1)
    plans = AutoMesh(schedules=()).ranked(Pricing(pricing.model, pricing.cluster, space), lambda plan: plan.pipes == 1)
    return next((plan for plan in plans if plan.peak <= pricing.cluster.memory), None)


# what is measured


def _model(wanted: Wanted) -> HybridModel:
    """The pieces as layers, by trials of one row and of a rank's share of the rows."""
    rows = len(wanted.sample[0])
    many = max(2, rows // dist.get_world_size())
    sizes = [(size, *_tried(wanted, size)) for size in (1, min(rows, many))]
    trials = sizes[-1][1]
    rule = RuleBytes(wanted.optimizer, _parameters(wanted.pieces))
    numbers = max(1, sum(p.numel() for p in _parameters(wanted.pieces)))
    width = max(p.element_size() for p in _parameters(wanted.pieces))
    held = rule.on_device(())[0] / numbers
    return HybridModel(
        layers=tuple(
            _layer(piece, sizes[-1][0], trial, [(size, seconds[n]) for size, _, seconds in sizes])
            for n, (piece, trial) in enumerate(zip(wanted.pieces, trials, strict=True))
        ),
        batch=rows,
        states=StateBytes(held=round(held), gradient=width, copy=width),
    )


def _tried(wanted: Wanted, rows: int) -> tuple[list[StageTrial], list[tuple[float, float]]]:
    """Of every piece, the loss with the last: its trial, and seconds of its forward and backward."""
    inputs, targets = (t[:rows] for t in wanted.sample)
    before = evaluated(wanted.pieces, inputs)
    trials, seconds = [], []
    for n, piece in enumerate(wanted.pieces):
        loss = wanted.loss if n == len(wanted.pieces) - 1 else None
        given = torch.utils._pytree.tree_map_only(torch.Tensor, _leaf if n else torch.Tensor.detach, before[n])
        stage = torch.nn.Sequential(piece)
        trials.append(try_stage(stage, given, wanted.device, loss, targets if loss is not None else None))
        with as_before(stage, wanted.device):
            seconds.append(_seconds(stage, given, loss, targets, wanted.device))
    return trials, seconds


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.is_floating_point())


def _seconds(stage: torch.nn.Module, given: Any, loss: Any, targets: Any, device: torch.device) -> tuple[float, float]:
    """Of a forward and a backward, the second of two."""
    found = (0.0, 0.0)
    for _ in range(2):
        began = _now(device)
        out = stage(given)
        end = out if loss is None else loss(out, targets)
        ahead = _now(device)
        wanted = [t for t in torch.utils._pytree.tree_leaves(end) if isinstance(t, torch.Tensor) and t.requires_grad]
        inputs = [t for t in (*_tensors(given), *stage.parameters()) if t.requires_grad]
        if wanted and inputs:
            torch.autograd.grad(wanted, inputs, [torch.ones_like(t) for t in wanted], allow_unused=True)
        found = ahead - began, _now(device) - ahead
    return found


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return (t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _layer(
    piece: torch.nn.Module, rows: int, trial: StageTrial, seconds: Sequence[tuple[int, tuple[float, float]]]
) -> HybridLayer:
    saved = {key: nbytes for layer in trial.layers for key, nbytes in layer.held(KEEP).items()}
    passing = max(layer.passing.backward for layer in trial.layers)
    return HybridLayer(
        forward=(_work([(size, ahead) for size, (ahead, _) in seconds]),),
        backward=(_work([(size, back) for size, (_, back) in seconds]),),
        parameters=sum(p.numel() for p in piece.parameters()),
        output=sum(trial.outputs.values()) // rows,
        activations=sum(saved.values()) // rows,
        working=passing // rows,
    )


def _work(seconds: Sequence[tuple[int, float]]) -> Work:
    """A straight line through the seconds of few and of many rows."""
    (few, short), (many, long) = seconds[0], seconds[-1]
    each = max(0.0, long - short) / max(1, many - few)
    return Work(moving=each, weights=max(0.0, short - few * each), divided=False)


def _parameters(pieces: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return list(torch.nn.ModuleList(pieces).parameters())


def _cluster(wanted: Wanted, network: Network) -> Cluster:
    ranks = dist.get_world_size()
    near = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Cluster(
        devices=ranks,
        per_node=near if ranks % near == 0 else ranks,
        memory=wanted.budget - bytes_outside(wanted.device),
        rate=0.0,
        inside=network,
        between=network,
    )


def measured_network(device: torch.device) -> Network:
    """What joins the ranks, by a short and a long sum over all of them; all ranks come here."""
    ranks = dist.get_world_size()
    seconds = []
    for count in (1, _SENT):
        sent = torch.zeros(count, device=device)
        dist.all_reduce(sent)
        began = _now(device)
        dist.all_reduce(sent)
        seconds.append(_now(device) - began)
    share = 2 * (ranks - 1) / ranks * 4 * _SENT  # of the long sum, over each link of a ring
    rate = max(1.0, share / max(1e-9, seconds[1] - seconds[0]))
    return Network(name="measured", rate=rate, latency=max(1e-9, seconds[0] / max(1, 2 * (ranks - 1))))
