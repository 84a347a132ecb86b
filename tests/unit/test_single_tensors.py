"""Offload of single tensors of a block: the same bits, the predicted bytes in every tier and on every link."""

import copy
import dataclasses
import gc
import json
import math
import random

import pytest
import torch

import holdall
from holdall.actions.offload import Offload, numbered
from holdall.actions.recompute import Recompute
from holdall.actions.recompute import obstacle as cannot_recompute
from holdall.actions.reschedule import Reschedule, effects, obstacle, region
from holdall.errors import InvalidInput
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.simulator import lower
from holdall.testing.chaos import chaos
from holdall.testing.contracts import problem_for, traced, train
from holdall.testing.worlds import HUGGING_FACE, PLAIN, far_peak, far_used
from holdall.types import Copy, Plan
from holdall.types.program import lazily

FAMILIES = [n for n in (*PLAIN, *HUGGING_FACE) if n not in ("tiny-qwen2", "tiny-qwen3")]  # as tiny-llama


def saving(trace):
    return [b for b in trace.blocks if b.saves and b.backward is not None]


def holding(trace, block, rng):
    """A random way for a block to hold tensors: as traced, by a program that keeps some, or with some saves recomputed."""
    way = rng.choice(["plain", "program", "partly"])
    if way == "program" and not obstacle(trace, block):
        ops, count = region(trace, block)
        made = [x for op in ops[:count] for x in op.writes]
        return [Reschedule.of(trace, block, lazily(effects(ops), count, frozenset(x for x in made if rng.random() < 0.7)))]
    if way == "partly" and not cannot_recompute(trace, [block]):
        return [Recompute.of(trace, [block], only=[n for n in range(len(block.saves)) if rng.random() < 0.4] or [0])]
    return []


def in_parts(trace, block, how, rng):
    """Offload some tensors that the block holds, in one part or two, each with moments of its own."""
    by_number = numbered(lower(problem_for(trace), how), block)
    tensors = sorted(set(by_number.values()))
    rng.shuffle(tensors)
    whole = Offload.of(trace, block, overlap=True)
    later = [b.name for b in saving(trace) if b.id > block.id]
    cut = rng.randrange(len(tensors) + 1)
    parts = []
    for chosen, inputs in ((tensors[:cut], whole.inputs), (tensors[cut : cut + 3], ())):
        saves = [n for n, x in by_number.items() if x in chosen and rng.random() < 0.8]  # one save of a tensor is enough
        lag = bool(later) and rng.random() < 0.7
        parts.append(
            Offload(
                block=block.name,
                inputs=inputs if rng.random() < 0.7 else (),
                saves=tuple(saves),
                lag=lag,
                until=rng.choice(later) if lag and rng.random() < 0.5 else "",
                fetch=rng.choice(later) if later and rng.random() < 0.7 else "",
            )
        )
    return parts[: rng.choice([1, 2])]


def mix(trace, rng):
    actions = []
    for block in saving(trace):
        how = holding(trace, block, rng)
        actions += [*how, *in_parts(trace, block, how, rng)]
    return actions


def check_run(name, plan, model, batch, start, expected, weights, steps=2):
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gc.collect()
    with holdall.apply(plan, model, optimizer) as harness:
        got = train(model, batch, optimizer, steps)
        assert far_used(harness) == 0
        sent = {} if harness.store is None else {"cpu->far": harness.store.sent, "far->cpu": harness.store.fetched}
    assert got == expected, plan.actions
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert harness.step_peaks[-1] == plan.predicted.peak["cpu"], plan.actions
    assert far_peak(harness) == plan.predicted.peak.get("far", 0)
    assert {way: n for way, n in sent.items() if n} == {way: steps * n for way, n in plan.predicted.traffic.items() if n}
    assert harness.notes == []


@pytest.mark.parametrize("name", FAMILIES)
def test_any_tensors_of_any_block_give_the_same_bits_and_bytes(name):
    """Views and duplicates of a storage, programs, partly recomputed blocks and several parts of a block among them."""
    rng = random.Random(name)
    model, batch, _, trace = traced(name)
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)
    weights = copy.deepcopy(model.state_dict())
    for _ in range(2 if name in PLAIN else 1):
        plan = finish(Nop(), problem_for(trace), mix(trace, rng))
        check_run(name, plan, model, batch, start, expected, weights)


@pytest.mark.usefixtures("no_modes_left")
@pytest.mark.parametrize("name", ["convnet", "twice", "tiny-llama"])
def test_any_tensors_under_chaos(name):
    rng = random.Random(name + "chaos")
    model, batch, _, trace = traced(name)
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)
    weights = copy.deepcopy(model.state_dict())
    for seed in range(2):
        plan = finish(Nop(), problem_for(trace), mix(trace, rng))
        with chaos(seed, longest=0.001):
            check_run(name, plan, model, batch, start, expected, weights)


