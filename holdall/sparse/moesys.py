"""Experts on device, host and disk, after MoESys (SE-MoE, arXiv 2205.10034).

Experts have most of a mixture's bytes, and a step uses few of them. Here each has one of three places:

    device   weights of at most `slots` experts: whoever computes is copied there
    host     weights and optimizer states of at most `host` experts; updates are made there
    disk     everything else, in a tier such as `nvme`

Who stays is decided by counts of uses that fade (`frequency.py`). What leaves the host is written only if it has changed. A
forward keeps the expert's input, and its backward copies the weights again and repeats the forward: weights need not stay.

    store = ExpertStore({"0.1": model.layers[0].experts[1], ...}, optimizer, slots=2, host=4, disk=Nvme())
    loss(model(batch)).backward()
    optimizer.step()         # the store updates the experts that have gradients
    store.close()            # experts have their weights again

Bits are those of plain training: the optimizer's own rule updates each expert (`updates/parts.py`). An expert without tokens
is left alone (`unused="skip"`, what torch does where a gradient is None), or has a gradient of zeros (`unused="zero"`), which
Adam turns into an update: those are made up for when the expert is needed next, each with the settings of its step.

Gradients of experts are not in `p.grad`, so that a norm over all parameters leaves them out: do not clip. Experts take and give
one tensor, and draw no random numbers. `moesys_simulated.py` has what is only simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from holdall.errors import InvalidInput, Unsupported
from holdall.sparse.frequency import FrequencyCache
from holdall.tiers import Keeper, Ticket
from holdall.updates.parts import Groups, Part, snapshot


class _Expert:
    """One expert: where its weights and states lie."""

    def __init__(self, key: Hashable, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.key, self.module, self.plain = key, module, module.forward
        self.places = [(m, name) for m in module.modules() for name in m._parameters if m._parameters[name] is not None]
        self.params = [m._parameters[name] for m, name in self.places]
        if len({id(p) for p in self.params}) < len(self.params) or len({p.dtype for p in self.params if p is not None}) != 1:
            raise Unsupported(f"expert `{key}` has tied weights or several precisions", hint="leave it where it is")
        random = next((m for m in module.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p), None)
        if random is not None:
            raise Unsupported(f"expert `{key}` draws random numbers ({random})", hint="use p=0 in experts")
        self.shapes = [p.shape for p in self.params if p is not None]
        self.part = Part(optimizer, [p for p in self.params if p is not None])
        if not all(self.part.trained):
            raise InvalidInput(f"the optimizer does not hold all of expert `{key}`", hint="build it over the whole model")
        self.weights: torch.Tensor | None = torch.cat([p.detach().reshape(-1).cpu() for p in self.params if p is not None])
        self.states: list[dict[str, Any]] = [{} for _ in self.shapes]
        self.grad: torch.Tensor | None = None  # on the host, summed over backwards
        self.done = 0  # steps of the loop that the weights have seen
        self.changed = True  # since they were written to the disk
        self.tickets: dict[str, Ticket] = {}
        self.loading: list[Any] = []
        self.size, self.nbytes = self.weights.numel(), self.weights.nbytes

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in self.shapes]), self.shapes, strict=True)]

    def state_keys(self) -> list[tuple[int, str]]:
        return [(n, k) for n, own in enumerate(self.states) for k, v in own.items() if isinstance(v, torch.Tensor) and v.dim()]

    @property
    def host_bytes(self) -> int:
        """Of weights and states, while they are there."""
        if self.weights is None:
            return 0
        return self.weights.nbytes + sum(int(self.states[n][k].nbytes) for n, k in self.state_keys())


class ExpertStore:
    """Takes the experts of a model over: see above. `held` and `peak`: bytes by place, now and at most."""

    def __init__(
        self,
        experts: Mapping[Hashable, torch.nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        slots: int,
        host: int | None = None,
        disk: Keeper | None = None,
        device: torch.device | str = "cpu",
        decay: float = 0.5,
        every: int = 100,
        threshold: float = 0.0,
        unused: str = "skip",
    ) -> None:
        if unused not in ("skip", "zero"):
            raise InvalidInput(f"`unused` is {unused!r}", hint='use "skip" or "zero"')
        if disk is None and (host or len(experts)) < len(experts):
            raise InvalidInput(f"{len(experts)} experts do not fit {host} places on the host", hint="give a `disk`")
        self.device, self._disk, self._unused = torch.device(device), disk, unused
        how: dict[str, Any] = {"decay": decay, "every": every, "threshold": threshold}
        self.near = FrequencyCache(slots, **how)
        self.far = FrequencyCache(host or len(experts), **how)
        self._optimizer = optimizer
        self._experts = {key: _Expert(key, module, optimizer) for key, module in experts.items()}
        self._slots: dict[Hashable, torch.Tensor] = {}  # weights on the device
        self._history: list[Groups] = []  # settings of the steps that some expert has not made up for
        self._steps = 0
        self.peak = {"device": 0, "host": 0, "gradients": 0}
        self.copied = 0  # bytes to the device
        self._anchor = torch.zeros((), requires_grad=True)  # so that backward comes here where the input needs no gradient
        for expert in self._experts.values():
            expert.module.forward = self._forward(expert)  # type: ignore[method-assign]
            for p in expert.params:
                if p is not None:
                    p.data = p.data.new_empty(0)
            if disk is not None:
                self._leave(expert)
            else:
                self.far.admit(expert.key)
        self._hook = optimizer.register_step_post_hook(self._stepped)

    # what the loop sees

    @property
    def held(self) -> dict[str, int]:
        """Bytes of weights on the device, of weights and states on the host, and of gradients, which are there too."""
        on_host = sum(e.host_bytes for e in self._experts.values())
        grads = sum(e.grad.nbytes for e in self._experts.values() if e.grad is not None)
        return {"device": sum(t.nbytes for t in self._slots.values()), "host": on_host, "gradients": grads}

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Bytes read from the disk, and written to it."""
        return (0, 0) if self._disk is None else (getattr(self._disk, "loaded", 0), getattr(self._disk, "saved", 0))

    def prefetch(self, keys: Iterable[Hashable], *, most: int | None = None) -> list[Hashable]:
        """Begin to read experts from the disk, those used most first: a layer's, while the one before computes."""
        chosen = self.far.by_use(k for k in keys if k not in self.far)[: self.far.slots if most is None else most]
        for key in chosen:
            self._admit(self._experts[key], used=False)
        return chosen

    def weights(self, key: Hashable) -> list[torch.Tensor]:
        """The expert's weights, in the order of its parameters."""
        return [t.clone() for t in self._experts[key].views(self._on_host(self._experts[key]))]

    def close(self) -> None:
        """Give every expert its weights and states back, which must fit the host."""
        self._hook.remove()
        for expert in self._experts.values():
            flat = self._on_host(expert).to(self.device)
            for p, value, state in zip(expert.params, expert.views(flat), expert.states, strict=True):
                if p is None:
                    continue
                p.data = value.clone()
                if state:
                    self._optimizer.state[p].update(
                        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
                    )
            expert.module.forward = expert.plain  # type: ignore[method-assign]
        self._slots.clear()

    # computing

    def _forward(self, expert: _Expert) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            return _Compute.apply(x, self._anchor, self, expert)  # type: ignore[no-any-return, no-untyped-call]

        return forward

    def on_device(self, expert: _Expert) -> torch.Tensor:
        """The weights in a slot."""
        for key in self.near.use(expert.key):
            self._slots.pop(key, None)
        if expert.key not in self._slots:
            flat = self._on_host(expert)
            self._slots[expert.key] = flat.to(self.device, copy=True)
            self.copied += flat.nbytes
        self._count()
        return self._slots[expert.key]

    def add_gradient(self, expert: _Expert, grads: Iterable[torch.Tensor]) -> None:
        new = torch.cat([g.reshape(-1) for g in grads]).cpu()
        expert.grad = new if expert.grad is None else expert.grad.add_(new)
        self._count()

    # host and disk

    def _on_host(self, expert: _Expert) -> torch.Tensor:
        """The weights on the host, all steps made up for."""
        self._admit(expert, used=True)
        for handle in expert.loading:
            if handle is not None:
                handle.wait()
        expert.loading = []
        assert expert.weights is not None
        if self._unused == "zero" and expert.grad is None:
            self._make_up(expert, self._steps)
        elif self._unused == "skip":
            expert.done = self._steps
        return expert.weights

    def _admit(self, expert: _Expert, *, used: bool) -> None:
        for key in self.far.use(expert.key) if used else self.far.admit(expert.key):
            self._leave(self._experts[key])
        if expert.weights is not None or self._disk is None:
            return
        expert.weights = torch.empty(expert.size, dtype=expert.params[0].dtype)  # type: ignore[union-attr]
        expert.loading = [self._disk.load(expert.tickets["weights"], 0, expert.weights.view(torch.uint8))]
        keys = expert.state_keys()
        if keys:
            flat = torch.empty(expert.tickets["states"].nbytes // expert.weights.element_size(), dtype=expert.weights.dtype)
            expert.loading.append(self._disk.load(expert.tickets["states"], 0, flat.view(torch.uint8)))
            sizes = [expert.shapes[n].numel() for n, _ in keys]
            for (n, k), part in zip(keys, flat.split(sizes), strict=True):
                expert.states[n][k] = part.view(expert.shapes[n])
        expert.changed = False
        self._count()

    def _leave(self, expert: _Expert) -> None:
        """Write what has changed, and let go of the host's memory."""
        assert self._disk is not None and expert.weights is not None
        for handle in expert.loading:
            if handle is not None:
                handle.wait()
        expert.loading = []
        keys = expert.state_keys()
        if expert.changed:
            self._write(expert, "weights", expert.weights)
            if keys:
                self._write(expert, "states", torch.cat([expert.states[n][k].reshape(-1) for n, k in keys]))
        for n, k in keys:
            expert.states[n][k] = torch.empty(expert.shapes[n], dtype=expert.weights.dtype, device="meta")
        expert.weights = None

    def _write(self, expert: _Expert, name: str, flat: torch.Tensor) -> None:
        assert self._disk is not None
        if name not in expert.tickets:
            expert.tickets[name] = self._disk.reserve(flat.nbytes)
        handle = self._disk.save(expert.tickets[name], 0, flat.view(torch.uint8))
        if handle is not None:
            handle.wait()

    # updates

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        groups = snapshot(self._optimizer)
        if self._unused == "zero":
            self._history.append(groups)
        updated = [key for key, expert in self._experts.items() if expert.grad is not None]
        for expert in map(self._experts.__getitem__, updated):
            self._on_host(expert)
            if self._unused == "zero":
                self._make_up(expert, self._steps - 1)
            grad, expert.grad = expert.grad, None
            assert grad is not None
            self._update(expert, grad, groups)
        for key in [k for k in self._slots if k in updated or self._unused == "zero"]:
            del self._slots[key]  # old weights
            self.near.drop(key)
        self.near.tick()
        self.far.tick()
        if self._unused == "zero":
            oldest = min(e.done for e in self._experts.values())
            del self._history[: len(self._history) - (self._steps - oldest)]

    def _make_up(self, expert: _Expert, until: int) -> None:
        """The steps without tokens that the expert has missed."""
        if expert.done >= until:
            return
        zeros = torch.zeros(expert.size, dtype=expert.params[0].dtype)  # type: ignore[union-attr]
        for step in range(expert.done, until):
            self._update(expert, zeros, self._history[step - self._steps])

    def _update(self, expert: _Expert, grad: torch.Tensor, groups: Groups) -> None:
        assert expert.weights is not None
        values, which = expert.views(expert.weights), range(len(expert.shapes))
        expert.part.step(values, expert.views(grad), expert.states, groups, list(which))
        expert.changed = True
        expert.done += 1
        if self._unused == "skip":
            expert.done = self._steps
        self._count()

    def _count(self) -> None:
        held = self.held
        self.peak = {place: max(self.peak[place], held[place]) for place in held}


class _Compute(torch.autograd.Function):
    """An expert that is computed with weights in a slot, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, store: ExpertStore, expert: _Expert) -> torch.Tensor:  # noqa: ARG004
        ctx.save_for_backward(x)
        ctx.store, ctx.expert = store, expert
        with _swapped(expert, expert.views(store.on_device(expert))):
            return expert.plain(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:  # type: ignore[override]
        (x,), store, expert = ctx.saved_tensors, ctx.store, ctx.expert
        with torch.enable_grad():
            given = x.detach().requires_grad_(ctx.needs_input_grad[0])
            weights = [t.detach().requires_grad_() for t in expert.views(store.on_device(expert))]
            with _swapped(expert, weights):
                out = expert.plain(given)
            wanted = [*weights, given] if ctx.needs_input_grad[0] else weights
            found = torch.autograd.grad(out, wanted, grad)
        store.add_gradient(expert, found[: len(weights)])
        return (found[len(weights)] if ctx.needs_input_grad[0] else None), None, None, None


@contextmanager
def _swapped(expert: _Expert, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, the expert's modules compute with these tensors."""
    for (module, name), tensor in zip(expert.places, tensors, strict=True):
        module._parameters[name] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for (module, name), p in zip(expert.places, expert.params, strict=True):
            module._parameters[name] = p
