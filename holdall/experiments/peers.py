"""Other ways to train in less memory, for comparison with planners: those of stock PyTorch, and Rockmate from PyPI.

A peer has options, and offers one or more variants of itself. Each variant is put on a model, run for a few steps and taken
off again (`peer_runs.py`). Peers are measured, never simulated. Their overhead is over their own unlimited run, so that eager
is held against eager and compiled against compiled.

`activation_memory_budget` of `torch.compile` is a share of the bytes that a graph saves, between its inputs and everything; it
is not a peak, and a lower one may peak higher. So several shares are measured, and each stands at the peak that was seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch

from holdall.cli._errors import first_line
from holdall.errors import InvalidInput, MissingExtra, Unsupported, unknown_name
from holdall.tracing.step import default_loss
from holdall.types import Trace
from holdall.units import format_bytes

LossOf = Callable[[Any], torch.Tensor]  # batch -> loss


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that a peer is installed on. `blocks` and `head` are those of the trace, the same for all peers."""

    model: torch.nn.Module
    batch: Any
    blocks: tuple[str, ...] = ()
    head: tuple[str, int] | None = None  # path and rows at a time, where planners take the vocabulary head in pieces

    @staticmethod
    def of(trace: Trace, model: torch.nn.Module, batch: Any) -> Subject:
        head = trace.about.head
        blocks = tuple(dict.fromkeys(b.name.partition("#")[0] for b in trace.blocks))
        return Subject(model=model, batch=batch, blocks=blocks, head=(head.module, head.rows) if head else None)

    def plain_loss(self, batch: Any) -> torch.Tensor:
        return default_loss(self.model, batch)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a peer. `family`: the peer whose unlimited run is the reference for its overhead."""

    peer: str
    setting: str
    family: str
    install: Callable[[Subject], AbstractContextManager[LossOf]]
    unlimited: bool = False

    def __str__(self) -> str:
        return f"{self.peer}, {self.setting}"


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    def variants(self, budgets: Sequence[int]) -> list[Variant]:
        """The unlimited run first. `budgets` in bytes, for peers that take them."""
        ...


# the peers


@contextmanager
def _alone(subject: Subject) -> Iterator[LossOf]:
    yield subject.plain_loss


_PLAIN = Variant(peer="eager", setting="plain", family="eager", install=_alone, unlimited=True)


@dataclass(frozen=True, kw_only=True)
class Eager:
    """The plain model: the reference for the other eager peers."""

    name: ClassVar[str] = "eager"

    def variants(self, budgets: Sequence[int]) -> list[Variant]:  # noqa: ARG002
        return [_PLAIN]


@dataclass(frozen=True, kw_only=True)
class CheckpointPeer:
    """Gradient checkpointing of every block (`torch.utils.checkpoint`, through Hugging Face's switch)."""

    name: ClassVar[str] = "checkpoint"

    def variants(self, budgets: Sequence[int]) -> list[Variant]:  # noqa: ARG002
        install = functools.partial(_checkpointed, ops=())
        return [_PLAIN, Variant(peer=self.name, setting="every block", family="eager", install=install)]


_ATTENTION = tuple(f"_scaled_dot_product_{kind}" for kind in (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable"
))  # fmt: skip
_KEPT = {"attention": _ATTENTION, "products": (*_ATTENTION, "mm", "addmm", "bmm")}


@dataclass(frozen=True, kw_only=True)
class Selective:
    """Selective checkpointing: of every block only the results of attention, or of attention and matrix products, are kept."""

    keep: tuple[str, ...] = tuple(_KEPT)

    name: ClassVar[str] = "selective"

    def __post_init__(self) -> None:
        for kept in self.keep:
            if kept not in _KEPT:
                raise unknown_name("keep of selective", kept, _KEPT)

    def variants(self, budgets: Sequence[int]) -> list[Variant]:  # noqa: ARG002
        return [_PLAIN, *map(self._keeping, self.keep)]

    def _keeping(self, kept: str) -> Variant:
        install = functools.partial(_checkpointed, ops=_KEPT[kept])
        return Variant(peer=self.name, setting=f"keep {kept}", family="eager", install=install)


_SCOPES = ("model", "blocks")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """`torch.compile`, plain and with falling `activation_memory_budget`.

    `scope`: the model as one graph, or each block by itself (compiles once for all alike, and the ratio is each block's own).
    Where planners take the vocabulary head in pieces the peer does so too, and its graph is all but the head.
    """

    ratios: tuple[float, ...] = (1.0, 0.75, 0.5, 0.35, 0.25, 0.1, 0.0)
    backend: str = "inductor"
    scope: str = "model"

    name: ClassVar[str] = "compile"

    def __post_init__(self) -> None:
        if not self.ratios or any(not 0 <= r <= 1 for r in self.ratios):
            raise InvalidInput(f"`ratios` of compile is {list(self.ratios)}", hint="give numbers from 0 to 1")
        if self.scope not in _SCOPES:
            raise unknown_name("scope of compile", self.scope, _SCOPES)

    def variants(self, budgets: Sequence[int]) -> list[Variant]:  # noqa: ARG002
        return [self._at(ratio) for ratio in dict.fromkeys((1.0, *self.ratios))]

    def _at(self, ratio: float) -> Variant:
        where = "" if self.scope == "model" else f" per {self.scope.removesuffix('s')}"
        where += "" if self.backend == "inductor" else f", {self.backend}"
        install = functools.partial(_compiled, ratio=ratio, backend=self.backend, scope=self.scope)
        family = f"compile {self.scope} {self.backend}"
        setting = f"ratio {ratio:g}{where}"
        return Variant(peer=self.name, setting=setting, family=family, install=install, unlimited=ratio == 1)


@dataclass(frozen=True, kw_only=True)
class RockmatePeer:
    """The authors' own package (PyPI `rockmate`), once for every budget; it profiles on a GPU."""

    name: ClassVar[str] = "rockmate"

    def variants(self, budgets: Sequence[int]) -> list[Variant]:
        asked = budgets if find_spec("rockmate") else budgets[:1]  # if it is not installed, one row says so
        return [_PLAIN, *map(self._within, asked)]

    def _within(self, budget: int) -> Variant:
        install = functools.partial(_by_rockmate, budget=budget)
        return Variant(peer=self.name, setting=format_bytes(budget), family="eager", install=install)


PEERS: dict[str, type[Any]] = {cls.name: cls for cls in (Compile, CheckpointPeer, Selective, RockmatePeer, Eager)}


def all_variants(peers: Iterable[Peer], budgets: Sequence[int]) -> list[Variant]:
    """Of all peers, each once: several have the same unlimited run."""
    return list({str(v): v for peer in peers for v in peer.variants(budgets)}.values())


# installing them


@contextmanager
def _checkpointed(subject: Subject, *, ops: Sequence[str]) -> Iterator[LossOf]:
    """Every block is run again in backward; results of `ops` are kept."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    model: Any = subject.model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise Unsupported(f"{type(model).__name__} has no switch for gradient checkpointing")
    options: dict[str, Any] = {"use_reentrant": False}
    if ops:
        found = [getattr(torch.ops.aten, op).default for op in ops if hasattr(torch.ops.aten, op)]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, found)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    try:
        yield subject.plain_loss
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _compiled(subject: Subject, *, ratio: float, backend: str, scope: str) -> Iterator[LossOf]:
    """Compile the model in place; on exit it is as before."""
    import torch._dynamo
    from torch._dynamo.utils import counters
    from torch._functorch import config

    torch._dynamo.reset()
    counters.clear()
    targets = _targets(subject, scope)
    for target in targets:
        target.compile(backend=backend, dynamic=False)
    try:
        # a graph that silently falls back to eager would be measured as if it were compiled
        strict = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
        with strict, config.patch(activation_memory_budget=ratio):
            yield subject.plain_loss
            if not counters["stats"]["unique_graphs"]:
                raise Unsupported("nothing was compiled: the model ran eagerly")
    finally:
        for target in targets:
            target._compiled_call_impl = None  # type: ignore[assignment]
        torch._dynamo.reset()


def _targets(subject: Subject, scope: str) -> list[torch.nn.Module]:
    model = subject.model
    if scope == "blocks":
        if not subject.blocks:
            raise Unsupported("no blocks were found in the model", hint="compile it whole")
        return [model.get_submodule(name) for name in subject.blocks]
    if subject.head is None:
        return [model]
    base = getattr(model, "base_model", model)  # Hugging Face's name for all but the head
    if base is model:
        raise Unsupported("the model has no part without its head, which is computed in pieces")
    return [base]


@contextmanager
def _by_rockmate(subject: Subject, *, budget: int) -> Iterator[LossOf]:
    if find_spec("rockmate") is None:
        raise MissingExtra("the package `rockmate` is not installed", hint="pip install rockmate")
    try:
        pure = import_module("rockmate").PureRockmate
    except Exception as error:  # it is there, and something that it needs is not
        raise Unsupported(f"the package `rockmate` cannot be loaded here: {first_line(error)}") from error
    if subject.head is not None:
        raise Unsupported("rockmate does not support a head that is computed in pieces")
    if next(subject.model.parameters()).device.type != "cuda":
        raise Unsupported("rockmate needs a model on a GPU, where it profiles")
    wrapped = pure(_LossOnly(subject.model, tuple(subject.batch)), tuple(subject.batch.values()), budget)
    yield lambda batch: wrapped(*batch.values())


class _LossOnly(torch.nn.Module):
    """Tensors in, the loss out: what tools that write a model down as a graph can take."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return default_loss(self.model, dict(zip(self.names, tensors, strict=True)))
