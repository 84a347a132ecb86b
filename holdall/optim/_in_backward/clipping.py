"""The exact global norm where gradients live for a moment, and the loop's own `backward`, which finding it needs.

Two ways. "hold": gradients stay until this backward is over (as many bytes as gradients take, no time), and are then clipped
and used up one by one. "twice": `loss.backward()` walks the graph once for the norm, each gradient becoming a number at once,
and a second time to update (one more backward; activations live through both).

The norm has the bits of `clip_grad_norm_` over the same parameters in the same order: those of the optimizer's groups.
While somebody watches, `Tensor.backward` goes through here (`_interception`).
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
    """Refuse what is not a way to clip, and pairs that make no sense."""
    if clip is not None and clip not in WAYS:
        raise InvalidInput(f"`clip` is {clip!r}", hint='give "twice" (a second backward) or "hold" (gradients are held)')
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidInput(f"`accumulate` is {accumulate!r}, but must be a whole number above 0", hint="backwards per step")
    if clip == "twice" and accumulate > 1:
        raise InvalidInput(
            f"the gradients of {accumulate} backwards are held anyway: a second walk would save nothing", hint='use clip="hold"'
        )


# the norm


def norm_of(grad: Tensor, *, wide: bool) -> Tensor:
    """Of one gradient, as `clip_grad_norm_` takes it. `wide`: in 32 bits at least, where that is not to be had in fewer."""
    dtype = torch.promote_types(grad.dtype, torch.float32) if wide else grad.dtype
    if type(grad) is Tensor:
        alone: Tensor = torch._foreach_norm([grad], dtype=dtype)[0]
        return alone
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=dtype)
    return norm


def total_norm(params: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
    """Of all gradients, from the norms of each, added up in torch's order: by device and precision."""
    grouped = _group_tensors_by_device_and_dtype([list(params)], with_indices=True)  # type: ignore[list-item]
    order = [n for _, places in grouped.values() for n in places]
    home = params[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norms[n].to(home) for n in order]))
    return total


def coefficient(limit: float, norm: Tensor) -> Tensor:
    """What gradients are multiplied by; 1 where they are short enough, as torch has it."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


# the loop's backward


class NormWatcher(Protocol):
    """Who wants to know of the loop's backwards."""

    def begin(self) -> None:
        """A backward of the loop is about to begin."""
        ...

    def wants_norm(self) -> bool:
        """Whether this backward is to be walked once before for the norm."""
        ...

    def gathering(self) -> AbstractContextManager[None]:
        """A context for that walk."""
        ...

    def params(self) -> Iterator[Tensor]: ...

    def end(self) -> None:
        """It is over, without an error."""
        ...


_first_pass = False  # under way: nobody updates, and nobody else's gradients count


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
    """A walk that leaves nothing behind: other leaves get their gradients in the second one."""
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
    """Every leaf that a backward from here brings a gradient to, as far as the graph shows."""
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
    """Under a plan the graph is for one walk: what was recomputed or fetched for a first one would stay for the second."""
    for model in list(PLANNED):
        if any(id(p) in own for p in model.parameters()):
            raise Unsupported(
                'under a plan a graph is walked once, and clip="twice" needs two walks',
                hint='use clip="hold", or `optimizer.step(closure)`, which runs the forward again too',
            )
