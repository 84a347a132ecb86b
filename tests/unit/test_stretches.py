"""Large parameters are updated a stretch at a time where a rule looks at each element alone: the same bits, less on the way."""

import copy

import pytest
import torch

import holdall
from holdall.optim.apollo import Apollo
from holdall.optim.compact import Compact
from holdall.optim.galore import GaLore
from holdall.runtime.budget.ledger import Ledger
from holdall.testing.stand_ins import pieces_of

KINDS = {"galore": GaLore, "apollo": Apollo, "compact": Compact}
ROWS, WIDTH = 48, 64


def trained(kind, dtype, steps=3):
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(ROWS, WIDTH).to(dtype))
    optimizer = kind([table], lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        table.grad = torch.randn(ROWS, WIDTH).to(dtype)
        optimizer.step()
    return table, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_bits_and_states_are_those_of_one_walk(kind, dtype):
    whole, one = trained(kind, dtype)
    with pieces_of(1024):  # 3 of them
        parts, several = trained(kind, dtype)
    assert torch.equal(whole, parts)
    mine, other = one.state[whole], several.state[parts]
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        same = (
            torch.equal(value, other[key]) and value.shape == other[key].shape
            if torch.is_tensor(value)
            else value == other[key]
        )
        assert same, key
    assert several.state_bytes(parts) == sum(v.nbytes for v in other.values() if torch.is_tensor(v))


def test_what_is_made_on_the_way_is_as_large_as_a_stretch():
    table, optimizer = trained(GaLore, torch.bfloat16)
    held = [table, table.grad, *(v for v in optimizer.state[table].values() if torch.is_tensor(v))]

    def above():
        with Ledger(seed=held) as counted:
            before = counted.peak
            optimizer.step()
            return counted.peak - before

    assert above() >= 3 * 4 * ROWS * WIDTH
    with pieces_of(512):
        assert above() <= 5 * 4 * 512


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_states_go_from_one_way_to_the_other(kind):
    whole, one = trained(kind, torch.bfloat16, steps=2)
    parts = copy.deepcopy(whole)
    other = kind([parts], lr=1e-2, weight_decay=0.1)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    grad = torch.randn(ROWS, WIDTH).bfloat16()
    whole.grad, parts.grad = grad, grad.clone()
    one.step()
    with pieces_of(1024):
        other.step()
    assert torch.equal(whole, parts)


def test_a_plan_counts_what_stretches_move_and_not_the_whole_each_time():
    def moved():
        table = torch.nn.Embedding(ROWS, WIDTH)
        trace = holdall.trace(
            table, torch.arange(8), optimizer=GaLore(table.parameters(), lr=1e-2), loss=lambda model, ids: model(ids).sum()
        )
        return sum(u.moved for u in trace.units)

    whole = moved()
    with pieces_of(64):  # 48 of them
        assert moved() <= 1.5 * whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_step_traced_for_a_gpu_elsewhere_has_a_gpus_stretches():
    def workspace(device):
        table = torch.nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16)
        ids = torch.arange(ROWS)
        optimizer = GaLore(table.parameters())
        traced = holdall.trace(table, ids, optimizer=optimizer, loss=lambda model, x: model(x).sum(), device=device)
        return traced.units[0].workspace

    with pieces_of(512, on_gpu=2048):
        assert workspace("cuda") == 4 * workspace("cpu")
