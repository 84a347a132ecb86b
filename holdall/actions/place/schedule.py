"""The schedule side of `place`: the operations of the runtime's engine, in its order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdall.actions.place.updates import PlacedUpdate, Updates, waited
from holdall.errors import Unsupported
from holdall.types import Block, Copy, Kind, Op, Phase, Problem, Run, Schedule, Step, Trace, Unit, Wait
from holdall.types.layout import ALIGN, ELEMENTWISE_NAMES, allocated_bytes, flat_bytes, round_up, stretch_bytes
from holdall.types.trace import OpId, TensorId, once_per_trace

if TYPE_CHECKING:
    from holdall.actions.place import Place


def users(trace: Trace) -> dict[str, list[Block]]:
    """Unit -> the block calls whose forward uses its weights."""
    return once_per_trace(trace, "_users", _users)


def _users(trace: Trace) -> dict[str, list[Block]]:
    owner = {x: u.name for u in trace.units for x in u.weights}
    found: dict[str, dict[int, Block]] = {u.name: {} for u in trace.units}
    for block in trace.blocks:
        for op in trace.ops[block.first : block.last + 1]:
            for x in (*op.reads, *op.mutates):
                if x in owner:
                    found[owner[x]][block.id] = block
    return {name: list(blocks.values()) for name, blocks in found.items()}


def streamable(trace: Trace) -> set[str]:
    """Units whose weights may be streamed: one call of their block uses them, and nothing outside of it does.

    In backward they are on the device from the start of the block's backward until all their gradients are complete.
    """
    return set(once_per_trace(trace, "_streamable", _streamable))


def _streamable(trace: Trace) -> set[str]:
    owner = {x: u.name for u in trace.units for x in u.weights}
    used = {name: blocks[0] for name, blocks in users(trace).items() if len(blocks) == 1 and _is_in(name, blocks[0].module)}
    grads = {u.name: u.grads if len(u.grads) == len(u.weights) else () for u in trace.units}
    made = {name: [k for g in grads[name] for k in trace.uses(g) if _is_backward(trace.ops[k])] for name in used}
    gone = {name: trace.node_ends.get(max(at), max(at)) for name, at in made.items() if at}
    for op in trace.ops:
        for x in op.reads:
            name = owner.get(x, "")
            block = used.get(name)
            if block is None:
                continue
            if op.site.phase is Phase.FORWARD and not block.first <= op.id <= block.last:
                del used[name]  # a chunked head reads its weight in the loss
            elif _is_backward(op) and not _from(block.backward, len(trace.ops)) < op.id <= gone.get(name, op.id):
                del used[name]  # another block saved it
    return set(used)


def _is_in(unit: str, module: str) -> bool:
    """Is the unit's module this one or inside of it? If not, other modules read it, before its own call."""
    return not module or unit == module or unit.startswith(f"{module}.")


def _is_backward(op: Op) -> bool:
    return op.site.phase is Phase.BACKWARD


def _from(begins: int | None, never: int) -> int:
    return never if begins is None else begins


def read_by_hand(trace: Trace) -> set[str]:
    """Units with weights that the loop reads outside of every module's forward, because it calls parts of the model directly:
    no hook can fetch them first."""
    return once_per_trace(trace, "_read_by_hand", _read_by_hand)


def _read_by_hand(trace: Trace) -> set[str]:
    if not trace.about.parts:
        return set()
    bare = [op for op in trace.ops if op.site.phase is Phase.FORWARD and not op.site.module]
    read = {x for op in bare for x in (*op.reads, *op.mutates)}
    return {u.name for u in trace.units if read.intersection(u.weights)}


def states_stay(trace: Trace, unit: Unit) -> str:
    """Why a unit's masters and states cannot be updated in stretches; empty: they can."""
    if trace.about.optimizer not in ELEMENTWISE_NAMES:
        return f"{trace.about.optimizer} does not update each element separately"
    if unit.grads and len(_shaped(trace, unit)) % len(unit.grads):
        return "its parameters do not have the same states"
    if not trace.about.precision and len(unit.grads) < len(unit.weights):
        return "some of its weights are frozen, and the model computes with the masters themselves"
    return ""


