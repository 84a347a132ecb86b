"""The memory that `fit` may use to time ops before there is a plan."""

from __future__ import annotations

import torch

from holdall.fitting.trial_room import limit_of, within
from holdall.units import GiB


def test_the_context_counts_in_the_budget() -> None:
    assert limit_of(24 * GiB, context=GiB, allocated=0) == 23 * GiB


def test_a_model_that_fills_the_budget_leaves_a_little_room() -> None:
    assert limit_of(8 * GiB, context=GiB, allocated=12 * GiB) == 14 * GiB


def test_nothing_is_limited_on_a_cpu() -> None:
    with within(1, torch.device("cpu")):
        torch.zeros(1000)
