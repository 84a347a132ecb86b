"""A workload: a model by name, a batch for it and an optimizer. Tensors are on `meta` until a real run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdall import optim
from holdall.api import trace
from holdall.errors import InvalidInput, Unsupported, unknown_name
from holdall.host_memory import host_memory
from holdall.models import DTYPES, ModelSource, build, describe, sample_batch
from holdall.problem import resolve_recipe
from holdall.tracing.autocast import resolve_autocast
from holdall.types import Trace
from holdall.units import format_bytes

NO_OPTIMIZER = "none"
MIXED = {"bf16-mixed": "bf16"}  # recipes with float32 parameters and working copies in this dtype
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}  # short forms


@dataclass(frozen=True, kw_only=True)
class Workload:
    source: ModelSource
    batch: int
    seq: int
    dtype: str
    optimizer: str
    precision: str | None = None  # the precision recipe; None: everything in `dtype`
    autocast: str | None = None  # the dtype that the loop's autocast casts to

    def __str__(self) -> str:
        tokens = "" if self.is_image else f" x {self.seq} tokens"
        width = "bf16-mixed" if self.precision == "bf16" else self.precision or self.dtype
        width += f" under {self.autocast} autocast" if self.autocast else ""
        return f"{self.source.name}, batch {self.batch}{tokens}, {width}, optimizer {self.optimizer}"

    @property
    def is_image(self) -> bool:
        return self.source.task == "image-classification"

    def build(self, device: str = "meta") -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """The model, the same for the same kind of device every time, and its optimizer."""
        model = build(self.source, device=device, dtype=self.dtype)
        return model, self.build_optimizer(model)

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        return None if self.optimizer == NO_OPTIMIZER else optim.make(self.optimizer, model, lr=1e-4)

    def sample(self, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
        """A batch of its sizes; images come in the dtype of the weights."""
        made = sample_batch(self.source, batch=self.batch, seq=self.seq, device=device, seed=seed)
        return {k: v.to(DTYPES[self.dtype]) if v.is_floating_point() else v for k, v in made.items()}

    def trace(self, device: str, head: str | int = "auto") -> Trace:
        """A trace of one step on `device`, with `head` as in `holdall.trace`.

        Errors of the model about the batch become errors about command-line options.
        """
        model, optimizer = self.build()
        batch = self.sample()
        try:
            with quiet():
                cast = self.autocast or False
                given: dict[str, Any] = {"precision": self.precision, "autocast": cast, "head": head}
                return trace(model, batch, optimizer=optimizer, device=device, **given)
        except InvalidInput as error:
            if error.__cause__ is None:  # an error about the call, not one of the model
                raise
            hint = f"this was {self}; try another --seq, --batch or --dtype, and --debug to see where"
            raise InvalidInput(error.fact, hint=hint) from error


def describe_workload(
    model: str,
    *,
    batch: int,
    seq: int,
    dtype: str = "float32",
    optimizer: str,
    autocast: str | None = None,
    precision: str | None = None,
) -> Workload:
    """A workload from command-line arguments; names are checked before anything slow."""
    dtype, precision = read_precision(dtype, precision)
    if autocast is not None:
        resolve_autocast(autocast, "cuda")
    if optimizer != NO_OPTIMIZER:
        optim.read(optimizer)
    _hush_transformers()
    source = describe(model)
    made = Workload(
        source=source, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, precision=precision, autocast=autocast
    )
    _check_batch(made)
    return made


def read_precision(dtype: str, precision: str | None) -> tuple[str, str | None]:
    """(dtype of the parameters, recipe or None) from --dtype and --precision, of which one is enough."""
    typed, precision = precision, precision or MIXED.get(dtype)
    if typed is not None and dtype != "float32":
        raise InvalidInput(f"both --dtype {dtype} and --precision {typed} were given", hint="leave --dtype out")
    if precision is not None:
        recipe = resolve_recipe(precision)
        assert recipe is not None
        return str(recipe.held).removeprefix("torch."), None if recipe.exact else precision
    dtype = DTYPE_ALIASES.get(dtype, dtype)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, (*DTYPES, *MIXED))
    return dtype, None


def _check_batch(workload: Workload) -> None:
    """Raise if the sample batch would not fit in memory: unlike the model, it is a real tensor."""
    one = replace(workload, batch=1, seq=1).sample()
    size = sum(t.nbytes for t in one.values()) * workload.batch * (1 if workload.is_image else workload.seq)
    if size > host_memory() // 4:
        raise InvalidInput(
            f"the batch itself takes {format_bytes(size)}, more than a quarter of this machine's memory",
            hint="use a smaller --batch or --seq",
        )
    workload.sample()  # raises if its sizes are wrong in another way


def pick_device(name: str) -> str:
    """`auto` is a GPU if there is one; tracing itself refuses what it does not know."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def check_runnable(device: str) -> str:
    """The device, if steps can really run on it."""
    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise Unsupported("torch sees no GPU here", hint="use `--device cpu`")
    return device


def _hush_transformers() -> None:
    """Silence warnings of `transformers` about configs: the models are not used for inference here."""
    with suppress(ImportError):
        from transformers.utils import logging as remarks

        remarks.set_verbosity_error()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's tracebacks for ops that do not support fake tensors; the error that follows says the same in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
