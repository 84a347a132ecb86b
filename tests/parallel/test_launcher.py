"""The launcher of ranks for tests: results in order, and failures that say which rank failed and how."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from holdall.testing.ranks import RanksFailed, on_ranks


def ranks_and_sum(start):
    total = torch.full((1,), float(start + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total


def test_results_come_in_the_order_of_the_ranks():
    assert on_ranks(2, ranks_and_sum, 10) == [(0, torch.tensor([21.0])), (1, torch.tensor([21.0]))]


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("a bad shard")
    dist.barrier()


def test_an_error_names_its_rank():
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2: .*fail_on_rank_one.*ValueError: a bad shard"):
        on_ranks(2, fail_on_rank_one)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_names_its_signal():
    with pytest.raises(RanksFailed, match="rank 0 of 1: died of SIGKILL"):
        on_ranks(1, die)


def sleep_on_rank_one():
    time.sleep(60 * dist.get_rank())


def test_a_rank_that_does_not_end_is_named():
    with pytest.raises(RanksFailed, match="rank 1 of 2: did not end within 2 s"):
        on_ranks(2, sleep_on_rank_one, timeout=2)
