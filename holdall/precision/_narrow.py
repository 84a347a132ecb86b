"""What recipes that round the operands of products share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from holdall.narrow.layers import put_on_layers, skipped_layers
from holdall.narrow.product import Multiplier
from holdall.precision._recipe import Recipe, Undo


@dataclass(frozen=True, kw_only=True)
class NarrowProducts(Recipe):
    """The base of recipes that round the operands of products.

    `skip`: parts of names of layers that keep their precision, separated by `+`. The vocabulary head always does.
    """

    skip: str = ""

    ends: ClassVar[bool] = False  # the first and the last layer keep their precision
    convolutions: ClassVar[bool] = True  # convolutions have such products too

    @property
    def obstacle_over_ranks(self) -> str:
        return ""

    def formats(self) -> Multiplier:
        raise NotImplementedError

    def formats_of(self, layer: str) -> Multiplier | None:  # noqa: ARG002
        """For the layer of this name; None: it keeps its precision."""
        return self.formats()

    def put_on(self, model: nn.Module) -> Undo:
        skip = skipped_layers(model, self.skip.split("+"), ends=self.ends, head=True)
        return put_on_layers(model, self.formats_of, skip=skip, convolutions=self.convolutions)
