"""Yuan et al. (USENIX ATC 2024), the pipeline half: of every stage the fraction alpha of its activations that is on the host
between forward and backward, and how each of its layers is checkpointed. Simulated.

    none       all that autograd saves is kept
    balanced   results of norms and activation functions are computed again; no product and no attention runs twice
    full       the layer's input is kept, and its forward runs again

The paper takes one checkpointing for the whole model and the smallest alpha that fits. The best of these is one start here; the
other has for every rank what would be best if only its memory were short. From both, one rank after another changes: its
layers are checkpointed one by one, those first that free most bytes for their seconds, with the smallest alpha that still
fits, as long as the step gets shorter. So what copies hide is copied, and the rest computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.pipelines.costs import PipeCosts, StageCosts
from holdall.pipelines.pipeline import Pipeline
from holdall.pipelines.swapping.gaps import GapStep, play_gaps, staying
from holdall.pipelines.tasks import BACKWARD, FORWARD
from holdall.types.mesh import Network

NONE, BALANCED, FULL = "none", "balanced", "full"
KINDS = (NONE, BALANCED, FULL)
STEPS = 256  # alpha is a multiple of 1 / STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class YuanLayer:
    """One layer and one micro-batch."""

    forward: float  # seconds
    backward: float
    saved: int  # bytes that autograd saves
    input: int = 0  # those of them that are its input
    lean: int | None = None  # those that are left if results of norms and activation functions are not saved; None: all
    lean_again: float = 0.0  # seconds to compute these again
    weights: int = 0  # bytes, with all that belongs to them
    sent: int = 0  # bytes of its output, if it is the last of a stage

    def kept(self, kind: str) -> int:
        return {NONE: self.saved, BALANCED: self.saved if self.lean is None else self.lean, FULL: self.input}[kind]

    def again(self, kind: str) -> float:
        return {NONE: 0.0, BALANCED: self.lean_again, FULL: self.forward}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class YuanPlan:
    """A simulated step of a pipeline."""

    kinds: tuple[tuple[str, ...], ...]  # stage -> its layers'
    alphas: tuple[float, ...]  # stage -> the fraction of its activations that leaves; 0 where backward follows at once
    leaving: tuple[int, ...]  # stage -> bytes of a micro-batch that leave
    whole: tuple[tuple[int, ...], ...]  # stage -> its layers that leave whole, where layers are not divided
    step: GapStep

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def peak(self) -> tuple[int, ...]:
        """Rank -> bytes of weights and activations."""
        return self.step.peak

    def start_with(self) -> dict[str, list[int]]:
        """The arguments of `holdall.pipelines.start` that run this plan: layers by their numbers in the model."""
        numbered = [(stage, n) for stage, own in enumerate(self.kinds) for n in range(len(own))]
        if any(BALANCED in own for own in self.kinds) or any(
            nbytes and not whole for nbytes, whole in zip(self.leaving, self.whole, strict=True)
        ):
            raise Unsupported(
                "stages recompute and offload whole layers, and this plan divides some", hint="plan_yuan(..., divided=False)"
            )
        return {
            "recompute": [at for at, (stage, n) in enumerate(numbered) if self.kinds[stage][n] == FULL],
            "offload": [at for at, (stage, n) in enumerate(numbered) if n in self.whole[stage]],
        }


def plan_yuan(
    pipeline: Pipeline,
    layers: Sequence[Sequence[YuanLayer]],
    *,
    memory: int,
    host: float,
    network: Network | None = None,
    divided: bool = True,
) -> YuanPlan:
    """The plan for stages of these layers, on ranks of `memory` bytes with a link of `host` bytes per second each way.

    `divided`: tensors are split at alpha, and layers checkpointed in part. Otherwise layers leave and are recomputed whole, as
    `holdall.pipelines.start` does. Raises `Infeasible` if some rank stays over its memory.
    """
    if len(layers) != pipeline.stages or not all(layers):
        raise InvalidInput(f"layers of {len(layers)} stages for {pipeline.stages}", hint="one layer or more for every stage")
    search = _Search(pipeline, layers, memory, host, network, divided=divided)
    alike = min((search.fitted(tuple((kind,) * len(own) for own in layers)) for kind in search.kinds), key=search.order)
    best = min((search.improved(start) for start in (alike, search.apart())), key=search.order)
    over = max(best.peak) - memory
    if over > 0:
        raise Infeasible(
            f"rank {best.peak.index(max(best.peak))} has {over} bytes more than its memory in the best plan found",
            hint="use more stages, or smaller micro-batches",
            smallest=max(best.peak),
        )
    return best


def hidden_share(pipeline: Pipeline, costs: PipeCosts, host: float) -> tuple[float, ...]:
    """Stage -> the largest alpha whose copies computation hides, by the paper's rule: alpha x bytes / rate is at most a forward
    while the pipeline fills, and a forward and a backward after that."""
    found = []
    for stage, own in enumerate(costs.stages):
        tasks = pipeline.lists[pipeline.rank_of[stage]]
        stay = staying(pipeline)
        time = float("inf")
        for at, task in enumerate(tasks):
            if (task.stage, task.kind) != (stage, FORWARD) or (stage, task.batch) in stay:
                continue
            window = 0.0
            for after in tasks[at + 1 :]:
                window += costs.seconds(pipeline, after)
                if after.kind == FORWARD or all(t.kind == BACKWARD for t in tasks[at + 1 :]):
                    break
            time = min(time, window)
        found.append(min(1.0, time * host / own.activations) if time < float("inf") and own.activations else 0.0)
    return tuple(found)


Kinds = tuple[tuple[str, ...], ...]


class _Search:
    def __init__(
        self,
        pipeline: Pipeline,
        layers: Sequence[Sequence[YuanLayer]],
        memory: int,
        host: float,
        network: Network | None,
        *,
        divided: bool,
    ) -> None:
        self._pipeline, self._layers, self._memory, self._host = pipeline, layers, memory, host
        self._network, self._divided = network, divided
        self.kinds = KINDS if divided else (NONE, FULL)
        self._known: dict[tuple[Kinds, tuple[int, ...]], YuanPlan] = {}
        stay = staying(pipeline)
        self._moves = [any((s, b) not in stay for b in pipeline.batches_of(s)) for s in range(pipeline.stages)]

    def order(self, plan: YuanPlan, short: Collection[int] | None = None) -> tuple[int, float, int]:
        """Less is better: bytes over the memory of the ranks that are short of it, seconds, bytes that leave."""
        over = sum(max(0, peak - self._memory) for rank, peak in enumerate(plan.peak) if short is None or rank in short)
        return over, plan.seconds, sum(plan.leaving)

    def fitted(self, kinds: Kinds, short: Collection[int] | None = None) -> YuanPlan:
        """With the smallest alpha of each rank that is short of memory, for all of them at once: as if memory were linear in
        alpha, which it is where copies are hidden, and by bisection where that does not end soon."""
        ranks = range(self._pipeline.ranks)
        plain = self._played(kinds, (0,) * len(ranks))
        full = [rank for rank in ranks if plain.peak[rank] > self._memory and (short is None or rank in short)]
        if not full:
            return plain
        low = [0] * len(ranks)  # does not fit; the others stay where they are
        high = [STEPS if rank in full else 0 for rank in ranks]
        over = [peak - self._memory for peak in plain.peak]
        under = [self._memory - peak for peak in self._played(kinds, tuple(high)).peak]
        for turn in count():
            middle = list(high)
            for rank in full:
                if under[rank] >= 0 and high[rank] - low[rank] > 1:
                    share = over[rank] / (over[rank] + under[rank]) if turn < 4 else 0.5
                    middle[rank] = min(high[rank] - 1, max(low[rank] + 1, ceil(low[rank] + share * (high[rank] - low[rank]))))
            if middle == high:
                return self._played(kinds, tuple(high))
            for rank, peak in enumerate(self._played(kinds, tuple(middle)).peak):
                if middle[rank] == high[rank]:
                    continue
                if peak <= self._memory:
                    high[rank], under[rank] = middle[rank], self._memory - peak
                else:
                    low[rank], over[rank] = middle[rank], peak - self._memory
        raise AssertionError

    def apart(self) -> YuanPlan:
        """Every rank as would be best if the others had memory for all that they hold."""
        none: Kinds = tuple((NONE,) * len(own) for own in self._layers)
        found = list(none)
        for rank in range(self._pipeline.ranks):
            tried = self._best_of(rank, self.fitted(none, [rank]), [rank])
            for stage in self._pipeline.stages_of(rank):
                found[stage] = tried.kinds[stage]
        return self.fitted(tuple(found))

    def improved(self, best: YuanPlan) -> YuanPlan:
        """Checkpoint more or fewer layers of one rank at a time, as long as that makes the plan better."""
        while True:
            before = best
            for rank in range(self._pipeline.ranks):
                best = self._best_of(rank, best)
            if best is before:
                return best

    def _best_of(self, rank: int, best: YuanPlan, short: Collection[int] | None = None) -> YuanPlan:
        for kinds in self._levels(rank, best.kinds):
            if not self.order(best, short)[0]:
                least = self._played(kinds, (0,) * self._pipeline.ranks).seconds
                if least > best.seconds or (least == best.seconds and not sum(best.leaving)):
                    break  # and those with more to compute again are no faster
            tried = self.fitted(kinds, short)
            best = min(best, tried, key=lambda plan: self.order(plan, short))
        return best

    def _levels(self, rank: int, kinds: Kinds) -> Iterator[Kinds]:
        """From no checkpointing on this rank to the most, a layer at a time, the most bytes for the seconds first."""
        now = [list(own) for own in kinds]
        own = [(stage, n) for stage in self._pipeline.stages_of(rank) for n in range(len(now[stage]))]
        for stage, n in own:
            now[stage][n] = NONE
        yield tuple(map(tuple, now))
        while True:
            changes = []
            for stage, n in own:
                layer, before = self._layers[stage][n], now[stage][n]
                freed = {kind: layer.kept(before) - layer.kept(kind) for kind in self.kinds[self.kinds.index(before) + 1 :]}
                able = [kind for kind, nbytes in freed.items() if nbytes > 0]
                for kind in able:  # in the direction of the one that costs least for its bytes, the next one is taken
                    changes.append(((layer.again(kind) - layer.again(before)) / freed[kind], stage, n, able[0]))
            if not changes:
                return
            _, stage, n, kind = min(changes)
            now[stage][n] = kind
            yield tuple(map(tuple, now))

    def _played(self, kinds: Kinds, steps: tuple[int, ...]) -> YuanPlan:
        """`steps`: rank -> alpha x STEPS."""
        if (kinds, steps) not in self._known:
            self._known[kinds, steps] = self._play(kinds, steps)
        return self._known[kinds, steps]

    def _play(self, kinds: Kinds, steps: tuple[int, ...]) -> YuanPlan:
        costs = tuple(_stage_costs(own, of) for own, of in zip(self._layers, kinds, strict=True))
        leaving, whole = [], []
        for stage, own in enumerate(costs):
            wanted = -(-steps[self._pipeline.rank_of[stage]] * own.activations // STEPS) if self._moves[stage] else 0
            found = self._whole(stage, kinds[stage], wanted)
            whole.append(found)
            leaving.append(wanted if self._divided else sum(self._layers[stage][n].saved for n in found))
        step = play_gaps(self._pipeline, PipeCosts(stages=costs, network=self._network), leaving, self._host)
        return YuanPlan(
            kinds=kinds,
            alphas=tuple(n / own.activations if own.activations else 0.0 for n, own in zip(leaving, costs, strict=True)),
            leaving=tuple(leaving),
            whole=tuple(whole),
            step=step,
        )

    def _whole(self, stage: int, kinds: Sequence[str], wanted: int) -> tuple[int, ...]:
        """The first layers that keep what they save, until they have as many bytes; all, if they have fewer."""
        found: list[int] = []
        for n, layer in enumerate(self._layers[stage]) if not self._divided else ():
            if wanted > 0 and kinds[n] == NONE and layer.saved:
                found.append(n)
                wanted -= layer.saved
        return tuple(found)


def _stage_costs(layers: Sequence[YuanLayer], kinds: Sequence[str]) -> StageCosts:
    """Backward goes from the last layer to the first: one computes again what it saves, and those after it are over."""
    kept = [layer.kept(kind) for layer, kind in zip(layers, kinds, strict=True)]
    most = max(sum(kept[:n]) + max(layer.saved, kept[n]) for n, layer in enumerate(layers))
    again = sum(layer.again(kind) for layer, kind in zip(layers, kinds, strict=True))
    return StageCosts(
        forward=sum(layer.forward for layer in layers),
        input=again,
        weight=sum(layer.backward for layer in layers),
        activations=sum(kept),
        in_backward=most,
        sent=layers[-1].sent,
        weights=sum(layer.weights for layer in layers),
    )
