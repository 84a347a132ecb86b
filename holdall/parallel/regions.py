"""Finds the regions of a model that tensor parallelism may divide (see `tensor.py`), and its vocabulary, in the trace of the
plain model: by what flows where, not by names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from holdall.types import Kind, Phase, Trace
from holdall.types.info import TensorRegion


def find_regions(
    model: torch.nn.Module, trace: Trace, ranks: int, views: Mapping[str, int] | None = None
) -> tuple[TensorRegion, ...]:
    """The regions of a model that may be divided over so many ranks, in the order in which they run. `views`: of
    `first_views`."""
    linears = {path: m for path, m in model.named_modules() if path and is_linear(m)}
    flow = _flow(trace, linears)
    owners: dict[int, int] = {}
    for _, p in model.named_parameters(remove_duplicate=False):
        owners[id(p)] = owners.get(id(p), 0) + 1
    found = []
    for row, columns in flow.closed.items():
        members = (*columns, row)
        shared = any(owners[id(p)] > 1 for path in members for p in linears[path].parameters())
        twice = any(path in flow.odd for path in members)
        fits = all(width(linears[path], "out") % ranks == 0 for path in columns) and width(linears[row], "in") % ranks == 0
        parts = _fused(linears, columns, row, ranks, views or {})
        if columns and not shared and not twice and fits and parts:
            found.append(TensorRegion(columns=columns, row=row, parts=parts))
    return tuple(found)


def find_readers(model: torch.nn.Module, trace: Trace) -> tuple[tuple[str, str], ...]:
    """(module, one inside of it) where the first reads parameters of the second, to compute with them or to pass them on."""
    names = {i: t.name for i, t in trace.tensors.items() if t.kind is Kind.PARAM}
    named = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[int, list[str]] = {}
    for name, p in named.items():
        owners.setdefault(id(p), []).append(name.rpartition(".")[0])
    found: dict[tuple[str, str], None] = {}
    for op in trace.ops:
        path = op.site.module
        for name in (names[x] for x in op.reads if x in names and op.site.phase is Phase.FORWARD):
            has = owners.get(id(named.get(name)), [])
            if any(path == owner or path.startswith(f"{owner}.") or not owner for owner in has):
                continue  # its own, or of a module around it
            if has and not isinstance(model.get_submodule(path), torch.nn.MultiheadAttention):
                found[common_ancestor((f"{path}.", f"{has[0]}.")), has[0]] = None
    return tuple(found)


def find_vocabulary(model: torch.nn.Module, trace: Trace, ranks: int) -> tuple[str, ...]:
    """The embedding of words and the head that gives a logit for each, if they can be divided by words."""
    used = {op.site.module for op in trace.ops if op.site.phase is Phase.FORWARD}
    words = {p: m for p, m in model.named_modules() if type(m) is torch.nn.Embedding and p in used and _is_plain(m)}
    heads = {p: m for p, m in model.named_modules() if type(m) is torch.nn.Linear and p in used}
    last = max((op.id for op in trace.ops if op.site.phase is Phase.FORWARD and op.site.module in heads), default=-1)
    head = trace.ops[last].site.module if last >= 0 else ""
    found = [path for path, m in words.items() if head and m.num_embeddings == width(heads[head], "out")]
    tied = [path for path in found if words[path].weight is heads[head].weight]
    found = tied or found[:1]
    if not found or width(heads[head], "out") % ranks:
        return ()
    members = {id(model.get_submodule(path)) for path in (*found, head)}
    for m in model.modules():  # nobody else may have their weights
        if id(m) not in members and any(p is heads[head].weight for p in m.parameters(recurse=False)):
            return ()
    return (*found, head)


def _is_plain(embedding: torch.nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def is_linear(module: torch.nn.Module) -> bool:
    """Is it a layer `x @ W + b`: torch's, or the Conv1D of GPT-2, whose weight is not transposed?"""
    return type(module) is torch.nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def width(linear: torch.nn.Module, side: str) -> int:
    """Features that go "in" or "out"."""
    return int(linear.weight.shape[axis(linear, side)])  # type: ignore[index, union-attr, arg-type]


def axis(linear: torch.nn.Module, side: str) -> int:
    """The dimension of the weight that has the features."""
    return int((side == "in") == (type(linear) is torch.nn.Linear))


