"""An embedding table whose rows lie in two memories, as RecShard (ASPLOS 2022) splits them: those used most on the device, the
others on the host.

    table = HotRows(torch.nn.EmbeddingBag(1000, 16, mode="sum"), counts, hot=100, device="cuda")

A remap of the rows puts those used most first, so that each part is one tensor. A lookup gathers rows of both parts into one
buffer, in the order of the indices, and pools it by torch's own op. Gradients are sparse. The device holds `hot` rows and their
optimizer states, the host the others; `lookups` counts both.

Results are the bits of the whole table, and so are weights after sparse updates, with one backward per step. A row that is
looked up several times has a sum for its gradient, which rules take in two ways: SGD adds each term to the weight, in the order
of the lookups; Adagrad and SparseAdam add the terms first (`coalesced=True`), in an order that torch's sort of the row numbers
gives, so that they are added up here before rows are renumbered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from holdall.errors import InvalidInput, Unsupported


class HotRows(torch.nn.Module):
    remap: torch.Tensor

    def __init__(
        self,
        table: torch.nn.EmbeddingBag | torch.nn.Embedding,
        counts: torch.Tensor,
        *,
        hot: int,
        coalesced: bool = False,
        device: torch.device | str = "cpu",
        host: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        rows = table.num_embeddings
        if len(counts) != rows or not 0 <= hot <= rows:
            raise InvalidInput(f"{hot} of {rows} rows, and {len(counts)} counts", hint="one count per row, at most all rows")
        is_bag = isinstance(table, torch.nn.EmbeddingBag)
        if table.max_norm is not None or table.padding_idx is not None or table.scale_grad_by_freq:
            raise Unsupported("a table with a norm, padding or scaled gradients is not split", hint="use a plain one")
        if is_bag and (table.mode not in ("sum", "mean") or table.include_last_offset):
            raise Unsupported(f"bags by `{table.mode}` are not split", hint='use mode="sum" or "mean", without the last offset')
        order = counts.argsort(descending=True, stable=True)
        remap = torch.empty_like(order)
        remap[order] = torch.arange(rows)
        self.register_buffer("remap", remap.to(device))
        whole = table.weight.detach().cpu()
        self.hot = torch.nn.Parameter(whole[order[:hot]].to(device))
        self.cold = torch.nn.Parameter(whole[order[hot:]].to(host))
        self.mode: str = str(table.mode) if is_bag else ""
        self.coalesced = coalesced
        self.lookups = {"device": 0, "host": 0}

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        flat = indices.reshape(-1)
        near = int((self.remap[flat] < len(self.hot)).sum())
        self.lookups["device"] += near
        self.lookups["host"] += len(flat) - near
        rows = _Gathered.apply(self.hot, self.cold, flat, self.remap, self.coalesced)  # type: ignore[no-untyped-call]
        if not self.mode:
            return rows.view(*indices.shape, -1)  # type: ignore[no-any-return]
        if indices.dim() == 2:
            offsets = torch.arange(0, indices.numel(), indices.shape[1], device=rows.device)
        return F.embedding_bag(torch.arange(len(rows), device=rows.device), rows, offsets, mode=self.mode)

    def whole(self) -> torch.Tensor:
        """The table in its own order, on the host."""
        return torch.cat([self.hot.detach().cpu(), self.cold.detach().cpu()])[self.remap.cpu()]

    @property
    def held(self) -> dict[str, int]:
        """Bytes of rows in each memory; the remap, 8 bytes a row, is on the device besides."""
        return {"device": self.hot.nbytes, "host": self.cold.nbytes}


class _Gathered(torch.autograd.Function):
    """Rows of both parts, one for each index."""

    @staticmethod
    def forward(
        ctx: Any, hot: torch.Tensor, cold: torch.Tensor, indices: torch.Tensor, remap: torch.Tensor, coalesced: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(indices, remap)
        ctx.parts, ctx.coalesced = (hot.shape, cold.shape, cold.device), coalesced
        at = remap[indices]
        is_hot = at < len(hot)
        rows = hot.new_empty(len(at), hot.shape[1])
        rows[is_hot] = hot[at[is_hot]]
        rows[~is_hot] = cold[(at[~is_hot] - len(hot)).to(cold.device)].to(rows.device)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        indices, remap = ctx.saved_tensors
        hot, cold, host = ctx.parts
        if ctx.coalesced:
            whole = _sparse(indices, grad, (len(remap), grad.shape[1])).coalesce()
            indices, grad = whole.indices()[0], whole.values()
        at = remap[indices]
        is_hot = at < hot[0]
        near = _sparse(at[is_hot], grad[is_hot], hot)
        far = _sparse((at[~is_hot] - hot[0]).to(host), grad[~is_hot].to(host), cold)
        return near, far, None, None, None


def _sparse(rows: torch.Tensor, values: torch.Tensor, shape: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)
