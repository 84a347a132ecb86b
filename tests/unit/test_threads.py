"""How many threads updates on the host get: measured, and then settled."""

import pytest
import torch

from holdall.runtime.states.host_threads import _EACH, Threads, host_threads


@pytest.mark.parametrize(("rates", "chosen"), [({12: 4.2, 15: 4.9}, 15), ({12: 4.2, 15: 4.25}, 12), ({12: 4.2, 15: 3.0}, 12)])
def test_the_faster_number_stays(rates, chosen):
    threads, used = Threads(12, 15), []
    for _ in range(3 * _EACH):
        used.append(threads.awaited())
        threads.took(used[-1], 100, 100 / rates[used[-1]])
    assert used[: 2 * _EACH].count(12) == used[: 2 * _EACH].count(15) == _EACH
    assert set(used[2 * _EACH :]) == {chosen}
    assert threads.few == 12


def test_there_is_nothing_to_choose_on_a_cpu():
    few, many = host_threads(torch.device("cpu"))
    assert few == many == torch.get_num_threads() == Threads(few, many).awaited()


def test_processors_are_left_to_the_launcher_of_a_gpu(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    assert host_threads(torch.device("cuda")) == (12, 15)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1), raising=False)
    assert host_threads(torch.device("cuda")) == (1, 1)
