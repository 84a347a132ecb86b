"""Steps of loops that call submodules directly: `model.decode(model.encode(x))`, or a GAN with two halves in one module.

Usually a step begins with a call of the model. If a block, or a module that contains blocks, is called outside of one, the step
begins there; the owner is told before the submodule's forward and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch


class Steps(Protocol):
    """The owner that is told."""

    def begin_part(self, args: Any, kwargs: Any) -> tuple[Any, Any]: ...

    def end_part(self, *, failed: bool) -> None: ...


class Parts:
    """Knows whether the model's own forward is running, or which submodule's."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._calls = 0  # running calls of the model: some models call themselves
        self._entered: torch.nn.Module | None = None

    def enter_model(self) -> None:
        self._calls += 1

    def leave_model(self) -> None:
        self._calls = max(0, self._calls - 1)

    def reset(self) -> None:
        """Assume that nothing is running."""
        self._calls, self._entered = 0, None

    def watch(self, model: torch.nn.Module, calls: Iterable[str]) -> list[Callable[[], object]]:
        """Hook the modules that contain blocks; returns the undo functions."""
        undo: list[Callable[[], object]] = []
        for module in holders(model, calls):
            undo.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True).remove)
            undo.append(module.register_forward_hook(self._exit, always_call=True).remove)
        return undo

    def run(self, module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block's forward, as a part if it was called directly."""
        if self._calls or self._entered is not None:
            return call(*args, **kwargs)
        self._entered = module
        done = False
        try:
            args, kwargs = self._steps.begin_part(args, kwargs)
            out = call(*args, **kwargs)
            done = True
            return out
        finally:
            self._entered = None
            self._steps.end_part(failed=not done)

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._calls or self._entered is not None:
            return None
        self._entered = module
        return self._steps.begin_part(args, kwargs)

    def _exit(self, module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._entered is module:
            self._entered = None
            self._steps.end_part(failed=output is None)


def holders(model: torch.nn.Module, calls: Iterable[str]) -> list[torch.nn.Module]:
    """The modules between the model and its blocks."""
    modules = dict(model.named_modules())
    paths = {".".join(parts[:n]) for parts in (c.partition("#")[0].split(".") for c in calls) for n in range(1, len(parts))}
    return [modules[path] for path in sorted(paths) if path in modules]
