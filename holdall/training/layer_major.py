"""Layer-major accumulation: all micro-batches of a step through one layer, then through the next.

L2L, Pudipeddi et al. 2020, arXiv 2002.05645. With weights that are streamed from the host, a loop that accumulates gradients
loads every layer twice for every micro-batch; in this order every layer is loaded twice in a step, however many there are, and
the last one once.

    with LayerMajor(model, micro_batches[0], device="cuda") as run:
        for micro_batches in loader:
            losses = run(micro_batches)  # forward and backward of the step; gradients are in `p.grad`
            optimizer.step()
            optimizer.zero_grad()

Layers are the model's blocks, as a trace finds them (of an `nn.Sequential`, each member); what lies between two of them is kept
as plain training keeps it. Between the calls of a block its weights lie on the host; while a layer
computes, the next one's are on their way, so two are on the device. Of a layer only its inputs are kept, on the device or on
the host (`stash`); backward runs it again. Gradients of a layer are summed on the device over the micro-batches, in their
order, and leave once. The last block, and what follows it (the loss), run forward and backward for one micro-batch after the
other: only one's logits are there at a time. Parameters outside of the blocks, and those that several blocks use, stay on the
device.

With an `optimizer` each layer is updated by the host as soon as its gradients are there, beside the backward of the layer
before (the paper's eager parameter server): call neither `step` nor anything that reads gradients.

Exact where no parameter is used both before and after the blocks (gradients of a tied head are added up in another order), and
where the model draws no random numbers: in this order of the micro-batches, dropout draws other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from holdall import api
from holdall.actions.place.schedule import streamable, users
from holdall.decoding import train_without_cache
from holdall.errors import InvalidInput, Unsupported
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.patching import put_method
from holdall.runtime.states.host_room import HostRoom
from holdall.runtime.states.putting_back import put_unit_back
from holdall.runtime.states.unit import HOST, STREAMED, PlacedUnit, Placement, find_members
from holdall.runtime.states.weights.streaming import Streaming
from holdall.tiers import Store
from holdall.tiers._keepers import Keepers
from holdall.tiers.cpu import Cpu
from holdall.tiers.far import Far
from holdall.tracing.step import Loss, check_loss, default_loss
from holdall.training.layer_calls import ORDER, SKIPS, Layer, uncached
from holdall.training.lockstep import Lockstep, Meeting, Over, is_in_lockstep, meet
from holdall.types import Trace
from holdall.updates.parts import Part, snapshot
from holdall.updates.planned import refuse_planned


class LayerMajor:
    """Runs steps of a model layer by layer; closing it puts every parameter back where it came from.

    `batch`: a micro-batch, for the trace. `loss`: `(model, batch) -> scalar`, as for `fit`; divide by the number of
    micro-batches there if the loop does. `device`: where the model computes; None: where it lies. `measure`: count the bytes on
    the device in every step (`peaks`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: Any,
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: str | torch.device | None = None,
        stash: str = "device",
        measure: bool = False,
    ) -> None:
        if stash not in ("device", "host"):
            raise InvalidInput(f"`stash` is {stash!r}", hint='use "device" or "host"')
        refuse_planned(model)
        first = next(model.parameters(), None)
        self.model, self.optimizer = model, optimizer
        self.device = torch.device(device) if device is not None else torch.device("cpu") if first is None else first.device
        self.loads = 0  # of a layer's weights, since the beginning
        self.peaks: list[int] = []  # bytes on the device, step by step
        self._loss = loss or default_loss
        self._measures = measure
        self._ledger: Ledger | None = None
        self.layers: list[Layer] = []
        self.is_ending = False  # backward is in what follows the last layer
        layers = find_layers(api.trace(model, batch, optimizer="sgd", loss=loss, device=self.device, head="whole"))
        if not layers:
            raise Unsupported("the model has no block whose weights only it uses", hint=ORDER)
        self.store: Store = Cpu(device=self.device) if self.device.type == "cuda" else Far(device=self.device)
        self._keepers = Keepers({self.store.name: self.store}, self.store.name)
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="holdall-eager")
        self._undo = ExitStack()
        try:
            self.layers = self._set_up(layers, stash)
        except BaseException:
            self.close()
            raise

    def _set_up(self, layers: dict[str, tuple[str, ...]], stash: str) -> list[Layer]:
        trained = {id(p) for p in self.model.parameters() if p.requires_grad}
        units = []
        for path, params in layers.items():
            placement = Placement(unit=path, params=params, weights=STREAMED, update=HOST)
            members = list(find_members(self.model, params, trained))
            units.append(PlacedUnit(placement, members, device=self.device, dtype=None))
        for unit in units:
            self._undo.callback(put_unit_back, unit, self._keepers, HostRoom(self._keepers), in_store=False)
            unit.settle_homes(self._keepers, into_store=True)
            unit.make_work()
            unit.make_buffers(self._keepers, share=True)
            unit.resize(False)
        self._move_rest({id(m.master) for u in units for m in u.members})
        self._streaming = Streaming(
            self.model, units, list(layers), store=self._keepers, device=self.device, tell=self.tell, prefetch=1
        )
        found: list[Layer] = []
        for unit in units:
            module = self.model.get_submodule(unit.name)
            layer = Layer(unit, module, module.forward, self, stash == "host")
            layer.before = found[-1] if found else None
            found.append(layer)
            self._undo.callback(put_method(module, "forward", partial(_halt, unit.name, module.forward)))
        for layer, after in pairwise(found):
            layer.after = after
        return found

    def _move_rest(self, in_layers: set[int]) -> None:
        """What is outside of the layers goes to the device, and comes back at the end."""
        rest = [p for p in self.model.parameters() if id(p) not in in_layers]
        for tensor in (*rest, *self.model.buffers()):
            if tensor.device.type != self.device.type:
                self._undo.callback(_put_on, tensor, tensor.device)
                tensor.data = tensor.data.to(self.device)

    def quiet(self) -> AbstractContextManager[object]:
        """Inside of it, memory of the host is not counted as the device's."""
        return self._ledger.paused() if self._ledger is not None else nullcontext()

    def tell(self, storage: torch.UntypedStorage) -> None:
        if self._ledger is not None:
            self._ledger.see(storage, "weights")

    def close(self) -> None:
        """Parameters, and gradients that nobody has used, are where the parameters came from."""
        self._updates.shutdown(wait=True)
        masters = [m.master for layer in self.layers for m in layer.unit.members]
        kept = [(home, home.grad.clone()) for home in masters if home.grad is not None]
        self._undo.close()
        for home, grad in kept:
            home.grad = grad.to(home.device)
        self.layers = []
        self.store.close()

    def __enter__(self) -> LayerMajor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # a step

    def __call__(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Forward and backward of these micro-batches; their losses. Gradients are added to `p.grad`."""
        if not batches:
            raise InvalidInput("a step needs a micro-batch", hint="pass a list of batches")
        with self._counted(), self._swapped(), _restored(train_without_cache(self.model)):
            groups = snapshot(self.optimizer) if self.optimizer is not None else []
            updates: list[Future[None]] = []
            try:
                for layer in self.layers:
                    layer.updated = partial(self._update, groups, updates)
                losses, results, grads = self._forward(batches)
                if results:
                    torch.autograd.backward(results, grads)
                self._update_rest(groups)
            except RuntimeError as error:
                if "second time" in str(error):
                    raise Unsupported(SKIPS, hint=ORDER) from error
                raise
            finally:
                for update in updates:
                    update.result()
                for layer in self.layers:
                    layer.forget()
        return losses

    def _forward(self, batches: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Losses; the results that the last layer was given, and their gradients."""
        runs = Lockstep([partial(self._loss, self.model, self._here(batch)) for batch in batches])
        try:
            met = [runs.advance(n) for n in range(len(batches))]
            *before, last = self.layers
            for layer in before:
                outs = layer.forward(_at(layer.name, met))
                met = [runs.advance(n, out) for n, out in enumerate(outs)]
            self.load(last, last.before)
            found = [self._end(runs, n, last, meeting) for n, meeting in enumerate(_at(last.name, met))]
            last.leave()
        finally:
            runs.close()
        pairs = [(t, leaf.grad) for _, given in found for t, leaf in given if leaf.grad is not None]
        return [loss for loss, _ in found], [t for t, _ in pairs], [g for _, g in pairs]

    def _end(
        self, runs: Lockstep, number: int, last: Layer, meeting: Meeting
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The last layer and what follows it, forward and backward, for one micro-batch: its loss and the layer's inputs."""
        leaves, spec = tree_flatten((meeting.args, meeting.kwargs))
        given = []
        for n, t in enumerate(leaves):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                leaves[n] = t.detach().requires_grad_()
                given.append((t, leaves[n]))
        args, kwargs = tree_unflatten(leaves, spec)
        with uncached():
            out = last.run(*args, **kwargs)
        over = runs.advance(number, out)
        if isinstance(over, Meeting):
            raise Unsupported(f"a micro-batch calls `{over.where}` after the last layer", hint=ORDER)
        loss = check_loss(over.result)
        self.is_ending = True
        try:
            with torch.autocast(self.device.type, enabled=False):
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self.is_ending = False
        return loss.detach(), given

    def _here(self, batch: Any) -> Any:
        leaves, spec = tree_flatten(batch)
        here = [t.to(self.device) if isinstance(t, torch.Tensor) else t for t in leaves]
        return tree_unflatten(here, spec)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        is_cuda = self.device.type == "cuda"
        if not self._measures:
            yield
            return
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        rest = [p for p in self.model.parameters() if all(p is not m.master for y in self.layers for m in y.unit.members)]
        self._ledger = None if is_cuda else Ledger(seed=rest)
        try:
            with self._ledger or nullcontext():
                yield
        finally:
            ledger, self._ledger = self._ledger, None
            self.peaks.append(ledger.peak if ledger is not None else torch.cuda.max_memory_allocated(self.device))

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        for layer in self.layers:
            layer.unit.swap_in()
        try:
            yield
        finally:
            self._streaming.release_all()
            for layer in self.layers:
                layer.unit.swap_out()

    # weights and gradients

    def load(self, layer: Layer, following: Layer | None) -> None:
        """The weights of this layer are on the device, and the following one's on their way."""
        for wanted in (layer, following):
            if wanted is not None and not wanted.unit.is_here:
                self.loads += 1
                self._streaming.fetch(wanted.unit)
        self._streaming.arrive(layer.unit)

    def drop(self, layer: Layer) -> None:
        self._streaming.release(layer.unit)

    def ship(self, layer: Layer) -> None:
        """The gradients of a layer leave for the host, where they are those of the masters."""
        unit = layer.unit
        if unit.buffer is None:
            return
        with self.quiet():
            before = [None if m.master.grad is None else m.master.grad.clone() for m in unit.trained]
        flat = torch.zeros(unit.grads.nbytes, dtype=torch.uint8, device=self.device)
        for m, view in zip(unit.trained, unit.grads.views(flat), strict=True):
            if m.working.grad is not None:
                view.copy_(m.working.grad)
        with self.quiet():
            self._keepers.push(unit.buffer, flat)
            self._keepers.arrived(unit.buffer)
            for m, grad, view in zip(unit.trained, before, unit.grads.views(self._keepers.memory(unit.buffer)), strict=True):
                has_one, m.working.grad = m.working.grad is not None, None
                if has_one:
                    m.master.grad = view if grad is None else view.add_(grad)

    def _update(self, groups: list[dict[str, Any]], updates: list[Future[None]], layer: Layer) -> None:
        if self.optimizer is not None:
            masters = [m.master for m in layer.unit.trained if m.master.grad is not None]
            updates.append(self._updates.submit(update_now, self.optimizer, groups, masters))

    def _update_rest(self, groups: list[dict[str, Any]]) -> None:
        if self.optimizer is not None:
            own = {id(m.master) for layer in self.layers for m in layer.unit.members}
            rest = [p for p in self.model.parameters() if id(p) not in own and p.grad is not None]
            update_now(self.optimizer, groups, rest)


def update_now(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], params: Sequence[torch.nn.Parameter]) -> None:
    """The optimizer's own rule over these parameters, whose gradients are then used up."""
    part = Part(optimizer, params)
    which = tuple(n for n, is_trained in enumerate(part.trained) if is_trained)
    states = [optimizer.state.get(params[n]) or {} for n in which]
    values = [params[n].detach() for n in which]
    grads = [g for n in which if (g := params[n].grad) is not None]
    with torch.no_grad():
        part.update(values, grads, states, groups, which)
    for n, state in zip(which, states, strict=True):
        optimizer.state[params[n]] = state
        params[n].grad = None


def find_layers(trace: Trace) -> dict[str, tuple[str, ...]]:
    """The path of every block that is called once, with the parameters that only it uses; in the order of the calls."""
    can, used = streamable(trace), users(trace)
    calls = [block.module for block in trace.blocks]
    params: dict[str, list[str]] = {path: [] for path in calls if calls.count(path) == 1}
    for unit in trace.units:
        if unit.name in can and used[unit.name][0].module in params:
            params[used[unit.name][0].module] += unit.params
    return {path: tuple(names) for path, names in params.items() if names}


def _halt(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return meet(name, args, kwargs) if is_in_lockstep() else forward(*args, **kwargs)


def _at(name: str, met: Sequence[Meeting | Over]) -> list[Meeting]:
    """All micro-batches have met at this layer, or the order is not theirs."""
    found = [m for m in met if isinstance(m, Meeting) and m.where == name]
    if len(found) < len(met):
        raise Unsupported(f"a micro-batch does not call `{name}` where the traced one did", hint=ORDER)
    return found


@contextmanager
def _restored(undo: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    finally:
        undo()


def _put_on(tensor: torch.Tensor, device: torch.device) -> None:
    tensor.data = tensor.data.to(device)
