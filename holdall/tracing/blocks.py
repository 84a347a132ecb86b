"""Chooses the module calls that become the blocks of a plan.

Models are stacks: numbered siblings of one class (`layers.0`, `layers.1`, ...), or one layer called repeatedly. From the root
downwards, each call of a member of a stack is a block, modules that contain a stack are opened, containers such as Sequential
are looked through, and any other module is a block. So a decoder splits into embedding, layers, norm and head, and a convnet
into its residual blocks, without knowing any model by name. A member with more than a third of all work (a stage of a
hierarchical model) is opened too, if it contains a stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdall.tracing.calls import Call, Given
from holdall.types import Block, Op, Phase


def find_blocks(calls: Sequence[Call], ops: Sequence[Op], packed: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of a step. `packed`: for every saved tensor, the op after which autograd packed it."""
    stacked = _stacked(calls)
    large = len(packed) / 3
    chosen = [c for root in calls for c in _choose(root, stacked, large) if c.last >= c.first]
    seen: dict[tuple[object, ...], int] = {}
    blocks: list[Block] = []
    for call in sorted(chosen, key=lambda c: c.first):
        shape = _shape(call, ops, packed)
        blocks.append(replace(_block(call, len(blocks), seen.get(shape)), wanted=_wanted(call, ops)))
        seen.setdefault(shape, len(blocks) - 1)
    return tuple(blocks)


def _wanted(call: Call, ops: Sequence[Op]) -> tuple[int, ...] | None:
    """Indices of the outputs that received a gradient from outside the call. None: unknown."""
    later = {x for op in ops[call.last + 1 :] if op.site.phase is Phase.FORWARD for x in (*op.reads, *op.mutates)}
    return tuple(n for n in sorted(call.wanted) if call.leaves[n] in later) or None


def find_whole(calls: Sequence[Call]) -> Block | None:
    """The model's own call as one block, if it is called once."""
    return _block(calls[0], -1, None) if len(calls) == 1 and not calls[0].path else None


def find_shapes(calls: Sequence[Call]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors passed to the model's first call: a loss may pass less than the whole batch."""
    return calls[0].shapes if calls and not calls[0].path else ()


def _block(call: Call, number: int, same_as: int | None) -> Block:
    return Block(
        id=number,
        module=call.path,
        nth=call.nth,
        first=call.first,
        last=call.last,
        backward=call.backward,
        inputs=call.inputs,
        outputs=call.outputs,
        shapes=call.shapes,
        saves=tuple(range(call.first_save, call.last_save)),
        same_as=same_as,
        kind=call.kind,
        odd=call.odd,
        quiet=call.quiet,
        apart=call.effects.apart,
        alters=call.effects.alters,
        once=call.effects.once,
    )


def find_given(calls: Sequence[Call], blocks: Sequence[Block]) -> dict[str, Given]:
    """Block name -> the arguments of its call."""
    found = {(c.path, c.nth): c.given for c in _walk(calls)}
    return {b.name: given for b in blocks if (given := found.get((b.module, b.nth))) is not None}


def _walk(calls: Sequence[Call]) -> Iterator[Call]:
    for call in calls:
        yield from call.walk()


def _stacked(calls: Sequence[Call]) -> set[str]:
    """Paths of modules that are numbered siblings of one class, or that one module calls several times in a row of layers."""
    groups: dict[tuple[str, str], set[str]] = {}
    for call in _walk(calls):
        parent, _, last = call.path.rpartition(".")
        if last.isdigit():
            groups.setdefault((parent, call.kind), set()).add(call.path)
    siblings = {path for paths in groups.values() if len(paths) > 1 for path in paths}
    repeated = {path for call in _walk(calls) for path, n in Counter(_composites(call)).items() if n > 1}
    return siblings | repeated


def _composites(call: Call) -> list[str]:
    """The modules with submodules that a call calls directly."""
    return [c.path for c in call.children if c.composite and not c.quiet]


def _choose(call: Call, stacked: set[str], large: float) -> list[Call]:
    opens = any(c.path in stacked for c in _walk(call.children))
    if call.path in stacked:
        opens = opens and call.last_save - call.first_save > large
    if call.children and (opens or call.transparent or call.depth == 0):
        return [c for child in call.children for c in _choose(child, stacked, large)] or [call]
    return [call]


def _shape(call: Call, ops: Sequence[Op], packed: Sequence[int]) -> tuple[object, ...]:
    """What a block does, independent of its position: equal for two blocks that can share one decision."""
    inside = ops[call.first : call.last + 1]
    return (
        call.kind,
        call.effects,
        tuple((op.site.op, op.flops, op.moved) for op in inside),
        tuple(packed[i] - call.first for i in range(call.first_save, call.last_save)),
    )
