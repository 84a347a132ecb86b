"""Finds the modules of a traced step that act on each position of the sequence, or on each sample of the batch, alone.

Judged by the trace: known ops, and results that have a row for every position (or sample). Views leave no op, so that a module
which moves positions by views alone would pass; the runtime compares pieces with the whole on a few rows before it relies on
this.

What a module computes from its weights alone (weights that are stored packed, expanded at every use) has no rows: every piece
computes it anew.

Rows are positions for MLPs and norms, samples for convolutions and poolings. A batch norm takes its statistics from the whole
batch, so a module with one is never split by samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from holdall.types import Block, Kind, Op, Save, TensorInfo, Trace
from holdall.types.trace import OpId, TensorId, once_per_trace

POSITIONS, SAMPLES = "positions", "samples"  # what rows are
_PRODUCTS = frozenset({"mm", "addmm"})
_ELEMENTWISE = frozenset(
    {
        "_to_copy",
        "abs",
        "add",
        "clamp",
        "clamp_min",
        "clone",
        "cos",
        "div",
        "elu",
        "erf",
        "exp",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "log",
        "mul",
        "neg",
        "pow",
        "reciprocal",
        "relu",
        "rsqrt",
        "sigmoid",
        "silu",
        "sin",
        "softplus",
        "sqrt",
        "square",
        "sub",
        "tanh",
    }
)
_ALONG_FEATURES = frozenset({"_fused_rms_norm", "mean", "native_layer_norm", "sum", "var", "var_mean"})
_KNOWN = _PRODUCTS | _ELEMENTWISE | _ALONG_FEATURES
_OF_IMAGES = frozenset({"_adaptive_avg_pool2d", "avg_pool2d", "convolution", "max_pool2d_with_indices", "native_group_norm"})
_IN_PLACE = frozenset({"add_", "clamp_", "div_", "gelu_", "leaky_relu_", "mul_", "relu_", "silu_", "sub_"})
_KNOWN_OF_SAMPLES = _KNOWN | _OF_IMAGES | _IN_PLACE
_SMALL = 8  # a saved tensor of less than this share of the module's input is not worth a piece


@dataclass(frozen=True, kw_only=True)
class Region:
    """One call of a module: its ops in forward and backward, both ranges contiguous."""

    module: str
    tokens: int  # rows: positions, or samples
    first: OpId
    last: OpId
    begin: OpId  # of its backward
    end: OpId
    input: TensorId
    output: TensorId
    incoming: TensorId  # gradient of the output
    outgoing: TensorId | None  # gradient of the input, with what others added to it; None: it has none
    sums: tuple[Op, ...]  # ops of its backward that add the gradient of another user of the input
    saves: tuple[Save, ...]  # that its nodes hold, the input's too
    footprint: int  # bytes that its ops make per row, upper bound
    rowless: frozenset[TensorId] = frozenset()  # results of weights alone


def regions(trace: Trace, by: str = POSITIONS) -> dict[str, Region]:
    """The modules worth splitting by positions, or by samples, the outermost ones, by path."""
    return once_per_trace(
        trace, f"_split_by_{by}", lambda trace: {r.module: r for b in trace.blocks for r in _inside(trace, b, by)}
    )


def _inside(trace: Trace, block: Block, by: str) -> Iterator[Region]:
    if block.backward is None or block.quiet or sum(b.module == block.module for b in trace.blocks) > 1:
        return
    if block.alters or block.once:  # its forward is to run once
        return
    below = f"{block.module}."
    own = [op.site.module for op in trace.ops[block.first : block.last + 1]]
    paths = dict.fromkeys(path for module in own if module == block.module or module.startswith(below) for path in _up(module))
    taken: list[str] = []
    for path in sorted((p for p in paths if p == block.module or p.startswith(below)), key=lambda p: p.count(".")):
        if any(path.startswith(f"{outer}.") for outer in taken):
            continue
        found = region_of(trace, block, path, by)
        if isinstance(found, Region):
            taken.append(path)
            yield found


def _up(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def region_of(trace: Trace, block: Block, module: str, by: str = POSITIONS) -> Region | str:
    """The module's region, or why it cannot run in pieces."""
    ops = [op for op in trace.ops[block.first : block.last + 1] if _is_in(op, module)]
    back = list(trace.backward_of(module))
    if not ops or not back or not _is_contiguous(ops) or not _is_contiguous(back):
        return "its ops are not contiguous"
    own = {x for op in ops for x in op.writes}
    rowless = _of_weights(trace, (*ops, *back))
    outside = dict.fromkeys(x for op in ops for x in op.reads if x not in own)
    inputs = [x for x in outside if not _is_weight(trace, x)]
    lasting = [x for op in ops for x in op.writes if _outlives(trace, x, ops[-1].id, back)]
    if len(inputs) != 1 or len(lasting) != 1 or trace.tensors[inputs[0]].born < 0:
        return "it has several inputs or outputs"
    tokens = _tokens(trace.tensors[inputs[0]], by)
    strange = next((op.site.op for op in ops if not _is_row_wise(trace, op, tokens, own, rowless, by)), None)
    if strange is not None:
        return f"`{strange}` may mix {by}"
    held = _saves(trace, block, ops, back)
    if any(save.tensor in own and save not in held and save.tensor != lasting[0] for save in _saves_of(trace, own)):
        return "others hold its results"
    x = trace.tensors[inputs[0]]
    if not any(s.tensor in own and s.tensor != lasting[0] and trace.tensors[s.tensor].nbytes * _SMALL > x.nbytes for s in held):
        return "it holds little for backward"
    gradients = _gradients(trace, back, {*own, x.id}, rowless, tokens, by)
    if isinstance(gradients, str):
        return gradients
    incoming, outgoing, sums = gradients
    made = [t for op in (*ops, *back) for t in op.writes if trace.tensors[t].kind is not Kind.GRAD and t not in rowless]
    return Region(
        module=module,
        tokens=tokens,
        first=ops[0].id,
        last=ops[-1].id,
        begin=back[0].id,
        end=back[-1].id,
        input=x.id,
        output=lasting[0],
        incoming=incoming,
        outgoing=outgoing,
        sums=sums,
        saves=tuple(held),
        footprint=-(-sum(trace.tensors[t].nbytes for t in made) // tokens),
        rowless=rowless,
    )


def has_rows(info: TensorInfo, tokens: int, by: str = POSITIONS) -> bool:
    """Has the tensor a row for every position, or sample?"""
    if by == SAMPLES:
        return info.shape[:1] == (tokens,)
    count = 1
    for size in info.shape:
        count *= size
        if count == tokens:
            return True
    return False


def _tokens(info: TensorInfo, by: str) -> int:
    if by == SAMPLES:
        return info.shape[0] if len(info.shape) > 1 else 1
    count = 1
    for size in info.shape[:-1]:
        count *= size
    return count


def _is_in(op: Op, module: str) -> bool:
    return op.site.module == module or op.site.module.startswith(f"{module}.")


def _is_contiguous(ops: Sequence[Op]) -> bool:
    return ops[-1].id - ops[0].id == len(ops) - 1


def _outlives(trace: Trace, tensor: TensorId, last: OpId, back: Sequence[Op]) -> bool:
    freed = trace.tensors[tensor].freed
    mine = range(back[0].id, back[-1].id + 1)
    return freed is None or freed > last or any(k > last and k not in mine for k in trace.uses(tensor))


def _of_weights(trace: Trace, ops: Sequence[Op]) -> frozenset[TensorId]:
    """Results of ops that read nothing but weights, or such results: the same for every piece."""
    found: set[TensorId] = set()
    for op in ops:
        is_pure = bool(op.reads) and not op.random and found.issuperset(op.mutates)
        if is_pure and all(_is_weight(trace, x) or x in found for x in op.reads):
            found.update(x for x in op.writes if trace.tensors[x].kind is not Kind.GRAD)
    return frozenset(found)


def is_rowless(op: Op, rowless: Set[TensorId]) -> bool:
    """Is all that the op makes or changes a result of weights alone?"""
    made = (*op.writes, *op.mutates)
    return bool(made) and all(x in rowless for x in made)


def _is_row_wise(trace: Trace, op: Op, tokens: int, own: Set[TensorId], rowless: Set[TensorId], by: str) -> bool:
    """`own`: results of the module, which its ops may change in place if it is split by samples."""
    if is_rowless(op, rowless):
        return True
    space, _, name = op.site.op.rpartition(".")[0].partition(".")
    if op.random or space != "aten" or name not in (_KNOWN if by == POSITIONS else _KNOWN_OF_SAMPLES):
        return False
    if op.mutates and (by == POSITIONS or not own >= set(op.mutates)):
        return False
    rows = [x for x in (*op.reads, *op.mutates) if not _is_weight(trace, x) and x not in rowless]
    if name in _PRODUCTS and len(rows) != 1:
        return False
    return all(has_rows(trace.tensors[x], tokens, by) for x in (*rows, *op.writes)) and bool(rows)


def _saves(trace: Trace, block: Block, ops: Sequence[Op], back: Sequence[Op]) -> list[Save]:
    """The saves of the module's own nodes: taken in its forward and asked for in its backward."""
    found = (trace.saves[i] for i in block.saves)
    taken = range(ops[0].id - 1, ops[-1].id + 1)
    asked = range(back[0].id - 1, back[-1].id)
    return [s for s in found if s.packed in taken and s.unpacked in asked]


def _saves_of(trace: Trace, tensors: set[TensorId]) -> Iterator[Save]:
    return (save for x in tensors for save in trace.saves_of(x))


def _gradients(
    trace: Trace, back: Sequence[Op], values: set[TensorId], rowless: Set[TensorId], tokens: int, by: str
) -> tuple[TensorId, TensorId | None, tuple[Op, ...]] | str:
    """(the output's gradient, the input's, sums with gradients of its other users), or why they cannot be told apart.

    `values`: the module's input and results of its forward.
    """
    own = {x for op in back for x in op.writes}
    end = back[-1].id
    incoming: TensorId | None = None
    sums: list[Op] = []
    for op in back:
        if is_rowless(op, rowless):
            continue
        if op.mutates or op.accumulates or op.random:
            return f"`{op.site.op}` changes a tensor in place in its backward"
        others = [x for x in op.reads if x not in own and x not in values and not _is_weight(trace, x)]
        if incoming is None and others:
            incoming = others[0]
        others = [x for x in others if x != incoming]
        if others and (op.site.op != "aten.add.Tensor" or len(op.reads) != 2 or len(others) != 1):
            return "its backward reads gradients of other modules"
        sums += [op] if others else []
        if any(trace.tensors[x].kind is not Kind.GRAD and not has_rows(trace.tensors[x], tokens, by) for x in op.writes):
            return f"a result of `{op.site.op}` in its backward has no row for each of the {by}"
    if incoming is None or len(sums) > 1:
        return "its gradients cannot be told apart"
    lasting = [x for op in back for x in op.writes if trace.tensors[x].kind is not Kind.GRAD and _lasts(trace, x, end)]
    if len(lasting) > 1 or (sums and not lasting):
        return "its backward has several results"
    return incoming, lasting[0] if lasting else None, tuple(sums)


def _is_weight(trace: Trace, tensor: TensorId) -> bool:
    return trace.tensors[tensor].kind in (Kind.PARAM, Kind.BUFFER)


def _lasts(trace: Trace, tensor: TensorId, end: OpId) -> bool:
    freed = trace.tensors[tensor].freed
    return freed is None or freed > end or trace.uses(tensor)[-1] > end
