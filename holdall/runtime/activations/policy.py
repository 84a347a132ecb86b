"""The policy of one block call, filled in by the installed actions, and the forward that follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdall.ops import backward_nodes
from holdall.runtime.activations.compress import Compression, compress_saved
from holdall.runtime.activations.offload import Bank, OffloadedGroup, OffloadedSaves, park_inputs, park_saved
from holdall.runtime.activations.recompute import ByProgram, Segment
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
    park: bool = False
    inputs: frozenset[int] = frozenset()  # its own inputs, by position
    lag: bool = False  # let parked storages go when the next block is over
    until: str = ""  # or when this one is
    fetch: str = ""  # block at whose backward to begin fetching; empty: at first use
    tier: str = ""  # where parked storages wait; empty: in the nearest tier
    compress: Compression | None = None  # with `park`, it is the codes that are parked
    runner: Callable[..., Any] | None = None  # runs the block by a program: (module, forward, args, kwargs, ...) -> output


class Blocks:
    """Runs every block call by its policy. Keeps nothing of a step beyond what the policies ask for."""

    def __init__(
        self,
        policies: dict[str, Policy],
        stores: Stores,
        bank: Bank,
        stay: Callable[[int], bool],
        engine: Engine | None = None,
    ) -> None:
        self._policies = policies
        self._stores = stores
        self._bank = bank
        self._stay = stay
        self._engine = engine
        self._open: Segment | None = None
        self._leaving: dict[
            str, list[OffloadedGroup]
        ] = {}  # block after whose forward they are freed -> groups; "": the next block
        self._awaited: dict[str, list[OffloadedGroup]] = {}  # block -> groups to fetch when its backward begins
        self._triggers = {p.fetch for p in policies.values() if p.fetch}

    def restart(self) -> None:
        """Begin a new step: forget the open groups of an aborted one."""
        self._open = None
        self._leaving = {}
        self._awaited = {}

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
        group: OffloadedGroup | None = None
        if policy is None:
            out = forward(*args, **kwargs)
        elif policy.recompute:
            segment = Segment(policy.inner) if policy.opens or self._open is None else self._open
            self._open = None if policy.closes else segment
            state = [buffers[b] for b in policy.state]
            made_by = forward if policy.runner is None else ByProgram(policy.runner, module, forward)
            out, call = segment.run(module, made_by, args, kwargs, state=state, keep=policy.keep, only=policy.only)
            if policy.park:
                group = self._group(policy)
                park_inputs(group, call, policy.inputs)
        elif policy.runner is not None:
            parking = None
            if policy.park:
                group = self._group(policy)
                parking = OffloadedSaves(group, (args, kwargs), policy.inputs, self._stay)
            out = policy.runner(module, forward, args, kwargs, parking)
        elif policy.compress is not None:
            group = self._group(policy) if policy.park else None
            out = compress_saved(policy.compress, group, forward, args, kwargs)
        elif policy.park:
            group = self._group(policy)
            out = park_saved(OffloadedSaves(group, (args, kwargs), policy.inputs, self._stay), forward, args, kwargs)
        else:
            out = forward(*args, **kwargs)
        if self._leaving:
            for earlier in (*self._leaving.pop("", ()), *self._leaving.pop(name, ())):
                earlier.let_go()
        if policy is not None and group is not None and policy.lag:
            self._leaving.setdefault(policy.until, []).append(group)
        return out

    def _group(self, policy: Policy) -> OffloadedGroup:
        group = OffloadedGroup(self._stores.at(policy.tier), self._bank, policy.lag)
        if policy.fetch:
            self._awaited.setdefault(policy.fetch, []).append(group)
        return group

    def _fetch_at(self, name: str, out: Any) -> None:
        """Fetch the waiting groups when the backward of this block begins."""
        groups = self._awaited.pop(name, [])

        def fetch() -> None:
            for group in groups:
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
