"""How the peak of a step is measured and its budget enforced: by the ledger on a CPU, by the allocator on a GPU."""

from __future__ import annotations

from typing import Protocol

import torch

from holdall.runtime.ledger import Ledger


class Meter(Protocol):
    ledger: Ledger | None

    def start(self, budget: int | None) -> None: ...

    def begin(self) -> None: ...

    def settle(self) -> None: ...

    def peak(self) -> int: ...

    def reserved(self) -> int | None: ...

    def curve(self, began: float) -> list[tuple[float, int]]: ...

    def stop(self) -> None: ...


class CpuMeter:
    """Counts storages; raises `OverBudget` at the op that passes the budget."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self.ledger: Ledger | None = None

    def start(self, budget: int | None) -> None:
        model, optimizer = self._model, self._optimizer
        there: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
        there += [p.grad for p in model.parameters() if p.grad is not None]
        if optimizer is not None:
            there += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        self.ledger = Ledger(seed=there, budget=budget)
        self.ledger.__enter__()

    def begin(self) -> None:
        assert self.ledger is not None
        self.ledger.restart()

    def settle(self) -> None:
        """Nothing is pending on a CPU."""

    def peak(self) -> int:
        assert self.ledger is not None
        return self.ledger.peak

    def reserved(self) -> int | None:
        return None

    def curve(self, began: float) -> list[tuple[float, int]]:
        assert self.ledger is not None
        return [(at - began, live) for at, live in self.ledger.curve]

    def stop(self) -> None:
        if self.ledger is not None:
            self.ledger.__exit__(None, None, None)


class CudaMeter:
    """Reads the caching allocator, and lowers its limit to the budget while the harness is on."""

    ledger: Ledger | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: float | None = None
        self._reserved = 0

    def start(self, budget: int | None) -> None:
        if budget is None:
            return
        total = torch.cuda.get_device_properties(self._device).total_memory
        self._before = torch.cuda.get_per_process_memory_fraction(self._device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), self._device)

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def peak(self) -> int:
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int | None:
        return self._reserved or None

    def curve(self, began: float) -> list[tuple[float, int]]:  # noqa: ARG002
        return []

    def stop(self) -> None:
        if self._before is not None:
            torch.cuda.set_per_process_memory_fraction(self._before, self._device)
