"""Layers of stages that are computed again or offloaded: bits, bytes that autograd holds, and budgets."""

import itertools
import random

import pytest
import torch
from torch import nn

import holdall.pipelines
from holdall.errors import Infeasible, InvalidInput, Unsupported
from holdall.pipelines import pipeline
from holdall.pipelines.running.budget.choosing import Wishes, chosen
from holdall.pipelines.running.budget.predicted import RankBytes
from holdall.pipelines.running.budget.trial import LayerSaves
from holdall.testing.ranks import on_ranks

LAYERS, WIDTH, N, ROWS = 8, 8, 4, 16
CASES = {
    "kept": ("1f1b", {"recompute": False, "offload": [0]}),
    "recomputed": ("1f1b", {"recompute": True}),
    "some": ("interleaved", {"recompute": [0, 3, 5], "offload": [2, 6]}),
    "offloaded": ("gpipe", {"offload": True}),
    "split": ("zb_h1", {"recompute": [1, 4, 5], "offload": [7]}),
    "split in turns": ("zb_v", {"recompute": [0, 1, 6]}),
    "copies": ("chimera", {"recompute": [0, 7], "offload": [4]}),
}

WAYS = {case: {"keep", "recompute", "offload"} for case in CASES} | {
    "kept": {"keep", "offload"},
    "recomputed": {"recompute"},
    "offloaded": {"offload"},
    "split in turns": {"keep", "recompute"},
}


class Block(nn.Module):
    """Dropout, a buffer that its forward changes, saved outputs (tanh at the end) and layers of different sizes."""

    def __init__(self, n):
        super().__init__()
        self.n, inner = n, WIDTH * (1 + n % 3)
        self.a, self.norm, self.b = nn.Linear(WIDTH, inner), nn.BatchNorm1d(inner), nn.Linear(inner, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        y = self.b(self.drop(torch.tanh(self.norm(self.a(x)))))
        return torch.tanh(x + y) if self.n % 2 else x + y


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(n) for n in range(LAYERS)))


def batch():
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, WIDTH, generator=made)


def loss(output, target):
    return nn.functional.smooth_l1_loss(output, target)


def step(schedule, asked):
    """Gradients of the second step, buffers after it, and the bytes held; dropout is seeded."""
    pipe = holdall.pipelines.start(build(), schedule=schedule, micro_batches=N, loss=loss, **asked)
    pipe.step(*batch())  # finds the shapes
    for p in pipe.parameters():
        p.grad = None
    torch.manual_seed(3)
    mean = pipe.step(*batch()).item()
    gradients = {i: [p.grad for p in module.parameters()] for i, module in pipe.modules.items()}
    buffers = {i: list(module.buffers()) for i, module in pipe.modules.items()}
    saving = pipe.saving
    return mean, gradients, buffers, saving and (saving.predicted, saving.held.most, saving.held.now, saving.by_layer)


