"""What a call of a chunked head was given, from which its logits can be computed later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdall.errors import Unsupported
from holdall.runtime.head.chunked_loss import no_autocast
from holdall.runtime.head.divided_words import DividedWords
from holdall.runtime.head.elementwise import version_of


@dataclass(eq=False, slots=True)
class HeadCall:
    """One call of the head."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype  # dtype of the logits
    rows: int
    given: list[tuple[Tensor, int]]  # inputs of the logits, each with its version at the call
    words: DividedWords | None = None  # of which this rank's weight has a part
    whole: Tensor | None = None
    version: int = 0  # version of `whole` when it was made
    spent: bool = False  # a loss that requires gradients was computed in chunks

    @property
    def vocabulary(self) -> int:
        """Logits of a row."""
        return self.weight.shape[0] if self.words is None else self.words.total

    def check(self) -> None:
        for tensor, version in self.given:
            if version_of(tensor) != version:
                raise Unsupported(
                    "the logits were read after the head's weight or its input was changed in place",
                    hint='read them before `optimizer.step()`, or call fit(..., head="whole")',
                )
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                raise Unsupported(
                    "the logits were read after the head's weight or its input left the device",
                    hint='compute the loss before that (under zero3: in the model), or call fit(..., head="whole")',
                )

    def own_logits(self, hidden: Tensor) -> Tensor:
        """The logits of this rank's words, as `torch.nn.functional.linear` computes them under the autocast of the call."""
        self.check()
        with no_autocast(hidden.device.type):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            return F.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of all words."""
        own = self.own_logits(hidden)
        return own if self.words is None else self.words.gathered(own)


def record_call(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int, words: DividedWords | None = None
) -> HeadCall | None:
    """Record a call of the head; None: use the plain forward, which handles or rejects this input."""
    given = [hidden, weight] if bias is None else [hidden, weight, bias]
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # these subclasses handle ops themselves
    if any(is_traceable_wrapper_subclass(t) for t in given):
        return None
    dtypes = {t.dtype for t in given}
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1] or {t.device for t in given} != {weight.device}:
        return None
    if torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in dtypes:
        dtypes = {torch.get_autocast_dtype(hidden.device.type)}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        return None
    return HeadCall(weight, bias, dtypes.pop(), rows, [(t, version_of(t)) for t in given], words)
