"""Moves what stays on a device between steps close together, so that no page is held by a few bytes.

The first step makes optimizer states beside gradients and activations that are gone later, and what was there before the
harness lies in segments of its own, which are given back whole or not at all: on an H200, 783 MiB of weights and workspaces of
cuBLAS held 1,504 MiB. Storages keep their identity: views and aliases see the new memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from holdall.sharded import local_of

_SHARE = 0.5  # of the host's free memory, for copies
_IDLE = 0.02  # of what is held, which is worth a move
_SIDE = 64  # of matrices


def move_together(tensors: Iterable[torch.Tensor], device: torch.device, *, at_once: int | None = None) -> int:
    """Give the tensors' storages on the device new memory, the largest first; returns their bytes. Values stay. Nothing may
    read or write them meanwhile: neither other threads nor, after this call's own wait, other streams.

    `at_once`: bytes that may be on their way; by default half of the host's free memory, where copies wait."""
    own = (local_of(t).untyped_storage() for t in tensors)
    storages = {s._cdata: s for s in own if _is_movable(s, device)}
    ordered = sorted(storages.values(), key=lambda s: -s.nbytes())
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(device)
        _free_workspaces()
    for part in _parts(ordered, int(_SHARE * _free_host_bytes()) if at_once is None else at_once):
        copies = [(storage, storage.cpu() if is_gpu else storage.clone()) for storage in part]
        for storage in part:
            storage.resize_(0)
        if is_gpu:
            torch.cuda.empty_cache()
        for storage, copy in copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=False)
    if is_gpu:
        _take_workspaces(device)
        torch.cuda.synchronize(device)
    return sum(s.nbytes() for s in ordered)


def close_gaps(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move what lies on a GPU if it holds much more than its bytes: a model that was cast or sharded there lies scattered over
    segments whose free parts nothing else can have."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    if held - torch.cuda.memory_allocated(device) > _IDLE * held:
        move_together(tensors, device)


def _free_workspaces() -> None:
    """Free what cuBLAS keeps between products; it is allocated again at the next."""
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()


def _take_workspaces(device: torch.device) -> None:
    """Have cuBLAS allocate them again now, for this thread and for autograd's: among the requests of a step they would be taken
    for some of its tensors, and stay where others are to lie."""
    with torch.enable_grad():
        given = torch.ones(_SIDE, _SIDE, device=device, requires_grad=True)
        torch.autograd.grad(_Products.apply(given).sum(), given)  # type: ignore[no-untyped-call]


class _Products(torch.autograd.Function):
    """Products in forward and in backward, which saves nothing: whatever hooks the loop runs under."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        _multiply(given)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        _multiply(grad)
        return grad


def _multiply(like: torch.Tensor) -> None:
    """In both of the libraries that torch multiplies by."""
    with torch.no_grad():
        t = torch.ones(_SIDE, _SIDE, device=like.device)
        torch.nn.functional.linear(t @ t, t, t[0])


def _is_movable(storage: torch.UntypedStorage, device: torch.device) -> bool:
    return storage.device.type == device.type and storage.nbytes() > 0 and storage.resizable()


def _parts(storages: list[torch.UntypedStorage], most: int) -> Iterable[list[torch.UntypedStorage]]:
    """In order, and together at most so many bytes each, unless one alone has more."""
    part: list[torch.UntypedStorage] = []
    for storage in storages:
        if part and sum(s.nbytes() for s in part) + storage.nbytes() > most:
            yield part
            part = []
        part.append(storage)
    if part:
        yield part


def _free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
