"""Blocks of a model that is sharded over ranks: which can run op by op, and the parameters that their ops read in backward."""

from __future__ import annotations

from collections.abc import Sequence

from holdall.types import Block, Trace


def sharded_obstacle(trace: Trace, block: Block) -> str:
    """Why a block of a sharded model cannot run op by op; empty if it can."""
    shards = trace.about.shards
    if shards is None:
        return ""
    if not shards.mesh.is_by_engine(shards.way):
        return f"{shards.way} over {' x '.join(d.name for d in shards.mesh.dims)} runs ops of its own inside of blocks"
    inside = f"{block.module}." if block.module else ""
    if not block.module or any(group.startswith(inside) for group in shards.groups):
        return "parts of it are gathered and reduced by themselves"
    return ""


def now_gathered(trace: Trace, blocks: Sequence[Block], moment: int) -> dict[int, int]:
    """Parameters of a sharded model as gathered for the forward of the blocks -> as a replay after this op reads them: those
    that are gathered already, or the next time."""
    rows = trace.about.shards.fillings if trace.about.shards is not None else ()
    read = {x for block in blocks for op in trace.ops[block.first : block.last + 1] for x in op.reads} if rows else set()
    found = {}
    for row in rows:
        for x in read.intersection(row):
            alive = [y for y in row if trace.tensors[y].born <= moment and (trace.tensors[y].freed or moment + 1) > moment]
            found[x] = next(iter(alive), None) or next((y for y in row if trace.tensors[y].born > moment), x)
    return found
