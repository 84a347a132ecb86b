"""Published searches for a plan over a mesh, a file each, found by name: `search("alpa", model, cluster)`.

A member is a dataclass with `candidates`, the plans that it thinks best, and a call that simulates the best of them. All of
them see the same layers, prices and simulator (`holdall/pipelines/hybrid`), so their answers can be compared.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from holdall.errors import InvalidInput
from holdall.pipelines.hybrid.layers import HybridModel
from holdall.pipelines.hybrid.plans import HybridPlan
from holdall.pipelines.hybrid.strategies import Pricing, SearchSpace
from holdall.pipelines.meshes import Cluster
from holdall.registry import build_member, load_member, member_names, read_choice

FOLDER = "pipelines/searches"


class MeshSearch(Protocol):
    """A member of `pipelines/searches`."""

    name: ClassVar[str]
    paper: ClassVar[str]

    def candidates(self, pricing: Pricing) -> list[HybridPlan]: ...

    def __call__(self, pricing: Pricing) -> HybridPlan: ...


def search_names() -> tuple[str, ...]:
    return member_names(FOLDER)


def find_search(name: str, **options: Any) -> MeshSearch:
    """The search of this name, with options as keywords or in the name: "flexflow:steps=500"."""
    short, typed = read_choice(name)
    if short not in search_names():
        load_member(FOLDER, short)  # raises, and names what is near
    made: MeshSearch = build_member(FOLDER, short, {**typed, **options}, f"search {name}")
    return made


def search(name: str, model: HybridModel, cluster: Cluster, *, space: SearchSpace | None = None, **options: Any) -> HybridPlan:
    """The plan that a search finds, simulated. Raises `Infeasible` if none of its candidates fits."""
    if model.batch < 1 or not model.layers:
        raise InvalidInput("the model has no layers, or the step no sequences", hint="give both")
    return find_search(name, **options)(Pricing(model, cluster, space))
