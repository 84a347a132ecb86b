"""Compiles the two halves of a block's program with a back end of `torch.compile`: fused kernels instead of single ops.

Halves (`fx_function.py`) with the same code on tensors of the same layouts share one function: a model of many equal blocks is
compiled once.

A back end that fails, while compiling or at the first call, costs speed and not the run: such halves run op by op. So the first
call keeps its arguments alive, if there is room.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from holdall.errors import Unsupported, unknown_name
from holdall.runtime.programs.capture import Graph, Ref, Slot, StorageLayout, same_random_numbers, without_autocast
from holdall.runtime.programs.fx_function import Halves, Orders, Writer, obstacle, wanted_of, written

Boxed = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # empties the list that it is given


class Compiler:
    """Compiles programs, equal ones once. Belongs to a harness."""

    def __init__(self, backend: str, note: Callable[[str], None]) -> None:
        self.backend = backend
        self.count = 0  # functions compiled that have not failed
        self.faults: list[str] = []  # tracebacks of back ends that failed
        self._note = note
        self._functions: dict[Any, Function | str] = {}  # by code and layouts; or the reason why there is none

    def expect(self, programs: Iterable[bool]) -> None:
        """Show a note if the plan has no programs."""
        if not any(programs):
            self._note("nothing is compiled: the plan runs no block op by op")

    def compile(self, graph: Graph, orders: Orders, saved: Sequence[Slot]) -> Halves | None:
        """Compile both halves of a program; None: it runs op by op, and a note says why."""
        try:
            why = obstacle(graph)
            if why:
                raise Unsupported(f"blocks {why} run op by op: they cannot be compiled")
            forward, backward = (
                written(graph, order, wanted, Writer(graph), partial(self._function, graph))
                for order, wanted in zip(orders, wanted_of(graph, saved), strict=True)
            )
        except Unsupported as error:
            self._note(error.fact)
            return None
        self._note(f"blocks are compiled by `{self.backend}`; predicted times and peaks are those of eager kernels")
        return Halves(forward=forward, backward=backward)

    def _function(self, graph: Graph, module: torch.fx.GraphModule, taken: Sequence[Ref], given: Sequence[Slot]) -> Function:
        takes = [_layout(graph, ref) for ref in taken]
        gives = [graph.layouts[slot] for slot in given]
        key = (module.code, tuple(takes), tuple(gives))
        if key not in self._functions:
            try:
                self._functions[key] = Function(_compile(module, self.backend, takes), gives, self._broken)
                self.count += 1
            except Exception as error:  # a back end may raise anything
                self._functions[key] = f"`{self.backend}` cannot compile a block ({self._fault(error)})"
        found = self._functions[key]
        if isinstance(found, str):
            raise Unsupported(f"{found}: such blocks run op by op")
        return found

    def _broken(self, error: Exception) -> None:
        self.count -= 1
        why = self._fault(error)
        self._note(f"a block compiled by `{self.backend}` failed at its first call ({why}): such blocks run op by op")

    def _fault(self, error: Exception) -> str:
        """The error in one line; its traceback is kept as text, since a real one would hold tensors."""
        self.faults.append("".join(traceback.format_exception(error, limit=-12)))
        line = str(error).strip().split("\n")[0][:200]
        return f"{type(error).__name__}: {line}"


class Function:
    """A compiled half whose results have the same layouts as those of the single ops."""

    def __init__(self, run: Boxed, gives: Sequence[StorageLayout], broken: Callable[[Exception], None]) -> None:
        self.is_broken = False
        self._run = run
        self._gives = gives
        self._tell = broken
        self._odd: list[int] | None = None  # results with another layout; None: it has not run yet

    @property
    def is_new(self) -> bool:
        return self._odd is None and not self.is_broken

    def attempt(self, boxed: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """A first call whose caller keeps the arguments. None: it failed, or there was no room to keep them."""
        try:
            return self(boxed)
        except (torch.OutOfMemoryError, MemoryError):
            return None
        except Exception as error:  # kernels may be compiled only now, and results are checked for the first time
            self.is_broken = True
            self._tell(error)
            return None

    def __call__(self, boxed: list[torch.Tensor]) -> list[torch.Tensor]:
        found = self._first(boxed) if self._odd is None else list(self._run(boxed))
        for i in self._odd or ():
            found[i] = in_layout(found[i], self._gives[i])
        return found

    def _first(self, boxed: list[torch.Tensor]) -> list[torch.Tensor]:
        """The first call: kernels may be compiled only now, and the layouts of the results are checked."""
        given = {StorageWeakRef(t.untyped_storage()) for t in boxed}  # keeps their ids from being reused
        with _same_environment(), same_random_numbers():
            found = list(self._run(boxed))
        self._odd = [i for i, (t, layout) in enumerate(zip(found, self._gives, strict=True)) if _is_odd(t, layout, given)]
        return found


def _is_odd(tensor: torch.Tensor, layout: StorageLayout, given: set[StorageWeakRef]) -> bool:
    """Does it have another shape or strides, or share memory with something larger or with an argument?"""
    is_alike = tensor.shape == layout.shape and layout.fits(tensor) and not tensor.storage_offset()
    return not is_alike or StorageWeakRef(tensor.untyped_storage()) in given


def in_layout(tensor: torch.Tensor, layout: StorageLayout) -> torch.Tensor:
    """A copy with this shape and these strides.

    Inductor of torch 2.11 returns a keepdim sum flattened where one kernel sums along rows and columns.
    """
    if tensor.shape != layout.shape:
        mine, asked = ([n for n in shape if n != 1] for shape in (tensor.shape, layout.shape))
        if mine != asked and (tensor.dim() != 1 or tensor.numel() != math.prod(asked)):
            raise Unsupported(f"a compiled block returned a tensor of {list(tensor.shape)} instead of {list(layout.shape)}")
        tensor = tensor.reshape(layout.shape)
    return torch.empty_strided(layout.shape, layout.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _layout(graph: Graph, ref: Ref) -> StorageLayout:
    whole = graph.layouts[ref.slot]
    return whole if ref.size is None else StorageLayout(ref.size, ref.stride, whole.dtype, whole.device)


# the back end


def resolve_backend(asked: bool | str) -> str | None:
    """The name of a back end of `torch.compile`; None: blocks are not compiled."""
    if asked is False:
        return None
    name = "inductor" if asked is True else asked
    import torch._dynamo

    names = torch._dynamo.list_backends(exclude_tags=())
    if name not in names:
        raise unknown_name("back end of torch.compile", str(name), names)
    return name


def _compile(module: torch.fx.GraphModule, backend: str, takes: Sequence[StorageLayout]) -> Boxed:
    """Compile the module with a back end directly: it is already a graph, so the frontend of `torch.compile` is not needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with _undisturbed():
        compile_graph = _graph_compiler(backend)
        if compile_graph is None:  # use the frontend: kept tensors are freed slightly later
            return torch.compile(module, backend=backend, dynamic=False)  # type: ignore[return-value]
        with FakeTensorMode(shape_env=ShapeEnv()):
            fakes = [torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device) for t in takes]
        return compile_graph(module, [fakes])  # type: ignore[no-any-return]


def _graph_compiler(backend: str) -> Callable[..., Any] | None:
    """The back end's own function, if torch exposes it."""
    import torch._dynamo

    look_up = getattr(torch._dynamo, "lookup_backend", None)
    return None if look_up is None else look_up(backend)  # type: ignore[no-any-return]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Isolate compilation from the loop's modes, autocast, random state and environment."""
    import torch._inductor.config as inductor

    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast())
        stack.enter_context(same_random_numbers())
        stack.enter_context(_same_environment())
        # CUDA graphs need the same addresses at every call; freezing would make weights constants
        stack.enter_context(inductor.patch({"triton.cudagraphs": False, "freezing": False}))
        yield


@contextmanager
def _same_environment() -> Iterator[None]:
    """Undo changes to the process's environment (compilers set their cache folders there)."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({k: v for k, v in before.items() if os.environ.get(k) != v})
