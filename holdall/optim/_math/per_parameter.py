"""The base of the optimizers in this folder: a step that updates each parameter on its own, in 32 bits, with checked options.

A rule gets the parameter's values and its gradient in the precision it computes in. For parameters of 16 bits these are
copies (4 bytes an element each) that live while that one parameter is updated; for others they are the tensors themselves.
Where a rule is elementwise, a large parameter is updated a slice at a time, which bounds the temporaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch

from holdall.errors import InvalidInput, Unsupported, unknown_name
from holdall.layers.int8_weight import Int8Weight
from holdall.updates.stretches import piece_of

_ON_GPU = 1 << 24  # elements of a stretch
State = dict[str, Any]  # of one parameter: tensors, numbers, strings, lists of numbers
Group = dict[str, Any]

# keys that torch and its schedulers write into groups, and a label for people
_FOREIGN = {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


class PerParameter(torch.optim.Optimizer):
    """Members define `_update`, `_bytes` (for `state_bytes`), and `_check` for the options of a group."""

    name: ClassVar[str]
    paper: ClassVar[str]
    exact: ClassVar[bool] = False
    consumes_gradients: ClassVar[bool] = False

    def __init__(self, params: Iterable[Any], options: dict[str, Any], unknown: dict[str, Any]) -> None:
        for option in unknown:
            raise unknown_name(f"option of {self.name}", option, options)
        super().__init__(params, options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; gradients are unchanged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    grad = self._gradient(p, group)
                    if grad is not None:
                        self._apply(p, _dense(grad, self.name), group)
        return loss

    def state_bytes(self, param: torch.Tensor) -> int:
        """Bytes of state that updates of `param` allocate; nothing for one that is not trained."""
        return self._bytes(param, self._group_of(param)) if param.requires_grad else 0

    def is_by_element(self, param: torch.Tensor) -> bool:
        """Is `param` updated elementwise, or in small blocks?"""
        return bool(self._alone(self._group_of(param)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for option in param_group:
            if option not in self.defaults and option not in _FOREIGN:
                raise unknown_name(f"option of {self.name}", option, self.defaults)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_numbers(group)
            self._refuse_codes(group)
            self._check(group)
        except (InvalidInput, Unsupported):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, but states keep their dtype: torch would convert them to the parameter's, codes included."""
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, p in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and key != "step":
                    self.state[p][key] = value.to(p.device)

    def _gradient(self, p: torch.Tensor, group: Group) -> torch.Tensor | None:  # noqa: ARG002
        return p.grad

    def _apply(self, p: torch.Tensor, grad: torch.Tensor, group: Group) -> None:
        """Update `p` in the precision of the computation, and round once at the end."""
        dtype = compute_dtype(p)
        alone = self._alone(group)
        coded = isinstance(p, Int8Weight)
        if alone and not coded and p.numel() > piece_of(p.device, on_gpu=_ON_GPU) and p.is_contiguous():
            self._apply_by_stretches(p, grad, group, alone)
            return
        value = p.decoded(dtype) if isinstance(p, Int8Weight) else p if p.dtype == dtype else p.to(dtype)
        self._update(value, grad.to(dtype), self.state[p], group)
        if value is not p:
            p.copy_(value)

    def _apply_by_stretches(self, p: torch.Tensor, grad: torch.Tensor, group: Group, keys: Sequence[str]) -> None:
        state, dtype = self.state[p], compute_dtype(p)
        for key in keys:
            if key not in state:
                state[key] = torch.zeros(p.shape, dtype=dtype, device=p.device)
        values, grads = p.detach().view(-1), grad.reshape(-1)
        shaped = {key: state[key].view(-1) for key in keys}
        others = {key: kept for key, kept in state.items() if key not in shaped}
        length = piece_of(p.device, on_gpu=_ON_GPU)
        for begin in range(0, p.numel(), length):
            here = slice(begin, begin + length)
            part = {**others, **{key: kept[here] for key, kept in shaped.items()}}
            value = values[here].to(dtype)  # the values themselves where they are wide
            self._update(value, grads[here].to(dtype), part, group)
            if p.dtype != dtype:
                values[here].copy_(value)
        state.update({key: kept for key, kept in part.items() if key not in shaped})

    def _alone(self, group: Group) -> Sequence[str]:  # noqa: ARG002
        """If the rule is elementwise in this group: the names of the states that it updates in place, each in the parameter's
        shape."""
        return ()

    def _update(self, value: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        """Update `value` in place. `grad` is only read; a missing state is created."""
        raise NotImplementedError

    def _bytes(self, p: torch.Tensor, group: Group) -> int:
        raise NotImplementedError

    def _check(self, group: Group) -> None:
        """Raise if the rule does not support the parameters or options of a new group."""

    def _refuse_codes(self, group: Group) -> None:
        """Raise for 8-bit weights: a rule that accesses a parameter's memory would find codes there."""
        decodes = type(self)._apply is PerParameter._apply and not getattr(self, "forward_only", False)
        if not decodes and any(isinstance(p, Int8Weight) for p in group["params"]):
            raise Unsupported(f"{self.name} does not train weights of 8 bits", hint="use `holdall.optim.galore.GaLore`")

    def _group_of(self, param: torch.Tensor) -> Group:
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                return group
        raise InvalidInput(
            f"a parameter of shape {tuple(param.shape)} does not belong to this optimizer",
            hint="call `optimizer.add_param_group({'params': [parameter]})`",
        )


def compute_dtype(p: torch.Tensor) -> torch.dtype:
    """The dtype of the computation and of the state: float32, or the parameter's if that is wider."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def number_seeds(optimizer: PerParameter, group: Group) -> None:
    """Give each parameter of a new group its own seed by its index, the same on every rank; it is kept in the state."""
    before = sum(len(g["params"]) for g in optimizer.param_groups) - len(group["params"])
    for place, p in enumerate(group["params"], before + 1):
        if p.requires_grad:
            optimizer.state[p]["seed"] = group["seed"] + place


def seed_of(state: State, group: Group) -> int:
    """The parameter's own seed; the group's if the state has none."""
    return int(state.get("seed") or group["seed"])


def rms(x: torch.Tensor) -> torch.Tensor:
    """The root mean square as a tensor, without synchronising with the device."""
    norm: torch.Tensor = torch.linalg.vector_norm(x)
    return norm / math.sqrt(max(1, x.numel()))


def clip_rms_(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Shrink in place so that the root mean square is at most `threshold`."""
    return x.div_((rms(x) / threshold).clamp_(min=1.0))


def _dense(grad: torch.Tensor, name: str) -> torch.Tensor:
    if grad.layout != torch.strided:
        hint = "make the gradient dense: `nn.Embedding(..., sparse=False)`"
        raise InvalidInput(f"{name} does not take sparse gradients", hint=hint)
    if grad.is_complex():
        raise InvalidInput(f"{name} does not take complex parameters", hint="train their real view: `torch.view_as_real`")
    return grad


def _check_numbers(group: Group) -> None:
    """Check the bounds of options that many rules have."""
    for key in ("lr", "weight_decay"):
        if key in group and not float(group[key]) >= 0:
            raise InvalidInput(f"`{key}` is {group[key]}, but must not be below 0", hint=f"give {key} as 0 or more")
    for beta in group.get("betas", ()):
        if not 0 <= beta < 1:
            raise InvalidInput(f"`betas` holds {beta}, but a beta is at least 0 and below 1", hint="usual: (0.9, 0.999)")
    for key in ("rank", "update_proj_gap", "kappa"):
        count = group.get(key)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise InvalidInput(f"`{key}` is {count!r}, but must be a whole number above 0", hint=f"give {key} as 1 or more")
