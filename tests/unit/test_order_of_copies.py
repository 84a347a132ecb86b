"""The link serves copies in order, so runs issue them in the order that the simulator has."""

import itertools

import pytest
import torch

import holdall
from holdall.actions.offload import Offload
from holdall.actions.place import Place, streamable
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.runtime.harness import Harness
from holdall.simulator.lower import lower
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import family
from holdall.tiers.far import Far
from holdall.types import Copy


class Noting(Far):
    """Remembers what came back."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def pull(self, ticket, target, *, after=None):
        self.seen.append("weights")
        return super().pull(ticket, target, after=after)

    def get_all(self, tickets, device):
        self.seen += ["activations"] if tickets else []
        return super().get_all(tickets, device)


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_that_a_block_waits_for_come_before_activations_of_the_next(overlap):
    model, batch = family("tiny-llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    problem = problem_for(trace)
    can = streamable(trace)
    rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in trace.units}
    place = Place.of(trace, rows, when="step", overlap=overlap)
    leaving = [b for b in trace.blocks if b.saves and b.backward is not None and "layers" in b.name]
    offloads = [Offload(block=b.name, inputs=(), lag=True, fetch=after.name) for b, after in itertools.pairwise(leaving)]
    assert offloads
    weights = {x for u in trace.units for x in u.weights}
    said = [
        "weights" if weights.issuperset(step.tensors) else "activations"
        for step in lower(problem, [*offloads, place]).steps()
        if isinstance(step, Copy) and step.dst == problem.home and step.lands
    ]
    store = Noting()
    with Harness(finish(Nop(), problem, [*offloads, place]), model, optimizer, stores=[store]):
        for _ in range(2):
            store.seen.clear()
            model(**batch).loss.backward()
            seen = list(store.seen)
            optimizer.step()
            optimizer.zero_grad()
    assert seen == said
    assert "weights activations weights activations" in " ".join(seen)
