"""Optimizer states of some layers of a rank live in host memory, and pass through the device one by one when it updates.

    optimizer = pipe.optimizer(lambda parameters: torch.optim.AdamW(parameters))
    optimizer.step()    for every placed parameter: its states come, the user's own rule updates, its states leave

The optimizer is the user's. Placed parameters are taken out of its groups while its own step runs, and were updated before by
the same rule, so weights have the bits of plain training for every rule that treats parameters separately. In
`optimizer.state` their states are tensors of the host's memory: checkpoints read and fill them as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from holdall.errors import Unsupported
from holdall.runtime.states.packing import Layout, like
from holdall.tiers import Keeper, let_wait
from holdall.updates.parts import Groups, Part, is_separable, snapshot

State = dict[str, Any]


def parameters_of(place: Collection[int], modules: Mapping[int, torch.nn.Module]) -> dict[int, list[torch.nn.Parameter]]:
    """Number of a layer that is to be placed -> its parameters. `modules`: number of a stage's first layer -> the stage."""
    layers = ((n, layer) for first, module in modules.items() for n, layer in enumerate(module.children(), first))
    return {n: list(layer.parameters()) for n, layer in layers if n in place}


class PlacedStates:
    """`predicted`: bytes that the host will hold; `passing`: the most of them that are on the device at once in a step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, layers: Mapping[int, Sequence[torch.nn.Parameter]], store: Keeper
    ) -> None:
        """`layers`: number -> its parameters."""
        if not is_separable(optimizer):
            raise Unsupported(
                f"{type(optimizer).__name__} updates all parameters together, so the states of some cannot be elsewhere",
                hint="use a rule that treats parameters separately, such as AdamW, or leave `place` out",
            )
        self._store = store
        left = {id(p) for group in optimizer.param_groups for p in group["params"]}  # a shared one is of its first layer
        self._layers: dict[int, _LayerStates] = {}
        for n, parameters in layers.items():
            self._layers[n] = _LayerStates([p for p in parameters if id(p) in left], self._store)
            left -= {id(p) for p in parameters}
        self._aside: list[list[torch.Tensor]] = []  # the optimizer's groups, while its own step runs
        groups = snapshot(optimizer)
        sizes = [size for layer in self._layers.values() for size in layer.expected(optimizer, groups)]
        self.predicted, self.passing = sum(sizes), max(sizes, default=0)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers, in the model."""
        return list(self._layers)

    @property
    def used(self) -> int:
        """Bytes that the host holds now."""
        return self._store.used

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise Unsupported(
                "optimizer.step(closure) computes gradients inside the step, before which placed states are updated",
                hint="call `pipe.step(...)` first, and `optimizer.step()` without a closure",
            )
        groups = snapshot(optimizer)
        for layer in self._layers.values():
            layer.update(optimizer, groups)
        placed = {id(p) for layer in self._layers.values() for p in layer.parameters}
        self._aside = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in placed]

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, parameters in zip(optimizer.param_groups, self._aside, strict=True):
            group["params"] = parameters


class _LayerStates:
    """The states of one layer's parameters, each in a stretch of host memory of its own."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], store: Keeper) -> None:
        self.parameters, self._store = parameters, store
        self._at_host: list[dict[str, _HostTensor]] = [{} for _ in parameters]  # by parameter: name of a state -> where it is

    def expected(self, optimizer: torch.optim.Optimizer, groups: Groups) -> list[int]:
        """Bytes of each parameter's states, by an update of a copy with a gradient of zeros."""
        part, found = Part(optimizer, self.parameters), []
        for n, p in enumerate(self.parameters):
            there = optimizer.state.get(p, {})  # some rules make them at once
            state: State = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in there.items()}
            if p.requires_grad:
                part.step([p.detach().clone()], [torch.zeros_like(p)], [state], groups, [n])
            found.append(sum(t.nbytes for t in state.values() if _is_large(t)))
        return found

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        part = Part(optimizer, self.parameters)
        for n, p in enumerate(self.parameters):
            if p.grad is not None:
                state = self._fetched(n, optimizer.state.get(p, {}))
                part.step([p.detach()], [p.grad], [state], groups, [n])
                self._leave(n, state)
                optimizer.state[p] = state

    def _fetched(self, n: int, state: State) -> State:
        """With tensors of the device in the place of the host's; what somebody else has put there stays as it is."""
        here = self._at_host[n]
        return {key: here[key].fetch() if key in here and here[key].view is t else t for key, t in state.items()}

    def _leave(self, n: int, state: State) -> None:
        """Put tensors of the host in the place of the device's."""
        here = self._at_host[n]
        for key in [key for key in here if key not in state or not here[key].takes(state[key])]:
            here.pop(key).free()
        for key, t in state.items():
            if _is_large(t):
                if key not in here:
                    here[key] = _HostTensor(t, self._store)
                state[key] = here[key].put(t)


class _HostTensor:
    """A state in host memory: `view` is the tensor there."""

    def __init__(self, tensor: torch.Tensor, store: Keeper) -> None:
        self._store, self._device, self._like = store, tensor.device, like(tensor)
        self._ticket = store.reserve(tensor.nbytes)
        (self.view,) = Layout.of([self._like]).views(store.memory(self._ticket))

    def takes(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and like(tensor) == self._like

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the device there."""
        same = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        self._store.push(self._ticket, _bytes_of(same))
        self._store.arrived(self._ticket)  # for whoever reads `view`
        self._store.wait(self._ticket)  # lets go of the device's memory
        return self.view

    def fetch(self) -> torch.Tensor:
        """Copy it to the device."""
        shape, stride, dtype = self._like
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
        arrival = self._store.pull(self._ticket, _bytes_of(tensor))
        if arrival is not None:  # `wait_in` waits for what a store makes itself
            let_wait(arrival, self._device)
        return tensor

    def free(self) -> None:
        self._store.free(self._ticket)


def _is_large(value: Any) -> bool:
    """Is it a state that leaves? Counters stay."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
