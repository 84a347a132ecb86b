"""Hooks that tell a recorder which module is running; removed after the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdall.tracing.recorder import Recorder


@contextmanager
def watch_modules(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Report every call of every module of `model` to `recorder` while this is open."""
    handles = []
    try:
        for path, module in model.named_modules():

            def before(m: torch.nn.Module, args: Any, kwargs: Any, *, path: str = path) -> None:
                with recorder.quiet():
                    recorder.enter(path, m, (args, kwargs))

            def after(m: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
                with recorder.quiet():
                    recorder.leave(output)

            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
