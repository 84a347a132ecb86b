"""Frozen weights of linear layers in 4 bits, expanded at use; adapters and the rest in bf16 with float32 masters.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314): NF4 in blocks of 64, with doubly quantised scales 0.516 bytes a weight. Trained
are whatever parameters of the model require gradients, such as PEFT's adapters. A frozen weight is stored as its bytes, which
plans count, place and stream as they do other weights; a product expands it to the dtype it computes in and drops it, and
backward expands it again.

What leaving gives: the weights' own shapes and dtypes with the values of the packed ones, that is, what the adapters were
trained with; the weights from before are gone, since they would take the memory that packing saves. `keep=true` lets them wait
on the host and gives them back to the bit. Inside, `state_dict` has full names, shapes and dtypes, with the values of the
packed weights, and `load_state_dict` packs what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from holdall.errors import InvalidInput
from holdall.narrow.layers import skipped_layers
from holdall.narrow.nf4 import NormalFloat4
from holdall.narrow.packed_layers import frozen_layers, packed_bytes, put_on_frozen
from holdall.precision._recipe import Recipe, Undo


@dataclass(frozen=True, kw_only=True)
class Nf4(Recipe):
    """`double`: the scales are quantised too. `block`: weights with a common scale. `skip`: parts of names of layers that stay
    as they are, separated by `+`; the vocabulary head always does. `keep`: the weights wait on the host, and leaving gives
    them back.
    """

    double: bool = True
    block: int = 64
    skip: str = ""
    keep: bool = False

    name: ClassVar[str] = "nf4"
    also: ClassVar[tuple[str, ...]] = ("qlora",)
    what: ClassVar[str] = "frozen weights in 4 bits, adapters and the rest in bf16"
    weights: ClassVar[torch.dtype] = torch.bfloat16
    master: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.block < 16 or self.block & (self.block - 1):
            raise InvalidInput(f"`block` is {self.block}, not a power of two from 16 on", hint="use the paper's: block=64")

    @property
    def form(self) -> NormalFloat4:
        return NormalFloat4(block=self.block, double=self.double)

    @property
    def frozen_bytes(self) -> float:
        return packed_bytes(self.form)

    def put_on(self, model: nn.Module) -> Undo:
        return self._pack(model, "host" if self.keep else "no")

    def put_on_to_trace(self, model: nn.Module) -> Undo:
        return self._pack(model, "there")

    def _pack(self, model: nn.Module, keep: str) -> Undo:
        skip = skipped_layers(model, self.skip.split("+"), ends=False, head=True)
        layers = frozen_layers(model, self.form, skip=skip)
        if not layers:
            raise InvalidInput(
                "`nf4` packs frozen weights of linear layers, and the model has none",
                hint="freeze it under adapters before the optimizer is made: "
                'model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))',
            )
        return put_on_frozen(layers, self.form, self.weights, keep=keep)
