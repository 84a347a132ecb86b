"""What a chunked head asks of ranks that have the logits of a part of the words each; `parallel/exchanges.py` answers."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class DividedWords(Protocol):
    group: Any  # of the ranks that have all words together
    first: int  # this rank's first word
    total: int  # words of all ranks

    def most(self, of_rows: Tensor) -> None:
        """Make it the largest of all ranks', in place."""

    def sum(self, of_rows: Tensor) -> None:
        """Make it the sum over all ranks, in place."""

    def part(self, t: Tensor) -> Tensor:
        """A view of this rank's words, which are the last dimension."""

    def gathered(self, own: Tensor) -> Tensor:
        """The logits of all words, in a graph; gradients of all are alike on all ranks."""
