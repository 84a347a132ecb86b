"""The trace of a deep model from that of a shallow one: layers are alike, so one of them is repeated.

`with_layers(trace, 80)` takes the trace of the same model with four layers or more. Its second layer is repeated between itself
and the third: the ops of its forward and backward, its tensors, what autograd saves, and its part of the optimizer's step. A
reference from one layer to its neighbour is one between neighbours in every copy. Nothing is estimated: where a step does not
have this form, `Unsupported` says so. `tests/unit/test_longer.py` compares with traces of the deep models themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from holdall.errors import Unsupported
from holdall.parallel.sharding.by_rule import WIDTHS
from holdall.types import Block, Op, Phase, Save, TensorInfo, Trace

LEAST = 4  # layers that a trace needs: a first, one to repeat, one after it, and a last
_HINT = "trace the whole model"


class _Where(NamedTuple):
    region: str  # "F", "B" or "S": forward, backward, step
    layer: int
    place: int  # number within the region


_Key = tuple[object, ...]  # of a tensor, the same for its counterparts in other layers


def stack_of(trace: Trace) -> list[Block]:
    """The calls of the layers: the longest row of numbered siblings of one kind."""
    counts = Counter((b.module.rpartition(".")[0], b.kind) for b in trace.blocks if b.module.rpartition(".")[2].isdigit())
    if not counts:
        return []
    (parent, kind), _ = counts.most_common(1)[0]
    return [b for b in trace.blocks if b.module.rpartition(".")[0] == parent and b.kind == kind]


def with_layers(trace: Trace, count: int) -> Trace:
    """The trace with `count` layers in the place of those it has."""
    stack = stack_of(trace)
    if len(stack) < LEAST or [b.module.rpartition(".")[2] for b in stack] != [str(n) for n in range(len(stack))]:
        raise Unsupported(f"the trace has no row of {LEAST} numbered layers", hint=_HINT)
    if count < len(stack):
        raise Unsupported(f"the trace has {len(stack)} layers already", hint=f"ask for {len(stack)} layers or more")
    return trace if count == len(stack) else _Longer(trace, stack, count - len(stack)).made()


def _counted(ops: Iterable[Op]) -> tuple[Op, ...]:
    """The ops with the numbers of their sites counted anew."""
    seen: Counter[tuple[Phase, str, str]] = Counter()
    found = []
    for op in ops:
        key = (op.site.phase, op.site.module, op.site.op)
        found.append(replace(op, site=replace(op.site, nth=seen[key])))
        seen[key] += 1
    return tuple(found)


class _Longer:
    def __init__(self, trace: Trace, stack: Sequence[Block], more: int) -> None:
        self.trace, self.stack, self.more = trace, stack, more
        self.parent = stack[0].module.rpartition(".")[0]
        self.where: dict[int, _Where] = {}  # ops of layers
        self.key: dict[int, tuple[int, _Key]] = {}  # tensor of a layer -> (layer, key)
        self.several: set[int] = set()  # ops of the step that treat all layers at once
        self.step = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
        self._locate()
        self.tensors_at = {at: x for x, at in self.key.items()}
        self.ops_at = {at: op for op, at in self.where.items()}
        self.ids: dict[tuple[int, _Key], int] = {}  # (position, key) -> tensor
        self.next_id = trace.next_id
        self.number: dict[int, int] = {}  # op outside of the layers -> its number now
        self.numbers: dict[_Where, int] = {}  # op of a layer, by its position -> its number now

    # which op and tensor belongs to which layer

    def _layer_named(self, name: str) -> int | None:
        head = f"{self.parent}."
        number = name[len(head) :].partition(".")[0] if name.startswith(head) else ""
        return int(number) if number.isdigit() and int(number) < len(self.stack) else None

    def _locate(self) -> None:
        trace, stack = self.trace, self.stack
        for n, block in enumerate(stack):
            end = stack[n + 1].first if n + 1 < len(stack) else block.last + 1
            self._region("F", n, range(block.first, end))
            if block.backward is None:
                raise Unsupported(f"`{block.name}` has no backward", hint=_HINT)
            until = (stack[n - 1].backward or 0) if n else trace.backward_of(block.module)[-1].id
            self._region("B", n, range(block.backward + 1, until + 1))
        for x, t in trace.tensors.items():
            layer = self._layer_named(t.name) if t.born < 0 else None
            if layer is not None:
                self.key[x] = (layer, (t.kind, t.name[len(f"{self.parent}.{layer}") :]))
        counts: Counter[int] = Counter()
        for op in trace.ops:
            at = self.where.get(op.id)
            if op.id >= self.step:
                layers = {self.key[x][0] if x in self.key else None for x in (*op.reads, *op.mutates) if self._counts(x)}
                if len(layers) > 1 and layers - {None}:
                    self._several(op)
                    continue
                layer = next(iter(layers), None)
                if layer is not None:
                    at = self.where[op.id] = _Where("S", layer, counts[layer])
                    counts[layer] += 1
            if at is not None:
                self.key.update({x: (at.layer, (at.region, at.place, n)) for n, x in enumerate(op.writes)})
        for region in "FBS":
            names = [self._names(region, layer) for layer in (1, 2)]
            if names[0] != names[1]:
                raise Unsupported("the layers differ in what they do", hint=_HINT)

    def _counts(self, x: int) -> bool:
        """Does the tensor tell whose op it is? Constants do not."""
        return x in self.key or self.trace.tensors[x].born >= 0 or self._owned(x)

    def _owned(self, x: int) -> bool:
        return self.trace.tensors[x].kind.value in ("param", "state")

    def _names(self, region: str, layer: int) -> list[tuple[str, int, int]]:
        ops = [self.trace.ops[k] for k, at in self.where.items() if (at.region, at.layer) == (region, layer)]
        return [(op.site.op, op.flops, op.moved) for op in ops]

    def _region(self, region: str, layer: int, ops: Iterable[int]) -> None:
        for place, op in enumerate(ops):
            if op in self.where:
                raise Unsupported("the layers' backwards overlap", hint=_HINT)
            self.where[op] = _Where(region, layer, place)

    def _several(self, op: Op) -> None:
        """An op over lists of tensors, one per parameter: what it makes is in the order of its first list."""
        self.several.add(op.id)
        if not op.writes:
            return
        first = op.reads[: len(op.writes)]
        if len(first) < len(op.writes):
            raise Unsupported(f"`{op.site.op}` makes more tensors than it reads", hint=_HINT)
        seen: Counter[int] = Counter()
        for x, made in zip(first, op.writes, strict=True):
            if x in self.key:
                layer = self.key[x][0]
                self.key[made] = (layer, ("several", op.id, seen[layer]))
                seen[layer] += 1

    # positions in the longer stack

    def _proto(self, position: int) -> int:
        """The layer that the one at this position is like."""
        return position if position < 2 else max(1, position - self.more)

    def _position(self, layer: int) -> int:
        return layer if layer < 2 else layer + self.more

    def _tensor(self, x: int, position: int | None) -> int:
        """The tensor that takes the place of `x` for a layer at this position; None: for what is outside of them."""
        if x not in self.key:
            return x
        layer, key = self.key[x]
        at = self._position(layer) if position is None else position + layer - self._proto(position)
        if (self._proto(at), key) not in self.tensors_at:
            raise Unsupported(f"`{self.trace.tensors[x].name}` has no counterpart in every layer", hint=_HINT)
        if (at, key) not in self.ids:
            if at == self._proto(at):
                self.ids[at, key] = self.tensors_at[at, key]
            else:
                self.ids[at, key] = self.next_id
                self.next_id += 1
        return self.ids[at, key]

    def _moment(self, op: int | None, position: int | None) -> int | None:
        """An op, or the moment after it, likewise."""
        if op is None or op < 0:
            return op
        found = self.where.get(op)
        if found is None:
            return self.number.get(op, self.end)
        at = self._position(found.layer) if position is None else position + found.layer - self._proto(position)
        place = _Where(found.region, at, found.place)
        if place not in self.numbers:
            raise Unsupported("a layer refers to an op that others do not have", hint=_HINT)
        return self.numbers[place]

    def _renamed(self, name: str, position: int | None) -> str:
        layer = self._layer_named(name)
        if layer is None:
            return name
        at = self._position(layer) if position is None else position + layer - self._proto(position)
        return f"{self.parent}.{at}{name[len(f'{self.parent}.{layer}') :]}"

    # the trace

    def _order(self) -> list[tuple[int, int | None]]:
        """(op, position of its layer) in the order of the longer step."""
        copies = range(2, 2 + self.more)
        of_one = {r: [k for k, at in self.where.items() if (at.region, at.layer) == (r, 1)] for r in "FBS"}
        last = {r: max(ops, default=-1) for r, ops in of_one.items()}
        first_back = min(of_one["B"])
        order: list[tuple[int, int | None]] = []
        for op in self.trace.ops:
            if op.id == first_back:  # the copies come after it in forward, so before it in backward
                order += [(k, at) for at in reversed(copies) for k in of_one["B"]]
            found = self.where.get(op.id)
            order.append((op.id, None if found is None else self._position(found.layer)))
            if op.id in (last["F"], last["S"]):
                region = "F" if op.id == last["F"] else "S"
                order += [(k, at) for at in copies for k in of_one[region]]
        return order

    def made(self) -> Trace:
        order = self._order()
        self.end = len(order)
        for n, (op, position) in enumerate(order):
            if position is None:
                self.number[op] = n
            else:
                at = self.where[op]
                self.numbers[_Where(at.region, position, at.place)] = n
        ops = _counted(self._op(self.trace.ops[op], n, position) for n, (op, position) in enumerate(order))
        saves, numbers = self._saves()
        blocks = self._blocks(numbers)
        whole = self.trace.whole
        if whole is not None:
            whole = replace(self._block(whole, None, {}, -1), saves=tuple(range(len(saves))) if whole.saves else ())
        return replace(self.trace, ops=ops, tensors=self._tensors(ops), blocks=blocks, whole=whole, saves=saves, units=())

    def _op(self, op: Op, number: int, position: int | None) -> Op:
        if op.id in self.several:
            reads, writes, mutates = (self._all(some) for some in (op.reads, op.writes, op.mutates))
            before = sum(self._size(x) for x in (*op.reads, *op.writes))
            extra = sum(self._size(x) for x in (*op.reads, *op.writes) if x in self.key and self.key[x][0] == 1)
            share = 1 + self.more * extra / before if before else 1.0
            moved, seconds = round(op.moved * share), op.seconds * share
            return replace(op, id=number, reads=reads, writes=writes, mutates=mutates, moved=moved, seconds=seconds)
        if position is None and op.id < self.step:
            touched = {self.key[x][0] for x in (*op.reads, *op.mutates) if x in self.key}
            if touched & set(range(1, len(self.stack) - 1)):
                raise Unsupported(f"`{op.site.op}` outside of the layers reads inside of them", hint=_HINT)
        reads, writes, mutates = (tuple(self._tensor(x, position) for x in some) for some in (op.reads, op.writes, op.mutates))
        site = replace(op.site, module=self._renamed(op.site.module, position))
        return replace(op, id=number, site=site, reads=reads, writes=writes, mutates=mutates)

    def _size(self, x: int) -> int:
        """Bytes before they are rounded up."""
        t = self.trace.tensors[x]
        return prod(t.shape) * WIDTHS.get(t.dtype, 4)

    def _all(self, tensors: Sequence[int]) -> tuple[int, ...]:
        found: list[int] = []
        for x in tensors:
            layer = self.key[x][0] if x in self.key else None
            places = range(1, 2 + self.more) if layer == 1 else [None]
            found += [self._tensor(x, at) for at in places]
        return tuple(found)

    def _tensors(self, ops: Sequence[Op]) -> dict[int, TensorInfo]:
        born = {x: op.id for op in ops for x in op.writes}
        found: dict[int, TensorInfo] = {}
        for x, t in self.trace.tensors.items():
            if x not in self.key:
                found[x] = replace(t, born=born.get(x, -1), freed=self._moment(t.freed, None))
        for x in list(self.key):
            layer = self.key[x][0]
            for at in range(1, 2 + self.more) if layer == 1 else [self._position(layer)]:
                new = self._tensor(x, at)
                t = self.trace.tensors[x]
                name = self._renamed(t.name, at)
                found[new] = replace(t, id=new, name=name, born=born.get(new, -1), freed=self._moment(t.freed, at))
        return found

    def _saves(self) -> tuple[tuple[Save, ...], dict[tuple[int, int | None], int]]:
        made: list[tuple[int, int | None, int, Save]] = []
        owner = {n: layer for layer, block in enumerate(self.stack) for n in block.saves}  # an input is packed before its op
        others = {n for block in self.trace.blocks if block not in self.stack for n in block.saves}
        for n, save in enumerate(self.trace.saves):
            at = self.where.get(save.packed)
            layer = owner.get(n, None if at is None or n in others else at.layer)
            places: Sequence[int | None] = (
                range(1, 2 + self.more) if layer == 1 else [None if layer is None else self._position(layer)]
            )
            for place in places:
                packed, unpacked, released = (self._moment(k, place) for k in (save.packed, save.unpacked, save.released))
                tensor = self._tensor(save.tensor, place)
                new = Save(tensor=tensor, packed=-1 if packed is None else packed, unpacked=unpacked, released=released)
                made.append((new.packed, place, n, new))
        begin = min(owner, default=0)
        made.sort(key=lambda m: (m[0], m[1] if m[1] is not None else -1 if m[2] < begin else self.end, m[2]))
        return tuple(m[3] for m in made), {(n, place): at for at, (_, place, n, _) in enumerate(made)}

    def _blocks(self, saves: dict[tuple[int, int | None], int]) -> tuple[Block, ...]:
        found: list[Block] = []
        new: dict[int, int] = {}
        layers = {b.id: n for n, b in enumerate(self.stack)}
        for block in self.trace.blocks:
            layer = layers.get(block.id)
            places: Sequence[int | None] = [None] if layer is None else [self._position(layer)]
            if layer == 1:
                places = range(1, 2 + self.more)
            new[block.id] = len(found)
            for place in places:
                made = self._block(block, place, saves, len(found))
                same = None if block.same_as is None else new[block.same_as]
                if same is None and place is not None and place > 1 and layer == 1:
                    same = new[block.id]
                found.append(replace(made, same_as=same))
        return tuple(found)

    def _block(self, block: Block, place: int | None, saves: dict[tuple[int, int | None], int], number: int) -> Block:
        first, last, backward = (self._moment(k, place) for k in (block.first, block.last, block.backward))
        assert first is not None and last is not None
        return replace(
            block,
            id=number,
            module=self._renamed(block.module, place),
            first=first,
            last=last,
            backward=backward,
            inputs=tuple(self._tensor(x, place) for x in block.inputs),
            outputs=tuple(self._tensor(x, place) for x in block.outputs),
            saves=tuple(saves[n, place] for n in block.saves) if saves else (),
            beside=tuple(k for k in (self._moment(b, place) for b in block.beside) if k is not None),
        )
