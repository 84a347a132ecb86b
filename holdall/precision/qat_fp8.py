"""Quantisation-aware training for FP8 (Jacob et al., CVPR 2018, arXiv 1712.05877), by torchao.

It takes more memory than plain training, not less: rounded copies are saved for backward unless blocks are recomputed. After
training, `holdall.precision.finish_qat(model, scheme="fp8")` makes the quantised model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdall.precision._qat import FakeQuantised


@dataclass(frozen=True, kw_only=True)
class QatFp8(FakeQuantised):
    name: ClassVar[str] = "qat_fp8"
    what: ClassVar[str] = "inputs and weights of linear layers as FP8 will have them"
    scheme: ClassVar[str] = "fp8"
