"""Tensors that stay between steps are given new memory: values, views and aliases stay."""

import pytest
import torch

from holdall.runtime.arena.together import move_together

CPU = torch.device("cpu")


@pytest.mark.parametrize("at_once", [None, 1000, 0], ids=["all at once", "in parts", "one by one"])
def test_values_views_and_aliases_stay(at_once):
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (7, 400, 64, 64)]
    view, alias = tensors[1][100:200], tensors[2].detach()
    parameter = torch.nn.Parameter(tensors[3])
    expected = [t.clone() for t in tensors]
    moved = move_together([*tensors, view, parameter], CPU, at_once=at_once)
    assert moved == sum(t.nbytes for t in tensors)  # each storage once
    assert all(map(torch.equal, tensors, expected))
    tensors[1].add_(1)
    tensors[2].add_(1)
    assert torch.equal(view, tensors[1][100:200])
    assert torch.equal(alias, tensors[2])
    assert parameter.data_ptr() == tensors[3].data_ptr()


def test_storages_elsewhere_and_empty_ones_are_left_alone():
    fixed = torch.frombuffer(bytearray(64), dtype=torch.uint8)  # memory of another owner cannot be resized
    before = fixed.data_ptr()
    assert move_together([fixed, torch.empty(0), torch.empty(3, device="meta")], CPU) == 0
    assert fixed.data_ptr() == before
