"""Adam with both moments in blocks of 8 bits: two bytes of state for each element instead of eight.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861. Blocks of 256 elements have
a scale of their own and a table that is fine near zero (`_math/quantise.py`). Tensors below 4096 elements, and groups with
`bits=32`, keep 32-bit moments and are bitwise equal to `torch.optim.AdamW`. Embeddings train better that way, and
`Adam8bit.groups(model)` puts them into such a group.

On a GPU with Triton each parameter's update is one kernel. Elsewhere a slice is updated at a time, which bounds the decoded
temporaries. The state of an n-element tensor takes 2 (n + 4 ceil(n / 256)) bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdall.codecs.levels import BLOCK
from holdall.errors import InvalidInput
from holdall.optim._math import adam8bit_fused
from holdall.optim._math.moments import adamw_, is_coded, moment_bytes
from holdall.optim._math.per_parameter import Group, PerParameter, State, compute_dtype
from holdall.optim._math.quantise import ON_GPU, decode, encode, table_on
from holdall.updates.stretches import piece_of

_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # and whether they have signs


class Adam8bit(PerParameter):
    """AdamW; `bits`: 8, or 32 for a group whose moments should not be coded."""

    name: ClassVar[str] = "adam8bit"
    paper: ClassVar[str] = "Dettmers et al. 2022, arXiv 2110.02861"
    exact: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bits: int = 8,
        **unknown: Any,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bits": bits}
        super().__init__(params, options, unknown)

    @staticmethod
    def groups(model: nn.Module, **options: Any) -> list[Group]:
        """A model's parameters with the options; those of embeddings in 32 bits."""
        embedded = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        trained = [p for p in model.parameters() if p.requires_grad]
        coded = {"params": [p for p in trained if id(p) not in embedded], **options}
        whole = {"params": [p for p in trained if id(p) in embedded], **options, "bits": 32}
        return [group for group in (coded, whole) if group["params"]]

    def is_by_element(self, param: Tensor) -> bool:  # noqa: ARG002 - a block of codes at a time at most
        return True

    def _check(self, group: Group) -> None:
        if group["bits"] not in (8, 32):
            raise InvalidInput(
                f"`bits` is {group['bits']}, but must be 8 or 32", hint="use bits=8, or bits=32 for moments in float32"
            )

    def _bytes(self, p: Tensor, group: Group) -> int:
        return 2 * moment_bytes(p.numel(), group["bits"], compute_dtype(p).itemsize)

    def _apply(self, p: Tensor, grad: Tensor, group: Group) -> None:
        state, dtype = self.state[p], compute_dtype(p)
        if "step" not in state:
            state["step"] = 0
            _make_moments(p, state, coded=is_coded(p.numel(), group["bits"]), dtype=dtype)
        state["step"] += 1
        if "exp_avg_scale" in state and adam8bit_fused.works_on(p, grad):
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            numbers = [lr, beta1, beta2, group["eps"], group["weight_decay"], float(state["step"])]
            adam8bit_fused.adamw(p.detach(), grad, state, numbers)
            return
        values = p.detach().contiguous()  # the values themselves where they lie in order
        flat, grads = values.view(-1), grad.reshape(-1)
        piece = piece_of(p.device, on_gpu=ON_GPU)
        tables = {signed: table_on(p.device, signed=signed) for signed in (True, False)} if "exp_avg_scale" in state else {}
        for begin in range(0, flat.numel(), piece):
            here = slice(begin, begin + piece)
            value = flat[here].to(dtype)  # the values themselves where they are wide
            moments = [_read(state, key, here, signed, tables, dtype) for key, signed in _MOMENTS]
            adamw_(value, grads[here].to(dtype), moments, state["step"], group)
            for (key, signed), moment in zip(_MOMENTS, moments, strict=True):
                _write(state, key, here, moment, signed, tables)
            flat[here].copy_(value)
        if not p.is_contiguous():
            p.copy_(values)


def _make_moments(p: Tensor, state: State, *, coded: bool, dtype: torch.dtype) -> None:
    for key, signed in _MOMENTS:
        if coded:
            zero = encode(torch.zeros(1, device=p.device), signed=signed)[0]
            state[key] = zero.expand(p.numel()).clone()
            state[f"{key}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
        else:
            state[key] = torch.zeros(p.numel(), dtype=dtype, device=p.device)


Tables = dict[bool, Tensor]  # with signs, and without


def _read(state: State, key: str, here: slice, signed: bool, tables: Tables, dtype: torch.dtype) -> Tensor:
    """A slice of a moment: decoded, or the moment itself if stored in 32 bits."""
    kept: Tensor = state[key][here]
    if f"{key}_scale" not in state:
        return kept
    return decode(kept, state[f"{key}_scale"][_blocks(here)], signed=signed, table=tables[signed]).to(dtype)


def _write(state: State, key: str, here: slice, moment: Tensor, signed: bool, tables: Tables) -> None:
    if f"{key}_scale" in state:
        codes, scales = encode(moment, signed=signed, table=tables[signed])
        state[key][here].copy_(codes)
        state[f"{key}_scale"][_blocks(here)].copy_(scales)


def _blocks(here: slice) -> slice:
    return slice(here.start // BLOCK, here.stop // BLOCK)