def rule(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def budgets():
    """With budgets from what is needed when all is kept down to one that is refused, and then the smallest: what was asked, and
    what was found."""
    found = []
    for asked in ({}, {"offload": True, "place": True}):
        budget, smallest = 1_000_000, None
        while True:
            try:
                given = {"micro_batches": N, "loss": loss, "sample": batch(), "optimizer": rule, "budget": budget, **asked}
                pipe = holdall.pipelines.start(build(), schedule="1f1b", **given)
            except Infeasible as error:
                found.append((len(asked), budget, error.fact, error.hint, error.smallest))
                if smallest is not None:
                    break
                budget = smallest = error.smallest
                continue
            optimizer, given = pipe.optimizer(), batch()
            torch.manual_seed(3)
            for _ in range(2):
                pipe.step(*given)
                pipe.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
            said, saving = pipe.report(), pipe.saving
            weights = [p.detach().clone() for p in pipe.parameters()]
            found.append((len(asked), budget, said, saving.predicted == saving.held.most, saving.layers, weights))
            most = torch.tensor(saving.peak)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            budget = int(0.9 * most) if smallest is None else smallest - 1
    return found


def refusals():
    said = []
    asks = {"recompute": [8]}, {"recompute": True, "offload": [1]}, {"budget": "1MiB"}, {"schedule": "pipedream"}
    for asked in (*asks, {"budget": "1MiB", "optimizer": None, "sample": batch()}):
        given = {"micro_batches": N, "loss": loss, "recompute": [1], "optimizer": torch.optim.SGD} | asked
        with pytest.raises((InvalidInput, Unsupported)) as error:
            holdall.pipelines.start(build(), **given)
        said.append(str(error.value))
    return said


def everything():
    plain = {name: step(name, {}) for name in {schedule for schedule, _ in CASES.values()}}
    cases = {case: step(name, {**asked, "sample": batch()}) for case, (name, asked) in CASES.items()}
    unseen = step("1f1b", {"recompute": True})  # without a sample nothing is predicted
    return plain, cases, unseen, budgets(), refusals()


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_layers_that_keep(ran, case):
    for plain, cases, unseen, _, _ in ran:
        for found, name in [(cases[case], CASES[case][0])] + ([(unseen, "1f1b")] if case == "recomputed" else []):
            expected = plain[name]
            assert found[0] == expected[0]
            for part in (1, 2):
                assert found[part].keys() == expected[part].keys()
                for stage, tensors in found[part].items():
                    assert all(torch.equal(a, b) for a, b in zip(tensors, expected[part][stage], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_autograd_holds_the_bytes_that_were_predicted(ran, case):
    for _, cases, unseen, _, _ in ran:
        predicted, most, now, ways = cases[case][3]
        assert (most, now) == (predicted, 0) and predicted > 0
        assert unseen[3][0] is None
        treated = {n for n, way in ways.items() if way != "keep"}
        assert treated <= {n for some in CASES[case][1].values() for n in (range(LAYERS) if some is True else some or ())}
    assert {way for _, cases, *_ in ran for way in cases[case][3][3].values()} == WAYS[case]


def test_recomputing_and_offloading_lower_what_is_held(ran):
    held = [{case: found[3][1] for case, found in cases.items()} for _, cases, _, _, _ in ran]
    assert held[0]["recomputed"] < 0.6 * held[0]["kept"]  # the first rank holds two micro-batches
    assert all(rank["recomputed"] <= rank["kept"] for rank in held)


def test_a_budget_is_kept_with_few_layers_or_refused_with_the_smallest(ran):
    found = [budgets for *_, budgets, _ in ran]
    for (_, budget, *first), (_, _, *second) in zip(*found, strict=True):
        if isinstance(first[0], str):
            assert first == second and " takes " in first[0] and "use a budget of" in first[1]
            assert first[2] > budget
            continue
        for said, is_held, layers, _ in (first, second):
            peak, expected = max(said.measured.values()), max(said.predicted.values())
            assert peak <= expected < 1.01 * peak and expected <= budget and said.fits and is_held
            assert budget < 1_000_000 or not (any(layers.values()) or said.placed)
    for own in found:
        plain = own[0][-1]
        for *_, weights in (row for row in own if len(row) == 6):
            assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    rounds = [[row for row in found[0] if row[0] == asked] for asked in (0, 2)]
    for rows in rounds:
        (*kept, refused, smallest, again) = rows
        assert len(kept) > 1 and refused[4] == smallest[1] == again[4] == again[1] + 1
        changed = [sum(row[4].values()) for row in (*kept, smallest)]
        assert changed[0] == 0 < changed[-1] and (changed == sorted(changed) or rows is rounds[1])  # placing comes last
        placed = [len(row[2].placed) for row in (*kept, smallest)]
        assert placed == sorted(placed) and placed[0] == 0 and bool(placed[-1]) == (rows is rounds[1])
    assert rounds[1][-1][4] < rounds[0][-1][4]  # offloading frees inputs too, and placing the states
    assert "offload=True or place=True" in rounds[0][-1][3] and "=True" not in rounds[1][-1][3]


def made_up(rng, count, *, equal):
    """Layers that save what they get and some more, one or another of them its output too."""
    numbers, inputs, found = itertools.count(), {}, []
    for _ in range(count):
        saved = inputs | {next(numbers): 16 if equal else rng.choice((4, 8, 16, 32)) for _ in range(rng.randint(1, 3))}
        output = next(numbers)
        saved |= {output: 8} if not equal and rng.random() < 0.4 else {}
        found.append(LayerSaves(saved, inputs, {output}, []))
        inputs = {output: 8}
    return found


def test_few_layers_are_chosen_next_to_trying_all_of_them():
    rng = random.Random(0)
    more = total = 0
    for case in range(40):
        name, rank = rng.choice(("1f1b", "gpipe", "zb_h1", "interleaved")), rng.randrange(2)
        made = pipeline(name, ranks=2, micro_batches=4)
        stages = made.stages_of(rank)
        each = 4 // len(stages)
        bytes_of = RankBytes(made, rank, {s: made_up(rng, each, equal=case % 2) for s in stages})
        firsts, counts = {s: each * n for n, s in enumerate(stages)}, dict.fromkeys(stages, each)
        peaks = {}
        for ways in itertools.product(("keep", "recompute"), repeat=4):
            peaks[ways] = bytes_of.peak({s: ways[firsts[s] : firsts[s] + each] for s in stages})
        for budget in set(peaks.values()):
            found, _ = chosen(Wishes(budget=budget), bytes_of, firsts, counts)
            assert bytes_of.peak(found) <= budget
            fewest = min(ways.count("recompute") for ways, peak in peaks.items() if peak <= budget)
            more += sum(row.count("recompute") for row in found.values()) > fewest
            total += 1
        least = min(peaks.values())
        assert chosen(Wishes(budget=least - 1), bytes_of, firsts, counts) == (None, least)
    assert total > 200 and more <= total // 100


def test_what_does_not_work_is_refused_in_one_line(ran):
    for *_, (number, both, sample, versions, states) in ran:
        assert "`recompute` names layer 8, but the model's are 0 to 7" in number
        assert "layer 1 is to be both recomputed and offloaded" in both
        assert "tensor ranks, context ranks and budgets need a batch to look at" in sample
        assert "a budget is of the optimizer's states too" in states
        assert "`pipedream` computes with several versions of weights" in versions
