"""Traces of deep models from shallow ones, against traces of the deep ones."""

from dataclasses import replace
from functools import cache

import pytest

import holdall
from holdall.analysis.longer import with_layers
from holdall.experiments.request import plain_outcome
from holdall.experiments.workload import describe_workload
from holdall.models import override

CASES = [("tiny-llama", "cuda", "adamw"), ("tiny-llama", "cpu", "sgd"), ("tiny-gpt2", "cpu", "adamw")]


@cache
def traced(name, device, optimizer, layers):
    workload = describe_workload(name, batch=2, seq=16, optimizer=optimizer)
    field = "n_layer" if "gpt2" in name else "num_hidden_layers"
    return replace(workload, source=override(workload.source, {field: layers})).trace(device)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_longer_trace_is_that_of_the_deeper_model(case):
    longer, deep = with_layers(traced(*case, 4), 7), traced(*case, 7)
    assert [(op.site, op.flops, op.moved) for op in longer.ops] == [(op.site, op.flops, op.moved) for op in deep.ops]
    assert [(b.name, b.first, b.last, b.backward, b.same_as) for b in longer.blocks] == [
        (b.name, b.first, b.last, b.backward, b.same_as) for b in deep.blocks
    ]
    one, other = plain_outcome(longer), plain_outcome(deep)
    assert (one.peak, one.peak_kinds, one.reserved) == (other.peak, other.peak_kinds, other.reserved)
    assert sorted((t.name, t.nbytes, t.born, t.freed or 0) for t in longer.tensors.values()) == sorted(
        (t.name, t.nbytes, t.born, t.freed or 0) for t in deep.tensors.values()
    )
    key = [(s.packed, s.unpacked, s.released) for s in deep.saves]
    assert [(s.packed, s.unpacked, s.released) for s in longer.saves] == key


def test_what_has_no_such_layers_is_refused():
    with pytest.raises(holdall.HoldallError, match="no row of 4 numbered layers"):
        with_layers(traced("tiny-llama", "cpu", "sgd", 2), 7)
