"""The two halves of a block's program through a back end of `torch.compile`: fused kernels in the place of single ops.

Two halves (`fx_function.py`) with the same code on tensors of the same layouts are one function: a model of many equal blocks
is compiled once.

A back end that fails, as it compiles or at the first call, costs speed and not the run: such halves run op by op. Therefore
the first call holds on to what it is given, if there is room.
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
from holdall.runtime.programs.capture import Graph, Layout, Ref, Slot, same_random_numbers, without_autocast
from holdall.runtime.programs.fx_function import Halves, Orders, Writer, obstacle, wanted_of, written

Boxed = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # empties the list that it is given


class Compiler:
    """Compiles programs, equal ones once. Belongs to a harness and goes with it."""

    def __init__(self, backend: str, note: Callable[[str], None]) -> None:
        self.backend = backend
        self.count = 0  # functions that were compiled, and have not failed since
        self.faults: list[str] = []  # tracebacks of back ends that failed
        self._note = note
        self._functions: dict[Any, Function | str] = {}  # by code and layouts; or why there is none

    def expect(self, programs: Iterable[bool]) -> None:
        """Say it if a plan has no programs."""
        if not any(programs):
            self._note("nothing is compiled: the plan runs no block op by op")

    def compile(self, graph: Graph, orders: Orders, saved: Sequence[Slot]) -> Halves | None:
        """Both halves of a program; None: it runs op by op, and it is said."""
        try:
            why = obstacle(graph)
            if why:
                raise Unsupported(f"blocks {why} are run op by op: they are not compiled")
            forward, backward = (
                written(graph, order, wanted, Writer(graph), partial(self._function, graph))
                for order, wanted in zip(orders, wanted_of(graph, saved), strict=True)
            )
        except Unsupported as error:
            self._note(error.fact)
            return None
        self._note(f"blocks are compiled by `{self.backend}`: times and peaks were predicted for eager kernels")
        return Halves(forward=forward, backward=backward)

    def _function(self, graph: Graph, module: torch.fx.GraphModule, taken: Sequence[Ref], given: Sequence[Slot]) -> Function:
        takes = [_layout(graph, ref) for ref in taken]
        gives = [graph.layouts[slot] for slot in given]
        key = (module.code, tuple(takes), tuple(gives))
        if key not in self._functions:
            try:
                self._functions[key] = Function(_compile(module, self.backend, takes), gives, self._broken)
                self.count += 1
            except Exception as error:  # whatever a back end does not know
                self._functions[key] = f"`{self.backend}` cannot compile a block ({self._fault(error)})"
        found = self._functions[key]
        if isinstance(found, str):
            raise Unsupported(f"{found}: such blocks are run op by op")
        return found

    def _broken(self, error: Exception) -> None:
        self.count -= 1
        why = self._fault(error)
        self._note(f"what `{self.backend}` made of a block failed at its first call ({why}): such blocks are run op by op")

    def _fault(self, error: Exception) -> str:
        """What went wrong in a line; where, as text, since a traceback would hold tensors."""
        self.faults.append("".join(traceback.format_exception(error, limit=-12)))
        line = str(error).strip().split("\n")[0][:200]
        return f"{type(error).__name__}: {line}"


class Function:
    """A compiled half, with results that lie in memory as those of the single ops would."""

    def __init__(self, run: Boxed, gives: Sequence[Layout], broken: Callable[[Exception], None]) -> None:
        self.is_broken = False
        self._run = run
        self._gives = gives
        self._tell = broken
        self._odd: list[int] | None = None  # results that lie otherwise; None: it has not run yet

    @property
    def is_new(self) -> bool:
        return self._odd is None and not self.is_broken

    def attempt(self, boxed: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """A first call, by someone who still holds what is given. None: it is broken, or there was no room for holding that."""
        try:
            return self(boxed)
        except (torch.OutOfMemoryError, MemoryError):
            return None
        except Exception as error:  # kernels are finished only now, and results were promised but not seen
            self.is_broken = True
            self._tell(error)
            return None

    def __call__(self, boxed: list[torch.Tensor]) -> list[torch.Tensor]:
        found = self._first(boxed) if self._odd is None else list(self._run(boxed))
        for i in self._odd or ():
            found[i] = in_layout(found[i], self._gives[i])
        return found

    def _first(self, boxed: list[torch.Tensor]) -> list[torch.Tensor]:
        """Kernels may be finished only now, and results are seen for the first time."""
        given = {StorageWeakRef(t.untyped_storage()) for t in boxed}  # while these are there, no address is used twice
        with _same_environment(), same_random_numbers():
            found = list(self._run(boxed))
        self._odd = [i for i, (t, layout) in enumerate(zip(found, self._gives, strict=True)) if _is_odd(t, layout, given)]
        return found


def _is_odd(tensor: torch.Tensor, layout: Layout, given: set[StorageWeakRef]) -> bool:
    """Another shape or other strides, a piece of something larger, or memory that was handed in."""
    is_alike = tensor.shape == layout.shape and layout.fits(tensor) and not tensor.storage_offset()
    return not is_alike or StorageWeakRef(tensor.untyped_storage()) in given


def in_layout(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy with this shape and these strides.

    Inductor of torch 2.11 returns a sum that keeps its dimensions as a flat one, where one kernel adds along rows and columns.
    """
    if tensor.shape != layout.shape:
        mine, asked = ([n for n in shape if n != 1] for shape in (tensor.shape, layout.shape))
        if mine != asked and (tensor.dim() != 1 or tensor.numel() != math.prod(asked)):
            raise Unsupported(f"a compiled block gives {list(tensor.shape)} where {list(layout.shape)} was asked for")
        tensor = tensor.reshape(layout.shape)
    return torch.empty_strided(layout.shape, layout.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _layout(graph: Graph, ref: Ref) -> Layout:
    whole = graph.layouts[ref.slot]
    return whole if ref.size is None else Layout(ref.size, ref.stride, whole.dtype, whole.device)


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


def _compile(module: torch.fx.GraphModule, backend: str, takes: Sequence[Layout]) -> Boxed:
    """The module by a back end, without the frontend of `torch.compile`: it is a graph already."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with _undisturbed():
        compile_graph = _graph_compiler(backend)
        if compile_graph is None:  # through the frontend, then: what is kept is freed a little later
            return torch.compile(module, backend=backend, dynamic=False)  # type: ignore[return-value]
        with FakeTensorMode(shape_env=ShapeEnv()):
            fakes = [torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device) for t in takes]
        return compile_graph(module, [fakes])  # type: ignore[no-any-return]


def _graph_compiler(backend: str) -> Callable[..., Any] | None:
    """The back end itself, where torch still hands it out."""
    import torch._dynamo

    look_up = getattr(torch._dynamo, "lookup_backend", None)
    return None if look_up is None else look_up(backend)  # type: ignore[no-any-return]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Compiling sees nothing of the loop around it, and leaves nothing behind."""
    import torch._inductor.config as inductor

    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast())
        stack.enter_context(same_random_numbers())
        stack.enter_context(_same_environment())
        # recorded launches would want the same addresses at every call; frozen weights would be constants
        stack.enter_context(inductor.patch({"triton.cudagraphs": False, "freezing": False}))
        yield


@contextmanager
def _same_environment() -> Iterator[None]:
    """Compilers write the folders of their caches into the process's environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({k: v for k, v in before.items() if os.environ.get(k) != v})
