"""The policy of one block call, filled in by the installed actions, and the forward that follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdall.ops import backward_nodes
from holdall.runtime.activations.compress import Compression, compress_saved
from holdall.runtime.activations.layer_swap import Lent, SparseGroup, SwappedPart, SwappedSaves, SwapPolicy, swap_saved
from holdall.runtime.activations.offload import Bank, OffloadedGroup, OffloadedPart, OffloadedSaves, offload_saved
from holdall.runtime.activations.recompute import ByProgram, Segment
from holdall.runtime.activations.resident import CallSaves, Resident
from holdall.runtime.states.engine import Engine
from holdall.tiers import Stores
from holdall.types.program import Nest
from holdall.updates.interception import current_backward


@dataclass
class Policy:
    """Filled in by actions when they are installed. The default keeps every saved tensor."""

    recompute: bool = False
    opens: bool = True  # begins a new segment instead of joining the previous one
    closes: bool = True  # ends its segment
    keep: frozenset[str] = frozenset()  # ops whose results are kept, as `aten.mm.default#3`
    only: frozenset[int] = frozenset()  # indices of the saved tensors to drop; empty: all
    inner: tuple[Nest, ...] = ()  # nested segments inside the segment that this call opens
    state: tuple[str, ...] = ()  # buffers that the block changes, by name in the model
    alters: frozenset[str] = frozenset()  # Python attributes that it changes, by their paths in its module
    offloads: list[OffloadedPart] = field(default_factory=list)  # with `compress`, the codes leave
    swaps: list[SwapPolicy] = field(default_factory=list)  # what leaves while the block runs
    lends: str | None = None  # a later block swaps what this one holds, too, to this tier
    compress: Compression | None = None
    runner: Callable[..., Any] | None = None  # runs the block by a program: (module, forward, args, kwargs, ...) -> output


class Blocks:
    """Runs every block call by its policy. Keeps nothing of a step beyond what the policies ask for."""

    def __init__(
        self,
        policies: dict[str, Policy],
        stores: Stores,
        bank: Bank,
        resident: Resident,
        engine: Engine | None = None,
    ) -> None:
        self._policies = policies
        self._stores = stores
        self._bank = bank
        self._resident = resident
        self._engine = engine
        self._open: Segment | None = None
        self._leaving: dict[
            str, list[OffloadedGroup]
        ] = {}  # block after whose forward they are freed -> groups; "": the next block
        self._awaited: dict[str, list[OffloadedGroup]] = {}  # block -> groups to fetch when its backward begins
        self._triggers = {part.fetch for p in policies.values() for part in p.offloads if part.fetch}
        self._expected: dict[str, list[OffloadedGroup]] = {}  # block -> groups that its backward waits for
        self._departing: dict[str, list[SwappedPart]] = {}  # block -> those whose copies begin after its forward
        self._lent: Lent = Lent()
        self._triggers |= {name for p in policies.values() for swap in p.swaps for name in (swap.fetch, swap.arrive) if name}

    def restart(self) -> None:
        """Begin a new step: forget the open groups of an aborted one."""
        self._open = None
        self._leaving = {}
        self._awaited = {}
        self._expected = {}
        self._departing = {}
        self._lent = Lent()

    def run(self, name: str, module: torch.nn.Module, forward: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        """Run the block's forward under its policy; its weights are on the device."""
        engine = self._engine
        if engine is not None:
            engine.need(name)
        out = self._run(name, module, forward, buffers, args, kwargs)
        if engine is not None:
            engine.leave(name)
            is_asked = engine.streaming.is_needed and torch.is_grad_enabled()
            if is_asked and at_backward(out, lambda: engine.streaming.backward_begins(name)):
                engine.streaming.expect_backward(name)
        if name in self._triggers and torch.is_grad_enabled():
            self._fetch_at(name, out)  # after the weights: this block may wait for them, and the link serves in order
        return out

    def _run(self, name: str, module: torch.nn.Module, forward: Any, buffers: Any, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        policy = self._policies.get(name)
        swaps = (
            (policy.swaps or ([SwapPolicy(until=name, tier=policy.lends)] if policy.lends is not None else []))
            if policy is not None
            else []
        )
        groups = [self._group(part) for part in policy.offloads] if policy is not None else []
        own = self._resident.call(module)
        saves = OffloadedSaves(groups, (args, kwargs), own) if groups else None
        if policy is None:
            out = forward(*args, **kwargs)
        elif policy.recompute:
            segment = Segment(policy.inner) if policy.opens or self._open is None else self._open
            self._open = None if policy.closes else segment
            state = [buffers[b] for b in policy.state]
            made_by = forward if policy.runner is None else ByProgram(policy.runner, module, forward)
            how: dict[str, Any] = {"state": state, "alters": policy.alters, "keep": policy.keep, "only": policy.only}
            how["saves"] = own
            if saves is not None:
                how["hold"] = saves.take
            out, call = segment.run(module, made_by, args, kwargs, **how)
            if saves is not None:
                saves.leave(out, call)
        elif policy.runner is not None and swaps:
            runner = policy.runner

            def by_program(swapped: SwappedSaves) -> Any:
                swapped.begin((args, kwargs))
                return runner(module, forward, args, kwargs, swapped)

            out = self._swap(swaps, name, own, by_program)
        elif policy.runner is not None:
            out = policy.runner(module, forward, args, kwargs, saves)
        elif policy.compress is not None:
            out = compress_saved(policy.compress, groups[0] if groups else None, own, forward, args, kwargs)
        elif saves is not None:
            out = offload_saved(saves, forward, args, kwargs)
        elif swaps:
            out = self._swap(swaps, name, own, lambda swapped: swap_saved(swapped, forward, args, kwargs))
        else:
            out = forward(*args, **kwargs)
        for departing in self._departing.pop(name, ()):
            departing.depart()
        if self._leaving:
            for earlier in (*self._leaving.pop("", ()), *self._leaving.pop(name, ())):
                earlier.let_go()
        for group in groups:
            if group.part.lag:
                self._leaving.setdefault(group.part.until, []).append(group)
        return out

    def _swapped(self, policy: SwapPolicy) -> OffloadedGroup:
        store, part = self._stores.at(policy.tier), OffloadedPart(lag=True)
        return SparseGroup(store, self._bank, part, policy.width) if policy.width else OffloadedGroup(store, self._bank, part)

    def _swap(self, policies: Sequence[SwapPolicy], name: str, saves: CallSaves, run: Callable[[SwappedSaves], Any]) -> Any:
        """Run a block whose feature maps leave while it runs, or are lent to a later block that lets them leave."""
        parts = [SwappedPart(self._swapped(p), p) for p in policies]
        out = run(SwappedSaves(parts, self._lent, saves))
        for part in parts:
            policy, group = part.policy, part.group
            self._departing.setdefault(policy.begin or name, []).append(part)
            self._leaving.setdefault(policy.until, []).append(group)
            for table, block in ((self._awaited, policy.fetch), (self._expected, policy.arrive)):
                if block:
                    table.setdefault(block, []).append(group)
        return out

    def _group(self, part: OffloadedPart) -> OffloadedGroup:
        group = part.group(self._stores.at(part.tier), self._bank)
        if part.fetch:
            self._awaited.setdefault(part.fetch, []).append(group)
        return group

    def _fetch_at(self, name: str, out: Any) -> None:
        """When the backward of this block begins, wait for the groups that it expects and fetch those that wait for it; those
        of later blocks, needed sooner, first."""
        groups, expected = self._awaited.pop(name, []), self._expected.pop(name, [])

        def fetch() -> None:
            for group in expected:
                group.arrive()
            for group in reversed(groups):
                group.fetch()

        at_backward(out, fetch)


def at_backward(out: Any, call: Callable[[], None]) -> bool:
    """Register `call` for the beginning of the backward through `out`, once per backward. Returns whether there will be a
    backward.
    """
    latest = -1

    def begins(_: object) -> None:
        nonlocal latest
        if latest != current_backward():
            latest = current_backward()
            call()

    nodes = backward_nodes(out)
    for node in nodes:
        node.register_prehook(begins)
    return bool(nodes)