@pytest.mark.parametrize("way", ["plain", "program", "replay"])
def test_tensors_below_the_least_size_stay(way):
    """Those that a block saves, that its program keeps, and the inputs of a recomputed block."""
    model, batch, _, trace = traced("tied")
    start = copy.deepcopy(model.state_dict())
    expected = train(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)
    weights = copy.deepcopy(model.state_dict())
    blocks = [b for b in saving(trace)[1:] if not obstacle(trace, b) and not cannot_recompute(trace, [b])][:2]
    how = []
    for block in blocks if way != "plain" else ():
        keeps_all = lazily(effects(region(trace, block)[0]), region(trace, block)[1], frozenset(trace.tensors))
        how.append(Recompute.of(trace, [block]) if way == "replay" else Reschedule.of(trace, block, keeps_all))
    moved = [Offload.of(trace, b, overlap=True) for b in blocks]
    held = {trace.saves[i].tensor: b for b in blocks for i in b.saves}
    own = [trace.tensors[x] for x, b in held.items() if trace.tensors[x].born >= b.first and x not in b.outputs]
    sizes = sorted({math.prod(info.shape) for info in own})
    sent = []
    for least in (0, sizes[len(sizes) // 2], sizes[-1] + 1):
        plan = finish(Nop(), problem_for(trace), [*how, *(dataclasses.replace(a, least=least) for a in moved)])
        check_run("tied", plan, model, batch, start, expected, weights)
        sent.append(plan.predicted.traffic.get("cpu->far", 0))
    assert sent[0] >= sent[1] >= sent[2] == 0 < sent[0]
    assert way == "replay" or sent[0] > sent[1] > 0


def test_all_is_the_default_and_naming_all_is_the_same():
    _, _, _, trace = traced("tiny-gpt2")
    problem = problem_for(trace)
    for block in saving(trace):
        whole = Offload.of(trace, block, overlap=True)
        assert whole.saves is None
        named = dataclasses.replace(whole, saves=tuple(range(len(block.saves))))
        assert finish(Nop(), problem, [whole]).predicted == finish(Nop(), problem, [named]).predicted


def test_a_plan_file_without_the_field_moves_all(tmp_path):
    _, _, _, trace = traced("tied")
    plan = finish(Nop(), problem_for(trace), [Offload.of(trace, saving(trace)[0], overlap=True)])
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["actions"][0]["saves"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_storage_leaves_once_whichever_of_its_saves_is_named():
    """Three linear layers save one input; a view counts as its storage."""
    _, _, _, trace = traced("tiny-llama")
    block = saving(trace)[1]
    problem = problem_for(trace)
    counted = {}
    for n, i in enumerate(block.saves):
        outcome = finish(Nop(), problem, [Offload(block=block.name, saves=(n,))]).predicted
        counted.setdefault(trace.saves[i].tensor, set()).add(outcome.traffic.get("cpu->far", 0))
    assert all(len(sizes) == 1 for sizes in counted.values())
    own = {x for x in counted if block.first <= trace.tensors[x].born <= block.last and x not in block.outputs}
    assert {x: counted[x] for x in own} == {x: {trace.tensors[x].nbytes} for x in own}
    assert len(own) < sum(trace.saves[i].tensor in own for i in block.saves)


def test_two_parts_of_a_block_may_not_name_the_same_tensor():
    _, _, _, trace = traced("tied")
    block = saving(trace)[1]
    problem = problem_for(trace)
    finish(Nop(), problem, [Offload(block=block.name, saves=(0,)), Offload(block=block.name, saves=(1,))])
    for other in (Offload(block=block.name, saves=(0, 1)), Offload(block=block.name)):
        with pytest.raises(InvalidInput, match="twice"):
            finish(Nop(), problem, [Offload(block=block.name, saves=(0,)), other])
    trace = traced("tiny-llama")[3]
    block = saving(trace)[1]
    numbers = {}
    for n, i in enumerate(block.saves):
        if block.first <= trace.tensors[trace.saves[i].tensor].born <= block.last:
            numbers.setdefault(trace.saves[i].tensor, []).append(n)
    first, second = next(n for n in numbers.values() if len(n) > 1)[:2]
    with pytest.raises(InvalidInput, match="saves of one tensor"):
        finish(Nop(), problem_for(trace), [Offload(block=block.name, saves=(n,)) for n in (first, second)])


def test_groups_that_wait_for_one_block_return_in_the_simulated_order():
    """The later block needs its tensors first, and the link serves in order."""
    model, batch, optimizer, trace = traced("tiny-llama")
    blocks = saving(trace)[1:-1]
    last = saving(trace)[-1].name
    actions = [Offload(block=b.name, saves=tuple(range(n, n + 2)), lag=True, fetch=last) for n, b in enumerate(blocks)]
    said = [s for s in lower(problem_for(trace), actions).steps() if isinstance(s, Copy) and s.dst == "cpu"]
    sizes = [sum(trace.tensors[x].nbytes for x in s.tensors) for s in said]
    assert len(set(sizes)) > 1
    seen = []

    def noted(storages):
        seen.append(sum(s.nbytes() for s in storages))
        return storages

    with holdall.apply(finish(Nop(), problem_for(trace), actions), model, optimizer) as harness:
        store = harness.store
        get_all = store.get_all
        store.get_all = lambda tickets, device: noted(get_all(tickets, device))
        train(model, batch, optimizer, 1)
    assert [n for n in seen if n] == sizes
