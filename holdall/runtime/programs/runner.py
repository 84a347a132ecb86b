"""Runs a block by its program, captured at the first call of each signature; a block with other ops than planned as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdall.errors import Unsupported
from holdall.ops import odd_argument
from holdall.runtime.activations.layer_swap import SwappedSaves
from holdall.runtime.activations.offload import OffloadedSaves
from holdall.runtime.activations.recompute import Hooks, Segment
from holdall.runtime.programs.capture import capture
from holdall.runtime.programs.compiled import Compiler
from holdall.runtime.programs.program import Program
from holdall.runtime.programs.signature import ModuleTensors, signature_of
from holdall.types.trace import digest_of

_MOST = 16  # captured signatures per block; more come from a value that changes with every call


class Runner:
    """Runs a block by its program, captured at the first call of each signature.

    A block with other ops than planned is recomputed whole, with a note.
    """

    def __init__(
        self,
        name: str,
        forward: Sequence[int],
        backward: Sequence[int],
        ops: str,
        note: Callable[[str], None],
        compiler: Compiler | None = None,
        *,
        wanted: Sequence[int] | None = None,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        self._rows = rows
        self._wanted = wanted  # the outputs that received a gradient when the plan was made
        self._name = name
        self._forward = forward
        self._backward = backward
        self._ops = ops  # digest of the op names that the plan was made for
        self._note = note
        self._compiler = compiler
        self._programs: dict[Any, Program | None] = {}
        self._parts: ModuleTensors | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        parking: OffloadedSaves | SwappedSaves | None = None,
        hooks: Hooks | None = None,  # of the segment that the call is in
    ) -> Any:
        if self._parts is None or not self._parts.are_of(module):
            self._parts = ModuleTensors(module)
        parameters, buffers = self._parts.tensors()
        leaves = tree_leaves((args, kwargs))
        key = signature_of(leaves, parameters, self._parts.settings())
        if key not in self._programs and len(self._programs) < _MOST:
            self._programs[key] = self._prepare(module, forward, args, kwargs)
        program = self._programs.get(key)
        if program is None and hooks is not None:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                return forward(*args, **kwargs)
        if program is None:
            state = list(module.buffers())
            out, call = Segment().run(module, forward, args, kwargs, state=state, keep=frozenset())
            if parking is not None:
                parking.leave(out, call)
            return out
        return program([*(t for t in leaves if isinstance(t, torch.Tensor)), *parameters, *buffers], parking, hooks)

    def _prepare(self, module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Program | None:
        try:
            odd = odd_argument((args, kwargs))
            if odd:
                raise Unsupported(f"it is called with a {odd}", hint='recompute whole blocks: fit(..., planner="chen")')
            graph = capture(module, forward, args, kwargs, loss_alone=not self._name, wanted=self._wanted)
            if digest_of(graph.names()) != self._ops:
                raise Unsupported(
                    "it runs other ops than were planned for", hint="trace and plan this model again, or call `fit`"
                )
            return Program(graph, self._forward, self._backward, self._compiler, self._rows)
        except Unsupported as error:
            why = str(error).split("\n")[0]
            self._note(f"`{self._name}` is recomputed as a whole instead of op by op: {why}")
            return None