def _fused(linears: dict[str, torch.nn.Module], columns: Sequence[str], row: str, ranks: int, views: Mapping[str, int]) -> int:
    """Matrices side by side in one column of the region, such as queries, keys and values; 0: they cannot be told apart. Where
    the result is seen as heads first, each with its queries, keys and values, it is one matrix."""
    if len(columns) > 1:
        return 1
    wide, narrow = width(linears[columns[0]], "out"), width(linears[row], "in")
    first, parts = views.get(columns[0]), wide // narrow if wide % narrow == 0 else 0
    if first is None or first == parts or wide == narrow:
        return parts
    return 1 if first % ranks == 0 else 0


@contextmanager
def first_views(model: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Of linear layers whose results are seen at once with more dimensions: the size of the first one that their features were
    cut into. What runs inside is watched."""
    paths = {id(module): path for path, module in model.named_modules() if path and is_linear(module)}
    seen = _Views()

    def hook(module: torch.nn.Module, _args: Any, out: Any) -> None:
        if id(module) in paths and isinstance(out, torch.Tensor):
            seen.results[id(out)] = paths[id(module)], ref(out)

    registered = register_module_forward_hook(hook)
    try:
        with seen:
            yield seen.found
    finally:
        registered.remove()


class _Views(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.results: dict[int, tuple[str, ref[torch.Tensor]]] = {}  # no longer than others do: the trace sees when they end
        self.found: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        path, seen = self.results.get(id(args[0]), ("", None)) if args else ("", None)
        x = seen() if seen is not None else None
        if x is not None and x is args[0] and isinstance(out, torch.Tensor):
            before = x.dim() - 1
            if out.dim() > x.dim() and out.shape[:before] == x.shape[:before]:
                self.found.setdefault(path, out.shape[before])
        return out


@dataclass(slots=True)
class _Flow:
    closed: dict[str, tuple[str, ...]] = field(default_factory=dict)  # row -> its columns
    odd: set[str] = field(default_factory=set)  # layers that are both, or whose results go to several others


def _flow(trace: Trace, linears: dict[str, torch.nn.Module]) -> _Flow:
    """Follows the results of linear layers to the layers that read them, through everything else.

    What a layer gives may flow on beside the others, as a first projection does along the residuals of a model: it then reaches
    many layers, or a norm over all of its features. Such a layer is no column, and all is followed again without it.
    """
    order = {path: n for n, path in enumerate(linears)}
    aside: set[str] = set()
    while True:
        flow, wide = _followed(trace, linears, aside)
        more = (wide | flow.odd) - aside
        if not more:
            break
        aside |= {min(more, key=order.__getitem__)}  # others may be right without it
    flow.closed = {
        row: tuple(sorted(columns, key=order.__getitem__))
        for row, columns in flow.closed.items()
        if row not in aside and not aside & set(columns)
    }
    return flow


def _followed(trace: Trace, linears: dict[str, torch.nn.Module], aside: set[str]) -> tuple[_Flow, set[str]]:
    """The flow with the layers `aside` counted as if they were no layers; and the columns that reach a norm."""
    flow, marks = _Flow(), dict[int, frozenset[str]]()  # tensor -> columns whose results are in it
    parameters = {i: t.shape for i, t in trace.tensors.items() if t.kind is Kind.PARAM}
    widths = {path: width(m, "out") for path, m in linears.items()}
    rows_of: dict[str, set[str]] = {}
    roles: dict[str, str] = {}
    wide: set[str] = set()
    for op in trace.ops:
        if op.site.phase is not Phase.FORWARD:
            continue
        path = op.site.module
        read = frozenset[str]().union(*(marks.get(x, frozenset()) for x in op.reads if x not in parameters))
        if path in linears and path not in aside:
            outside = read - {path}  # some ops inside the layer read what others there have made
            if outside:
                for column in outside:
                    rows_of.setdefault(column, set()).add(path)
                flow.closed[path] = (*flow.closed.get(path, ()), *(outside - set(flow.closed.get(path, ()))))
            is_row = roles.get(path) == "row" if path in read else bool(outside)
            if roles.setdefault(path, "row" if is_row else "column") != ("row" if is_row else "column"):
                flow.odd.add(path)
            read = frozenset() if is_row else frozenset([path])
        elif path not in linears:
            sizes = {parameters[x][0] for x in op.reads if x in parameters and len(parameters[x]) == 1}
            wide |= {column for column in read if widths[column] in sizes}
        for x in (*op.writes, *op.mutates):
            if x not in parameters:
                marks[x] = read
    flow.odd |= {column for column, rows in rows_of.items() if len(rows) > 1}
    return flow, wide


def common_ancestor(paths: Iterable[str]) -> str:
    parts = [path.split(".")[:-1] for path in paths]
    same = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        same.append(names[0])
    return ".".join(same)
