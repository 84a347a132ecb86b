"""The exact global gradient norm where each gradient is freed right after its update, and the interception of `backward` for
it.

Two ways. "hold": gradients are kept until the end of the backward (costs their bytes, no time), then clipped and applied one by
one. "twice": `loss.backward()` runs the backward once for the norm, reducing each gradient to a number at once, and a second
time to update (costs one more backward; activations are kept for both).

The norm is bitwise equal to that of `clip_grad_norm_` over the same parameters in the order of the optimizer's groups.
While a watcher is registered, `Tensor.backward` is intercepted (`updates/interception.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from holdall.errors import InvalidInput, Unsupported
from holdall.updates.interception import Interception, current_backward
from holdall.updates.planned import PLANNED

WAYS = ("twice", "hold")


def check_ways(clip: str | None, accumulate: int) -> None:
    """Check `clip` and `accumulate`, alone and together."""
    if clip is not None and clip not in WAYS:
        raise InvalidInput(f"`clip` is {clip!r}", hint='give "twice" (a second backward) or "hold" (gradients are held)')
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidInput(f"`accumulate` is {accumulate!r}, but must be a whole number above 0", hint="backwards per step")
    if clip == "twice" and accumulate > 1:
        raise InvalidInput(
            f'clip="twice" saves no memory with accumulate={accumulate}, which holds gradients anyway', hint='use clip="hold"'
        )


# the norm


def norm_of(grad: Tensor, *, wide: bool) -> Tensor:
    """The norm of one gradient, as `clip_grad_norm_` computes it. `wide`: in at least 32 bits."""
    dtype = torch.promote_types(grad.dtype, torch.float32) if wide else grad.dtype
    if type(grad) is Tensor:
        alone: Tensor = torch._foreach_norm([grad], dtype=dtype)[0]
        return alone
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=dtype)
    return norm


def total_norm(params: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients from their single norms, reduced in torch's order: by device and dtype."""
    grouped = _group_tensors_by_device_and_dtype([list(params)], with_indices=True)  # type: ignore[list-item]
    order = [n for _, places in grouped.values() for n in places]
    home = params[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norms[n].to(home) for n in order]))
    return total


def coefficient(limit: float, norm: Tensor) -> Tensor:
    """The factor that clips gradients to `max_norm`, as torch computes it; 1 if their norm is below it."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


# the loop's backward


class NormWatcher(Protocol):
    """An object that is told of the loop's backwards."""

    def begin(self) -> None:
        """Called before a backward of the loop."""
        ...

    def wants_norm(self) -> bool:
        """Does this backward need a first pass for the norm?"""
        ...

    def gathering(self) -> AbstractContextManager[None]:
        """A context for that first pass."""
        ...

    def params(self) -> Iterator[Tensor]: ...

    def end(self) -> None:
        """Called after a backward that raised no error."""
        ...


_first_pass = False  # running: no optimizer updates, and only gradients for the norm are recorded


def in_first_pass() -> bool:
    return _first_pass


def _backward(
    original: Callable[..., None],
    watching: list[NormWatcher],
    self: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if current_backward() >= 0 or _first_pass:  # not of the loop
        watching = []
    for watcher in watching:
        watcher.begin()
    wanting = [w for w in watching if w.wants_norm()]
    if wanting:
        own = {id(p): p for w in wanting for p in w.params()}
        _refuse_planned(own)
        with _only_for_norms(self, own, wanting):
            original(self, gradient, retain_graph=True, inputs=inputs)
    original(self, gradient, retain_graph, create_graph, inputs)
    for watcher in watching:
        watcher.end()


_method: Interception[NormWatcher] = Interception(Tensor, "backward", _backward)
watch_backward, unwatch_backward = _method.watch, _method.unwatch


@contextmanager
def _only_for_norms(root: Tensor, own: Collection[int], wanting: Sequence[NormWatcher]) -> Iterator[None]:
    """A backward without side effects: the gradients of all other leaves are restored after it."""
    global _first_pass
    others = [(leaf, leaf.grad) for leaf in _leaves(root) if id(leaf) not in own]
    for leaf, _ in others:
        leaf.grad = None
    _first_pass = True
    try:
        with ExitStack() as stack:
            for watcher in wanting:
                stack.enter_context(watcher.gathering())
            yield
    finally:
        _first_pass = False
        for leaf, grad in others:
            leaf.grad = grad


def _leaves(root: Tensor) -> list[Tensor]:
    """All leaves in the graph that a backward from here accumulates gradients in."""
    seen: set[Any] = set()
    found: list[Tensor] = []
    waiting = [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            found.append(node.variable)  # type: ignore[attr-defined]
        waiting += [following for following, _ in node.next_functions]
    return found


def _refuse_planned(own: dict[int, Tensor]) -> None:
    """A plan allows one backward per graph: tensors recomputed or fetched for a first one would stay for the second."""
    for model in list(PLANNED):
        if any(id(p) in own for p in model.parameters()):
            raise Unsupported(
                'clip="twice" needs two backwards over one graph, and a plan allows one',
                hint='use clip="hold", or `optimizer.step(closure)`, which runs the forward again too',
            )
