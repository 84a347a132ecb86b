"""Chaos: what is trained under it is what is trained without it, and it finds who reads too early."""

import copy
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from holdall.runtime.states.weights.slots import Slots
from holdall.testing import draws
from holdall.testing.chaos import Chaos, chaos, current, main, run_draw
from holdall.testing.readers import READERS
from holdall.tiers.far import Far

pytestmark = pytest.mark.usefixtures("no_modes_left")
SMALL = ("tied", "twice", *READERS)
SECONDS = 12  # of the sample; `python -m holdall.testing.chaos` draws as many as it is told


def test_it_is_off():
    assert current() is None


def test_it_is_on_inside_and_off_after_an_error():
    with pytest.raises(ZeroDivisionError), chaos(3) as on:
        assert current() is on
        assert on.seed == 3
        _ = 1 / 0
    assert current() is None


def test_the_environment_puts_it_on():
    """As the module is loaded, in a process of its own."""
    code = (
        "import importlib, os\nfrom holdall.testing.chaos import current\nfrom holdall.tiers import _chaos\n"
        "print(current().seed)\n"
        "for asked in ('chaos', 'other'):\n"
        "    os.environ['HOLDALL_DEBUG'] = asked\n    found = importlib.reload(_chaos).current()\n"
        "    print(None if found is None else found.seed)"
    )
    env = {**os.environ, "HOLDALL_DEBUG": "other,chaos:2", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["2", "0", "None"]


def test_a_copy_is_over_when_it_was_waited_for_and_not_before():
    store, source = Far(), torch.arange(64, dtype=torch.uint8)
    seen = set()
    with chaos(0) as on:
        for _ in range(20):
            ticket = store.reserve(64)
            assert store.memory(ticket).tolist() == [255] * 64
            store.push(ticket, source)
            seen.add(torch.equal(store.memory(ticket), source))
            store.arrived(ticket)
            assert torch.equal(store.memory(ticket), source)
            target = torch.zeros(64, dtype=torch.uint8)
            event = store.pull(ticket, target)
            seen.add(torch.equal(target, source))
            event.wait()
            assert torch.equal(target, source)
            storage = store.get(ticket, "cpu")
            store.wait_in(ticket)
            assert storage.tolist() == source.tolist()
            store.free(ticket)
        assert on.late
        assert on.poisoned
    assert seen == {True, False}


def test_copies_of_one_stream_are_made_in_their_order():
    store = Far()
    tickets = [store.reserve(8) for _ in range(6)]
    target = torch.zeros(8, dtype=torch.uint8)
    for n, ticket in enumerate(tickets):
        store.memory(ticket).fill_(n)
    with chaos(1):
        events = [store.pull(ticket, target) for ticket in tickets]
        events[-1].wait()
        assert target.tolist() == [5] * 8
        for event in events:
            event.wait()
    assert target.tolist() == [5] * 8


def test_poison_is_nan_in_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        memory = torch.zeros(64, dtype=torch.uint8)
        Chaos().poison(memory)
        assert memory.view(dtype).isnan().all()


def test_whoever_reads_too_early_is_found(monkeypatch):
    """Without the slots, a parameter that no block reads is computed with before its update."""
    monkeypatch.setattr(Slots, "__getitem__", dict.__getitem__)
    d = replace(
        draws.draw(0, 0),
        family="top-parameters",
        rule="plain",
        narrow=False,
        rows=0,
        kind=("resident", "host"),
        when="overlap_forward",
        clipped="always",
        accumulate=1,
        activations=False,
    )
    found = run_draw(d, longest=0.001)
    assert any("/seen" in path for path in found)


def test_a_sample_of_draws_trains_as_plain_training_does():
    began, made = time.monotonic(), 0
    while time.monotonic() - began < SECONDS and made < 60:
        d = draws.draw(11, made, SMALL)
        assert run_draw(d, longest=0.001) == [], d
        made += 1
    assert made >= 3


def test_the_command_says_what_it_did(capsys):
    assert main(["--draws", "1", "--families", "tied", "--longest", "0.001"]) == 0
    assert capsys.readouterr().out.strip() == "1 draws on cpu: 0 differ from plain training, 0 refused"


def test_a_draw_is_the_same_every_time():
    assert draws.draw(3, 5) == draws.draw(3, 5)
    assert len({str(draws.draw(3, n)) for n in range(50)}) == 50
    assert copy.copy(draws.draw(3, 5)).number == "3/5"
