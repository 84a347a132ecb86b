"""A part of an optimizer: the user's own update rule over some of its parameters, or over stand-ins for them.

Any `torch.optim` class that treats each parameter separately can be split: the same class runs over a subset, with the
hyperparameters of the user's groups and a given state. So no update rule is implemented here.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from holdall.types.layout import ELEMENTWISE_NAMES, PIECE

Groups = list[dict[str, Any]]

ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in ELEMENTWISE_NAMES)
_WHOLE = frozenset({torch.optim.LBFGS})  # rules that combine all parameters


def clone_optimizer(
    optimizer: torch.optim.Optimizer, replace: Mapping[int, torch.Tensor], *, foreach: bool
) -> torch.optim.Optimizer:
    """The same optimizer over other parameters, without state and without the user's hooks.

    `foreach`: choose the multi-tensor form if the user left the choice open, as torch does on a GPU.
    """
    clone = copy.copy(optimizer)
    clone.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the original
    for name in ("grad_scale", "found_inf"):  # set by a GradScaler for one step; the engine has handled them
        clone.__dict__.pop(name, None)
    for name, value in list(clone.__dict__.items()):
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            clone.__dict__[name] = OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {**group, "params": [replace[id(p)] for p in group["params"] if id(p) in replace]} for group in optimizer.param_groups
    ]
    if foreach:
        for group in clone.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
    return clone


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Does updating parameters in parts give the same result as updating them together, as far as the class tells?"""
    return type(optimizer) not in _WHOLE


def snapshot(optimizer: torch.optim.Optimizer) -> Groups:
    """The current hyperparameters of every group, without the parameters: a scheduler may change them later."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


class Part:
    """The update rule over `params`, some of the optimizer's own. Parameters that it does not train are skipped."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
        where = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._group = [where.get(id(p), -1) for p in params]
        self._clone = clone_optimizer(optimizer, {}, foreach=False)
        self.is_elementwise = type(optimizer) in ELEMENTWISE
        self.trained = [g >= 0 for g in self._group]

    def by_group(self, which: Sequence[int]) -> dict[int, list[int]]:
        """Index of the optimizer's group -> positions in `which`."""
        found: dict[int, list[int]] = {}
        for at, n in enumerate(which):
            found.setdefault(self._group[n], []).append(at)
        return found

    def step(
        self,
        values: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        groups: Groups,
        which: Sequence[int],
    ) -> None:
        """Update `values` in place; entry n belongs to the parameter `which[n]`. Empty states are filled in."""
        clone = self._clone
        members: dict[int, list[torch.Tensor]] = {}
        state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for n, value, grad, own in zip(which, values, grads, states, strict=True):
            members.setdefault(self._group[n], []).append(value)
            value.grad = grad
            if own:
                state[value] = own
        clone.state = state  # type: ignore[assignment]
        clone.param_groups = [{**groups[g], "params": listed} for g, listed in members.items()]
        try:
            clone.step()
        finally:
            for value, own in zip(values, states, strict=True):
                value.grad = None
                if value in state:
                    own.update(state[value])
            clone.state, clone.param_groups = defaultdict(dict), []

    def update(
        self,
        values: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        groups: Groups,
        which: Sequence[int],
        *,
        scale: torch.Tensor | None = None,
        narrow: Sequence[torch.Tensor] | None = None,
        sliced: bool = False,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Update with gradients of any dtype, multiplied by `scale`; `narrow` receives the new values in its own dtype.

        The gradients may be overwritten. `sliced`: if they must be widened first, a large parameter is updated in slices.
        `scratch`: memory for the widened gradients; otherwise it is allocated and freed.
        """
        widened = any(g.dtype != v.dtype for g, v in zip(grads, values, strict=True))
        for value, grad, state, members in _pieces(
            values, grads, states, which, sliced and self.is_elementwise, widened=widened
        ):
            wide = _widen(grad, value, scratch)
            if scale is not None:
                torch._foreach_mul_(wide, scale.to(wide[0].device, non_blocking=True))
            self.step(value, wide, state, groups, members)
        if narrow is not None:
            torch._foreach_copy_(list(narrow), list(values))


def _widen(grads: Sequence[torch.Tensor], values: Sequence[torch.Tensor], scratch: torch.Tensor | None) -> list[torch.Tensor]:
    """The gradients in the values' dtypes; unchanged where they already are."""
    if scratch is None and grads and grads[0].is_cuda and all(g.dtype != v.dtype for g, v in zip(grads, values, strict=True)):
        made = [torch.empty_like(value) for value in values]
        torch._foreach_copy_(made, list(grads))  # one launch for many
        return made
    wide, used = [], 0
    for grad, value in zip(grads, values, strict=True):
        if grad.dtype == value.dtype:
            wide.append(grad)
        elif scratch is None:
            wide.append(grad.to(value.dtype))
        else:
            room = scratch[used : used + value.numel()].view(value.shape)
            wide.append(room.copy_(grad))
            used += value.numel()
    return wide


_Piece = tuple[list[torch.Tensor], list[torch.Tensor], list[dict[str, Any]], list[int]]


def _pieces(
    values: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[dict[str, Any]],
    which: Sequence[int],
    sliced: bool,
    *,
    widened: bool,
) -> Iterator[_Piece]:
    """Everything at once or, if gradients must be widened, pieces small enough to keep the widened ones small."""
    if not widened:
        yield list(values), list(grads), list(states), list(which)
        return
    batch: _Piece = ([], [], [], [])
    size = 0
    for value, grad, state, n in zip(values, grads, states, which, strict=True):
        if value.numel() > PIECE and sliced and value.is_contiguous():
            yield from _slices(value, grad, state, n)
            continue
        if size and size + value.numel() > PIECE:
            yield batch
            batch, size = ([], [], [], []), 0
        batch[0].append(value)
        batch[1].append(grad)
        batch[2].append(state)
        batch[3].append(n)
        size += value.numel()
    if size:
        yield batch


def _slices(value: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], n: int) -> Iterator[_Piece]:
    """A large parameter in slices; counters advance once."""
    flat, flat_grad = value.detach().view(-1), grad.reshape(-1)
    before = dict(state)
    for begin in range(0, flat.numel(), PIECE):
        part: dict[str, Any] = {}
        for key, item in before.items():
            if isinstance(item, torch.Tensor):
                same = item.shape == value.shape
                part[key] = item.view(-1)[begin : begin + PIECE] if same else item.clone()
            else:
                part[key] = item
        yield [flat[begin : begin + PIECE]], [flat_grad[begin : begin + PIECE]], [part], [n]
        for key, item in part.items():  # after the step: states created by the first update, counters
            if isinstance(item, torch.Tensor) and item.numel() == min(PIECE, flat.numel() - begin) and item.dim():
                if key not in state:
                    state[key] = torch.empty_like(value, dtype=item.dtype)
                if key not in before:
                    state[key].view(-1)[begin : begin + PIECE].copy_(item)
            else:
                state[key] = item
