"""All memory of a rank of a pipeline: what is predicted of a training step is what a ledger counts, and no step passes it."""

import pytest
import torch
from torch import nn

import holdall.pipelines
from holdall.testing.ranks import RanksFailed, on_ranks

LAYERS, WIDTH, N, ROWS, LENGTH = 8, 32, 4, 32, 4
RULES = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}
KEPT, AGAIN, AWAY = {}, {"recompute": True}, {"recompute": [0, 3, 5], "offload": [2, 6]}
TWO = {  # schedule, rule, what is asked
    "kept": ("1f1b", "adamw", KEPT),
    "groups": ("gpipe", "amsgrad", AWAY),
    "again": ("interleaved", "adafactor", AGAIN),
    "placed": ("1f1b", "adagrad", {"place": [1, 6], "offload": True}),
    "in two": ("zb_h1", "adamw", AWAY),
    "in two, next to each other": ("zb_v", "sgd", AGAIN),
    "copies": ("chimera", "adamw", {"place": True}),
    "overlapped": ("dualpipe_v", "sgd", AGAIN),
    "accumulated": ("gpipe", "adamw", {"recompute": True, "accumulate": 2}),
    "stashed": ("pipedream", "sgd", KEPT),
    "predicted": ("xpipe", "adamw", {"budget": "1GiB"}),
    "double": ("2bw", "sgd", KEPT),
}
FOUR = {
    "data": ("1f1b", "adamw", {"mesh": {"pp": 2, "dp": 2}, "recompute": True}),
    "zero2": ("interleaved", "adamw", {"mesh": {"pp": 2, "dp": 2}, "shard": "zero2"}),
    "zero3": ("1f1b", "adamw", {"mesh": {"pp": 2, "dp": 2}, "shard": "zero3", "recompute": True}),
    "tensor": ("1f1b", "sgd", {"mesh": {"pp": 2, "tp": 2}}),
    "context": ("1f1b", "adamw", {"mesh": {"pp": 2, "cp": 2}, "recompute": True}),
    "rows": ("1f1b", "adamw", {"replicas": [3, 1], "recompute": [0, 1]}),
}
HELD = 64  # bytes: a thread of gloo may hold what was summed for a moment after its collective is over
ABOVE = {"zero3": 0.15, "rows": 0.05}  # what the prediction may be above the ledger; elsewhere 1 %


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        inner = WIDTH * (2 + n % 3)
        self.a, self.norm, self.b, self.drop = (
            nn.Linear(WIDTH, inner),
            nn.LayerNorm(inner),
            nn.Linear(inner, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        return x + self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


class Gated(nn.Module):
    """Columns and a row, which tensor ranks divide."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build(case):
    torch.manual_seed(0)
    return nn.Sequential(*(Gated() if case == "tensor" else Block(n) for n in range(LAYERS)))


def batch(seed, rows=ROWS):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, LENGTH, WIDTH, generator=made), torch.randn(rows, LENGTH, WIDTH, generator=made)


def begun(case):
    schedule, rule, asked = (TWO | FOUR)[case]
    given = {"rows": {"micro_batches": 2}}.get(case, {"micro_batches": N})
    given |= {"loss": nn.functional.mse_loss, "sample": batch(0, 24 if case == "rows" else ROWS), "optimizer": RULES[rule]}
    return holdall.pipelines.start(build(case), schedule=schedule, **given, **asked)


def train(case):
    """Predicted and measured after three training steps, clipped."""
    pipe = begun(case)
    inside = schedule_updates(pipe)
    optimizer = None if inside else pipe.optimizer()
    for step in range(3):
        for n in range(TWO.get(case, ("", "", {}))[2].get("accumulate", 1)):
            inputs, targets = batch(10 * step + 4 * n + pipe.replica, 24 if case == "rows" else ROWS)
            pipe.step(inputs, targets)
        if not inside:
            pipe.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    said = pipe.report()
    return dict(said.predicted), dict(said.measured), str(said), inside


def schedule_updates(pipe):
    return bool(pipe.optimizers)


def over():
    """A batch of twice the rows of the sample, in a budget for that."""
    given = {"micro_batches": N, "loss": nn.functional.mse_loss, "sample": batch(0), "optimizer": RULES["sgd"]}
    need = holdall.pipelines.start(build(""), **given).saving.peak
    most = torch.tensor(need)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    pipe = holdall.pipelines.start(build(""), **given, budget=int(most) + HELD)
    pipe.optimizer()
    pipe.step(*batch(0))
    assert pipe.report().fits
    pipe.step(*batch(0, 2 * ROWS))


def on_two():
    return {case: train(case) for case in TWO}


def on_four():
    return {case: train(case) for case in FOUR}


@pytest.fixture(scope="module")
def two():
    return on_ranks(2, on_two)


@pytest.fixture(scope="module")
def four():
    return on_ranks(4, on_four)


def check(case, found):
    predicted, measured, text, inside = found
    above = ABOVE.get(case, 0.01)
    for part in ("pipe.step",) if inside else ("pipe.step", "optimizer.step"):
        assert measured[part] - HELD <= predicted[part] <= (1 + above) * measured[part], (case, part, text)
    assert "peak in pipe.step" in text and "predicted" in text


@pytest.mark.parametrize("case", TWO)
def test_a_step_takes_what_was_predicted(two, case):
    for cases in two:
        check(case, cases[case])


@pytest.mark.parametrize("case", FOUR)
def test_ranks_beside_a_pipeline_take_what_was_predicted(four, case):
    for cases in four:
        check(case, cases[case])


def test_a_step_that_passes_the_budget_ends_on_all_ranks():
    with pytest.raises(RanksFailed, match=r"OverBudget: .* over the budget of \d.*KiB"):
        on_ranks(2, over)
