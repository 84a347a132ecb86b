"""Checks, in the graph of a divided model's loss, that gradients are added up over the ranks where they are parts, and there
alone. Values of a forward do not show it: a tensor that all ranks have, and that each uses for its own part of the model, has a
part of its gradient on each.

A gradient is whole on every rank, or a part, whose sum over the ranks is the gradient. The loss's is whole. Backward through an
operation that joined the ranks' parts, it becomes a part, and whole again where parts are added up:

    Summed, Gathered, _TotalOfRanks        whole -> part
    a loss over divided words              whole -> part
    Copied, Averaged, Scattered            part -> whole
    Gathered and Scattered of sums         part -> part

Any other operation hands on what it gets, and must get the same kind from all who use its results. A parameter that all ranks
have must end with the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdall.errors import Unsupported

WHOLE, PART = "whole", "part"
_CHANGES = {
    "SummedBackward": (WHOLE, PART),
    "_TotalOfRanksBackward": (WHOLE, PART),
    "_ChunkedLossBackward": (WHOLE, PART),
    "CopiedBackward": (PART, WHOLE),
    "AveragedBackward": (PART, WHOLE),
}
_OF_SUMS = (PART, PART)


class PartialSums(Unsupported):
    """A gradient is added up that is no part, or a part that is not."""


def check_sums(loss: torch.Tensor, group: Any, dim: str) -> None:
    """Of a loss that ranks of one group have computed together. `dim`: the group's dimension of the mesh."""
    kinds: dict[Any, set[str]] = {loss.grad_fn: {WHOLE}}
    for node in _in_order(loss.grad_fn):
        found = kinds.pop(node)
        if node.name() == "CheckpointFunctionBackward":
            raise Unsupported(
                f"the model recomputes a part of itself by a reentrant checkpoint, which hides whether gradients over `{dim}` "
                "are added up rightly",
                hint="call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or leave it to the plan",
            )
        takes, gives = _change(node, group)
        if len(found) > 1 or (takes is not None and found != {takes}) or (found == {PART} and _is_replicated(node, dim)):
            raise PartialSums(
                f"the loss has a term, or the model a tensor, whose gradients are not sums over the ranks of `{dim}` "
                f"({node.name()}): a term of parameters alone, one that balances the loads of experts, or what heads of "
                "attention share",
                hint='leave such a term out (output_router_logits=False), or use mesh={"dp": ...}, which leaves computation as '
                "it is",
            )
        (kind,) = found
        for before, _ in node.next_functions:
            if before is not None:
                kinds.setdefault(before, set()).add(gives or kind)


def _change(node: Any, group: Any) -> tuple[str | None, str | None]:
    """The kind of gradient that an operation must get, and the kind that it hands on; None: any, and the same."""
    name = node.name()
    if getattr(node, "group", None) != group:
        return None, None
    if name == "GatheredBackward":
        return _OF_SUMS if node.partial else (WHOLE, PART)
    if name == "ScatteredBackward":
        return _OF_SUMS if node.partial else (PART, WHOLE)
    return _CHANGES.get(name, (None, None))


def _is_replicated(node: Any, dim: str) -> bool:
    """Is it where modules take a parameter that all ranks of the dimension have?"""
    spec = getattr(node, "dtensor_spec", None)
    if spec is None:
        return False
    names = spec.mesh.mesh_dim_names or ()
    return dim in names and bool(spec.placements[names.index(dim)].is_replicate())


def _in_order(end: Any) -> Iterator[Any]:
    """The nodes of a graph, each after all who use its results."""
    users: dict[Any, int] = {end: 0}
    left = [end]
    while left:
        for before, _ in left.pop().next_functions:
            if before is not None:
                if before not in users:
                    left.append(before)
                users[before] = users.get(before, 0) + 1
    ready = [end]
    while ready:
        node = ready.pop()
        yield node
        for before, _ in node.next_functions:
            if before is not None:
                users[before] -= 1
                if not users[before]:
                    ready.append(before)
