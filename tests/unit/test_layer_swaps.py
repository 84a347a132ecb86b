"""Layer swaps of blocks that run by programs, and several swaps of one block: the same bits and the predicted bytes."""

import random
from dataclasses import replace

import pytest

from holdall.actions.layer_swap import LayerSwap
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.errors import InvalidInput, Unsupported
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.simulator import lower, simulate
from holdall.testing.chaos import chaos
from holdall.testing.contracts import check_run, problem_for, traced
from holdall.types.program import lazily


def saving(trace):
    return [b for b in trace.blocks if b.saves and b.backward is not None]


def some_programs(trace, rng):
    """Some blocks run by programs that keep some of what they make, their outputs always."""
    found = []
    for block in saving(trace):
        if rng.random() < 0.6 and not obstacle(trace, block):
            ops, count = region(trace, block)
            made = {x for op in ops[:count] for x in op.writes if rng.random() < 0.7}
            found.append(Reschedule.of(trace, block, lazily(effects(ops), count, frozenset({*made, *block.outputs}))))
    return found


def some_swaps(trace, programs, rng):
    """Tensors of most blocks leave, in one part or two with moments of their own."""
    kept = {n: p.tensors for n, p in lower(problem_for(trace), programs).programs.items()}
    found = []
    for block in saving(trace)[:-1]:
        tensors = list(LayerSwap.of(trace, block, kept=kept).tensors(trace))
        rng.shuffle(tensors)
        cut = rng.randrange(len(tensors) + 1)
        later = [b.name for b in saving(trace) if b.id > block.id]
        for part in (tensors[:cut], tensors[cut : cut + 4]):
            if part and rng.random() < 0.8:
                begin = rng.random() < 0.3
                found.append(
                    replace(
                        LayerSwap.of(trace, block, only=part, kept=kept),
                        begin=block.name if begin else "",
                        until=rng.choice(["", rng.choice(later)]),
                        fetch=rng.choice(["", rng.choice(later)]),
                    )
                )
    return found


def mix(trace, rng):
    programs = some_programs(trace, rng)
    return [*programs, *some_swaps(trace, programs, rng)]


@pytest.mark.parametrize("name", ["convnet", "tiny-resnet", "tiny-vgg", "tied", "tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("seed", range(3))
def test_any_swaps_beside_any_programs(name, seed):
    trace = traced(name)[3]
    plan = finish(Nop(), problem_for(trace, overlap=True), mix(trace, random.Random(f"{name} {seed}")))
    assert any(a.made for a in plan.actions if isinstance(a, LayerSwap)) or name == "tiny-vgg"
    harness = check_run(name, plan)
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"]
    assert dict(harness.measured().traffic) == dict(plan.predicted.traffic)


@pytest.mark.parametrize("name", ["convnet", "tiny-resnet"])
def test_late_copies_beside_programs(name):
    trace = traced(name)[3]
    plan = finish(Nop(), problem_for(trace, overlap=True), mix(trace, random.Random(7)))
    with chaos(seed=7):
        check_run(name, plan)


def test_two_swaps_of_one_tensor_are_refused():
    trace = traced("convnet")[3]
    block = saving(trace)[1]
    tensors = [trace.saves[n].tensor for n in block.saves]
    twice = next([n for n, x in enumerate(tensors) if x == y] for y in tensors if tensors.count(y) > 1)
    swap = replace(LayerSwap.of(trace, block), inputs=(), holders=())
    with pytest.raises(InvalidInput, match="two swaps"):
        simulate(problem_for(trace), [replace(swap, inner=tuple(twice[:1])), replace(swap, inner=tuple(twice[1:2]))])
    with pytest.raises(InvalidInput, match="twice"):
        simulate(problem_for(trace), [swap, swap])


def test_a_program_that_keeps_a_tensor_must_be_among_its_holders():
    trace = traced("tiny-resnet")[3]
    blocks = saving(trace)
    ops, count = region(trace, blocks[1])
    program = Reschedule.of(trace, blocks[1], lazily(effects(ops), count, frozenset(blocks[1].outputs)))
    swap = LayerSwap.of(trace, blocks[2])
    assert blocks[1].name in swap.holders
    simulate(problem_for(trace), [program, replace(swap, inner=())])
    with pytest.raises(Unsupported, match="the program of"):
        simulate(problem_for(trace), [program, replace(swap, inner=(), holders=())])
