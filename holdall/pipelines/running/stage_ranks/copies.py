"""Parameters that several ranks of one pipeline have: weights that stages share, such as a head that is the embedding, and
stages with two copies. Each rank has a copy of its own; gradients are added up after the last micro-batch, in the same order on
all of them, so that equal copies stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from holdall.errors import Unsupported
from holdall.pipelines.pipeline import ONE, Pipeline


@dataclass(frozen=True)
class Tied:
    """A parameter that stages share, with the ranks of the pipeline that have it."""

    parameter: torch.nn.Parameter
    name: str
    ranks: tuple[int, ...]


def tied_over_ranks(pieces: Sequence[torch.nn.Module], bounds: Sequence[int], made: Pipeline) -> list[Tied]:
    """In the order of the pieces, which is the same on all ranks. One rank that has all stages of a parameter has it once."""
    found: dict[int, tuple[torch.nn.Parameter, str]] = {}
    stages: dict[int, list[int]] = {}
    for stage, (low, high) in enumerate(pairwise(bounds)):
        for piece in pieces[low:high]:
            for name, p in piece.named_parameters():
                found.setdefault(id(p), (p, name))
                stages.setdefault(id(p), []).append(stage)
    ranks = {key: tuple(sorted({made.rank_of[stage] for stage in there})) for key, there in stages.items()}
    shared = [Tied(*found[key], there) for key, there in ranks.items() if len(set(stages[key])) > 1]
    if shared and (made.weights != ONE or made.copies > 1):
        raise Unsupported(
            f"the parameter `{shared[0].name}` is shared by stages, of which `{made.name}` has several versions or copies",
            hint="use a schedule with one, such as 1f1b, or untie the weights (tie_word_embeddings=False)",
        )
    return shared


def refuse_divided(tied: Sequence[Tied], *, is_whole: bool, dividing: str) -> None:
    """Stages that share a parameter have it whole."""
    if tied and (not is_whole or dividing not in ("", "cp")):
        raise Unsupported(
            f"the parameter `{tied[0].name}` is shared by stages, which have it whole",
            hint='use shard="ddp" and a mesh of `pp`, `dp` and `cp`, or untie the weights (tie_word_embeddings=False)',
        )


def add_tied(tied: Sequence[Tied], rank: int, group: Any) -> None:
    """Add the gradients of shared parameters over the ranks that have them."""
    for one in tied:
        others = [other for other in one.ranks if other != rank]
        if rank not in one.ranks or not others or not one.parameter.requires_grad:
            continue
        own = _flat([one.parameter])
        each = {rank: own} | {other: torch.empty_like(own) for other in others}
        _exchange([(own, each[other], other) for other in others], group)
        total = each.pop(one.ranks[0]).clone()
        for other in one.ranks[1:]:
            total += each[other]
        one.parameter.grad = total.view_as(one.parameter)


def holders_of(tied: Sequence[Tied]) -> dict[int, int]:
    """By the identity of a parameter: ranks of a pipeline that have it."""
    return {id(one.parameter): len(one.ranks) for one in tied}


def add_twins(modules: Mapping[int, torch.nn.Module], made: Pipeline, rank: int, group: Any) -> None:
    """Add the gradients of the same layers on the rank that has their other copy."""
    (down, up) = (modules[stage] for stage in sorted(modules))
    peer = made.ranks - 1 - rank
    trained = [[p for p in module.parameters() if p.requires_grad] for module in (down, up)]
    mine = [_flat(parameters) for parameters in trained]
    theirs = [torch.empty_like(mine[1]), torch.empty_like(mine[0])]
    _exchange([(sent, received, peer) for sent, received in zip(mine, theirs, strict=True)], group)
    for parameters, own, other in zip(trained, mine, reversed(theirs), strict=True):
        total = own + other
        at = 0
        for p in parameters:
            p.grad = total[at : at + p.numel()].view_as(p).clone()
            at += p.numel()


def _exchange(messages: Sequence[tuple[torch.Tensor, torch.Tensor, int]], group: Any) -> None:
    """What is sent, where what comes is put, and the other rank of the group."""
    work = []
    for sent, received, peer in messages:
        there = peer if group is None else dist.get_global_rank(group, peer)
        work += [dist.P2POp(dist.isend, sent, there, group), dist.P2POp(dist.irecv, received, there, group)]
    for done in dist.batch_isend_irecv(work):
        done.wait()


def _flat(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