def _shaped(trace: Trace, unit: Unit) -> list[TensorId]:
    """States of a unit without scalar counters."""
    return [x for x in unit.states if trace.tensors[x].shape]


def _empty_steps(trace: Trace) -> dict[OpId, Run]:
    """The optimizer's ops as runs without work."""
    steps = (op for op in trace.ops if op.site.phase is Phase.STEP)
    return {op.id: Run(op=op.id, reads=(), writes=(), name=op.site.op) for op in steps}


def rewrite_placed(schedule: Schedule, problem: Problem, place: Place) -> Schedule:
    return _Rewrite(schedule, problem, place).apply()


class _Rewrite(Updates):
    def apply(self) -> Schedule:
        self._remove_step()
        self._locate()
        for placed in self.units:
            self._settle(placed)
        self._move_into_chunks()
        self._make_buffers()
        for placed in self.units:
            if placed.streamed:
                self._stream(placed)
        before: TensorId = -1
        for placed in sorted((p for p in self.units if p.ready >= 0), key=lambda p: p.ready):
            before = self._gradient(placed, before)
        if before >= 0:
            self.schedule.insert(self.end, [Wait(tensors=(before,))])
        self.make_updates()
        self.schedule.placed = sum(len(unit.grads) for unit in self.trace.units)
        return self.schedule

    # sizes and tiers

    def _remove_step(self) -> None:
        """Empty the optimizer's own step."""
        self.schedule.runs.update(once_per_trace(self.trace, "_empty_steps", _empty_steps))

    def _locate(self) -> None:
        used = users(self.trace)
        can = streamable(self.trace)
        by_hand = read_by_hand(self.trace)
        for unit, (_, weights, update) in zip(self.trace.units, self.place.units, strict=True):
            blocks = used[unit.name]
            streamed = weights == "streamed"
            if unit.name in by_hand and (streamed or update != "device" or self.is_narrow):
                raise Unsupported(
                    f"`{unit.name or 'the model'}` has a parameter that the loop reads outside of every module's forward",
                    hint='let the loop call the whole model instead of its parts, or plan with allow=["recompute", "offload"]',
                )
            if streamed and len(blocks) != 1:
                raise Unsupported(
                    f"`{unit.name}` cannot be streamed: {len(blocks)} blocks use its weights",
                    hint='place it as "resident"',
                )
            if streamed and unit.name not in can:
                raise Unsupported(
                    f"`{unit.name}` cannot be streamed: its weights are read outside of its block",
                    hint='place it as "resident"',
                )
            cast = streamed and update == "device" and self.is_narrow and 0 < len(unit.grads) == len(unit.weights)
            is_mixed = not self.is_narrow and len(unit.grads) < len(
                unit.weights
            )  # trained and frozen weights would not be contiguous
            if streamed and unit.numel and not cast and (update == "device" or (update == "via_device" and is_mixed)):
                raise Unsupported(
                    f"`{unit.name}` cannot be streamed with update={update!r}",
                    hint='use update="host"' + ("" if is_mixed else ' or update="via_device"'),
                )
            made = [max((k for k in self.trace.uses(g) if k <= self.end), default=-1) for g in unit.grads]
            last = [self.trace.node_ends.get(k, k) for k in made]  # a node of the graph hands its gradients on when it ends
            first = blocks[0] if blocks else None
            at = self._first_read(unit)
            placed = PlacedUpdate(unit, streamed, update, first, max(last, default=-1), first=at, cast=cast)
            self.units.append(replace(placed, tier=self._tier(unit, update), states=self._tier_of_states(unit, update)))

    def _tier(self, unit: Unit, update: str) -> str:
        """The tier of a unit's tensors that are not on the device."""
        named = dict(self.place.elsewhere).get(unit.name, "")
        if named and (update == "via_device" or self.place.ahead):
            how = "updated via the device" if update == "via_device" else "updated speculatively"
            raise Unsupported(
                f"`{unit.name}` cannot be {how} from `{named}`: its states must be in host memory",
                hint='leave it out of `elsewhere`, or use update="host" with when="step"',
            )
        return self.problem.other(named) if self.hardware.others else ""

    def _tier_of_states(self, unit: Unit, update: str) -> str:
        """The tier of a unit's masters and states if they are updated in stretches; empty: they are not."""
        named = dict(self.place.states).get(unit.name, "")
        if not named or not unit.grads or self.problem.other(named) == self.far:
            return ""
        is_by_host = update == "host" and not self.place.ahead
        why = states_stay(self.trace, unit) if is_by_host else "they must be updated by the host, and not speculatively"
        if why:
            raise Unsupported(
                f"the states of `{unit.name}` cannot be in `{named}`: {why}",
                hint='use update="host" and an elementwise optimizer such as AdamW, or leave the unit out of `states`',
            )
        return self.problem.other(named)

    def _make_buffers(self) -> None:
        """Host memory that stretches of states pass through."""
        away = [p for p in self.units if p.states]
        for placed in away:
            shaped = _shaped(self.trace, placed.unit)
            each = len(shaped) // len(placed.unit.grads)
            size = sum(self.schedule.info(x).nbytes for x in (shaped if self.is_narrow else placed.unit.weights))
            masters = size // each if self.is_narrow else size
            self.units[placed.unit.id] = replace(placed, far_bytes=masters, sections=each + (0 if self.is_narrow else 1))
        if away:
            away = [p for p in self.units if p.states]
            room = stretch_bytes((p.far_bytes for p in away), self.place.stretch) * max(p.sections for p in away)
            like = self.trace.tensors[away[0].unit.weights[0]]
            for _ in range(self.place.buffers):
                self.stretches.append(self.schedule.add(like, name="room for a stretch", kind=Kind.STATE, nbytes=room))
                self._there(self.stretches[-1])

    def _first_read(self, unit: Unit) -> OpId:
        """The op before which its weights must be on the device; a block's are waited for where the block begins."""
        reads = [k for x in unit.weights for k in self.trace.uses(x) if self.trace.ops[k].site.phase is Phase.FORWARD]
        if not reads:
            return -1
        first = min(reads)
        return min([first, *(b.first for b in self.trace.blocks if b.first <= first <= b.last)])

    def _settle(self, placed: PlacedUpdate) -> None:
        """Sizes and tiers of tensors that live for the whole step."""
        unit, schedule = placed.unit, self.schedule
        swapped = self.is_narrow or placed.streamed or placed.update != "device"
        if swapped:  # one flat buffer, tensors aligned in it
            for x in unit.weights:
                info = schedule.info(x)
                schedule.added[x] = replace(info, nbytes=round_up(info.nbytes, ALIGN))
        if placed.cast and placed.block is not None:
            for x in unit.weights:
                schedule.added[x] = replace(schedule.info(x), born=placed.block.first)
                schedule.holds[x] = []
        if placed.cast or (placed.update == "device" and not placed.streamed):
            if self.problem.accumulate > 1:
                self._accumulated(unit, "")
            return
        if self.problem.accumulate > 1 and placed.update != "device":
            self._accumulated(unit, self.far)
        for x in unit.states:
            info = schedule.info(x)
            schedule.start[x] = placed.states if info.shape and placed.states else self.far
            if (placed.update == "via_device" or placed.states) and info.shape:
                # flat buffers, tensors aligned in them; scalar counters stay where they are
                schedule.added[x] = replace(info, nbytes=round_up(info.nbytes, ALIGN))
        like = self.trace.tensors[unit.weights[0]]
        grads = flat_bytes(self.trace.tensors[g].nbytes for g in unit.grads)
        weights = sum(schedule.info(x).nbytes for x in unit.weights)
        masters: tuple[TensorId, ...] = ()
        if placed.streamed:  # streamed weights have a permanent copy in the tier
            for x in unit.weights:
                schedule.start[x] = self.source(placed)
                schedule.holds[x] = []
            masters = () if self.is_narrow else unit.weights
        elif not self.is_narrow:
            masters = (schedule.add(like, name=f"{unit.name}: masters", nbytes=weights),)
            self._there(masters[0], self.source(placed))
        if grads and placed.update != "device":
            if placed.streamed and self.is_narrow and self.place.share and grads == weights:
                buffer = unit.weights
            else:
                buffer = (schedule.add(like, name=f"{unit.name}: gradients", kind=Kind.GRAD, nbytes=grads),)
                self._there(buffer[0], placed.tier)
            self.units[unit.id] = replace(placed, buffer=buffer, masters=masters)
            if self.is_ahead(placed):
                values = flat_bytes(self.trace.tensors[x].nbytes for x in unit.states)
                self._there(schedule.add(like, name=f"{unit.name}: ahead", kind=Kind.STATE, nbytes=values + grads))

    def _accumulated(self, unit: Unit, tier: str) -> None:
        """Gradients of the step's earlier backwards, in the parameters' precision; counted for the whole step (upper bound)."""
        size = sum(self.trace.tensors[g].nbytes for g in unit.grads) * (2 if self.is_narrow else 1)
        if size:
            like = self.trace.tensors[unit.weights[0]]
            sums = self.schedule.add(like, name=f"{unit.name}: gradients so far", kind=Kind.GRAD, nbytes=size)
            self.schedule.holds[sums] = [(len(self.trace.ops), 0)]
            if tier:
                self.schedule.start[sums] = tier

    def _move_into_chunks(self) -> None:
        """With updates via the device, parameters move next to their states on the host when the states are made. While the
        units move one by one, the old memory of the moving unit's parameters is still in use."""
        passing = [
            p.unit for p in reversed(self.units) if p.update == "via_device" and p.unit.numel
        ]  # in the order of gradients
        masters = [sum(self.schedule.info(x).nbytes for x in u.weights) * (2 if self.is_narrow else 1) for u in passing]
        states = [sum(self.schedule.info(x).nbytes for x in u.states) for u in passing]
        chunks = [s if self.is_narrow else s + h for s, h in zip(states, masters, strict=True)]  # narrow: masters are states
        moving = [sum(chunks[: k + 1]) + sum(masters[k:]) for k in range(len(passing))]
        more = max(moving, default=0) - sum(chunks)
        if more > 0:
            like = self.trace.tensors[passing[0].weights[0]]
            self._there(self.schedule.add(like, name="parameters on their way beside their states", nbytes=more))

    def _there(self, tensor: TensorId, tier: str = "") -> None:
        self.schedule.start[tensor] = tier or self.far

    # streamed weights

    def _stream(self, placed: PlacedUpdate) -> None:
        unit, block = placed.unit, placed.block
        assert block is not None
        again = self.schedule.replays.get(block.id)
        if again is not None and block.backward is not None and again < block.backward:
            raise Unsupported(
                f"`{unit.name}` cannot be streamed: it is recomputed in a segment with other blocks",
                hint='recompute it in a segment of its own, or place it as "resident"',
            )
        if placed.cast:
            self._cast(placed, block)
            return
        fetch = Copy(tensors=unit.weights, src=self.source(placed), dst=self.home, name=unit.name)
        wait = Wait(tensors=unit.weights)
        blocks = self.trace.blocks
        streaming = sorted(p.block.id for p in self.units if p.streamed and not p.cast and p.block is not None)
        at, ahead = streaming.index(block.id), self.place.prefetch
        from_block = blocks[streaming[at - ahead]] if at >= ahead else blocks[0]
        self.before(from_block.first if self.place.overlap else block.first, [fetch])
        self.before(block.first, [wait])
        self.schedule.hold_more(unit.weights, (block.last, 0))
        if block.backward is None:
            return
        later = [b for b in blocks[block.id + 1 :] if b.backward is not None]
        after = blocks[streaming[at + ahead]] if at + ahead < len(streaming) else (later[-1] if later else block)
        begins = after.backward if after.backward is not None and self.place.overlap else block.backward
        if begins < block.backward:
            self.schedule.insert(begins, [fetch], first=True)  # before the replay there
            self.schedule.insert(block.backward, [wait], first=True)
        else:
            self.schedule.insert(block.backward, [fetch, wait], first=True)
        whole = placed.ready >= 0 and len(unit.grads) == len(
            unit.weights
        )  # frozen weights may be needed for earlier blocks' gradients
        gone = placed.ready if whole else self._next_backward(block)
        self.schedule.hold_more(unit.weights, (gone, 0))

    def _cast(self, placed: PlacedUpdate, block: Block) -> None:
        """Cast weights from masters on the device, right before each use."""
        unit = placed.unit
        moved = 3 * sum(self.schedule.info(x).nbytes for x in unit.weights)  # masters have twice the bytes
        seconds = moved / self.hardware.bandwidth + self.hardware.overhead
        run = Run(op=-1, reads=(), writes=unit.weights, seconds=seconds, name=f"weights of {unit.name}")
        self.before(block.first, [run])
        self.schedule.hold_more(unit.weights, (block.last, 0))
        if block.backward is not None:
            self.schedule.insert(block.backward, [run], first=True)
            self.schedule.hold_more(unit.weights, (placed.ready, 0))

    def _next_backward(self, block: Block) -> OpId:
        """The start of the preceding block's backward: weights without gradients stay until then."""
        earlier = [b.backward for b in self.trace.blocks[: block.id] if b.backward is not None]
        return earlier[-1] if earlier else self.end

    # gradients

    def _gradient(self, placed: PlacedUpdate, before: TensorId) -> TensorId:
        """Gradients are complete: keep them, or gather and copy them to the host. Returns the buffer being copied."""
        unit, schedule = placed.unit, self.schedule
        if placed.update == "device":
            if self.is_narrow:
                schedule.insert(placed.ready, [self._norms(unit)])
            return before
        for g in unit.grads:
            schedule.holds[g] = [(placed.ready, 0)]
        size = sum(schedule.info(x).nbytes for x in placed.buffer)
        flat = schedule.add(self.trace.tensors[unit.grads[0]], name=f"{unit.name}: leaving", nbytes=size, born=placed.ready)
        seconds = 2 * size / self.hardware.bandwidth + self.hardware.overhead
        steps: list[Step] = [Wait(tensors=(before,))] if before >= 0 else []
        if self.place.when != "backward":
            steps.insert(0, self._norms(unit))
        steps.append(Run(op=-1, reads=unit.grads, writes=(flat,), seconds=seconds, name=f"gather gradients of {unit.name}"))
        steps.append(Copy(tensors=(flat,), src=self.home, dst=placed.tier, lands=False, uses=placed.buffer, name=unit.name))
        if self.place.when == "backward":
            made = self.elsewhere(placed)
            steps += made if placed.update == "host" else [*made, waited(made)]
        elif self.is_ahead(placed) and not self.problem.clipped:
            steps.append(self.host_steps(placed)[0])
        if not self.place.overlap:
            steps.append(Wait(tensors=(flat,)))
        schedule.insert(placed.ready, steps)
        return flat if self.place.overlap else -1

    def _norms(self, unit: Unit) -> Run:
        """One number per gradient, for loops that clip."""
        size = allocated_bytes(4 * len(unit.grads), self.hardware.device)
        norms = self.schedule.add(self.trace.tensors[unit.grads[0]], name=f"{unit.name}: norms", kind=Kind.TEMP, nbytes=size)
        self.schedule.holds[norms] = [(self.end, 0)]
        moved = sum(self.trace.tensors[g].nbytes for g in unit.grads)
        seconds = moved / self.hardware.bandwidth + 2 * self.hardware.overhead
        return Run(op=-1, reads=unit.grads, writes=(norms,), seconds=seconds, name=f"norms of {unit.name}")
