"""Bad arguments are refused before anything is traced, built or loaded; a loop that leaves the trace hears it once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import holdall
from holdall.actions.recompute import Recompute
from holdall.cli import app
from holdall.errors import InvalidInput
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.testing.contracts import problem_for
from holdall.testing.worlds import family


@pytest.fixture
def nothing_is_traced(monkeypatch):
    def slow(*_, **__):
        raise AssertionError("this takes long")

    monkeypatch.setattr("holdall.fitting.plan_book.PlanBook.__init__", slow)
    monkeypatch.setattr("holdall.problem.probed", slow)


WRONG = [
    ({"model": "gpt2"}, "model"),
    ({"optimizer": 1e-3}, "optimizer"),
    ({"optimizer": "batch"}, "optimizer"),
    ({"batch": None}, "batch"),
    ({"budget": "lots"}, "budget"),
    ({"budget": None}, "budget"),
    ({"budget": "24"}, "budget"),
    ({"budget": {"gpu": "24 parsecs"}}, "budget"),
    ({"budget": {"card": "24GiB"}, "hardware": "rtx-4090"}, "card"),
    ({"planner": "autoo"}, "autoo"),
    ({"planner": 3}, "planner"),
    ({"aheadd": False}, "aheadd"),
    ({"precision": "bf61"}, "bf61"),
    ({"precision": 16}, "precision"),
    ({"head": "rows"}, "rows"),
    ({"head": 0}, "head"),
    ({"head": 1.5}, "head"),
    ({"allow": ["ofload"]}, "ofload"),
    ({"hardware": "rtx-4091"}, "rtx-4091"),
    ({"hardware": 24}, "hardware"),
    ({"loss": "cross_entropy"}, "loss"),
    ({"accumulate": 0}, "accumulate"),
    ({"lengths": 512}, "lengths"),
    ({"reads_gradients": "no"}, "reads_gradients"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG)
def test_fit_refuses_bad_arguments_first(wrong, named, nothing_is_traced):
    model, batch = family("tied")
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "batch": batch, **wrong}
    with pytest.raises(holdall.InvalidInput) as refused:
        holdall.fit(given.pop("model"), given.pop("optimizer"), given.pop("batch"), **given)
    assert named in refused.value.fact
    assert refused.value.hint
    assert "\n" not in refused.value.fact


def test_what_is_right_goes_on(nothing_is_traced):
    model, batch = family("tied")
    with pytest.raises(AssertionError, match="takes long"):
        holdall.fit(model, torch.optim.SGD(model.parameters()), batch, budget={"cpu": "1GiB"}, ahead=False, lengths=[8])


LINES = [
    ("plan gpt2 --planner autoo", "did you mean `auto`"),
    ("plan gpt2 --budget 24GX", "unknown unit"),
    ("plan gpt2 --budget 24", 'did you mean "24GiB"'),
    ("plan gpt2 --budget gpu=24GX,cpu=64GiB", "unknown unit"),
    ("plan gpt2 --gpu rtx-490", "did you mean `rtx-4090`"),
    ("plan gpt2 --dtype bf61", "known:"),
    ("plan gpt2 --autocast bf61", "known:"),
    ("plan gpt2 --allow ofload", "did you mean `offload`"),
    ("trace gpt2 --optimizer adamwv", "did you mean `adamw`"),
    ("train gpt2 --data none.jsonl --out run --budget lots", "24GiB"),
]


@pytest.mark.parametrize(("line", "said"), LINES)
def test_the_command_line_refuses_bad_words_before_torch_is_loaded(line, said, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        f"sys.argv = ['holdall', *{line.split()!r}]\n"
        "from holdall.cli import main; main()"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(holdall.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_words_of_the_command_line_are_those_that_are_understood():
    from holdall.experiments.workload import DTYPE_ALIASES, MIXED
    from holdall.models import DTYPES
    from holdall.tracing.autocast import resolve_autocast

    def refuses(option, word):
        command = get_command(app).resolve_command(None, ["estimate"])[1]
        try:
            command.make_context("estimate", ["tiny-gpt2", option, word])
        except InvalidInput:
            return True
        return False

    words = {*DTYPES, *DTYPE_ALIASES, *MIXED}
    assert refuses("--dtype", "bf61") and not any(refuses("--dtype", word) for word in words)
    for word in ("bf16", "bfloat16", "fp16", "float16", "no", "off", "fp32", "float32"):
        assert not refuses("--autocast", word)
        resolve_autocast(word, "cuda")
    assert refuses("--autocast", "int8")


def test_a_loop_that_leaves_the_trace_hears_it_once_per_kind():
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = holdall.trace(model, batch, optimizer=optimizer)
    plan = finish(Nop(), problem_for(trace), [Recompute.of(trace, [b]) for b in trace.blocks if b.saves])
    with holdall.apply(plan, model, optimizer, enforce=False) as harness:
        for length in (20, 21, 22, 23):
            model(torch.randint(0, 64, (2, length))).backward()
            optimizer.step()
            optimizer.zero_grad()
    left = [note for note in harness.notes if "left the trace" in note]
    kinds = ["a batch", "another block ran", "other inputs", "fewer blocks ran"]
    assert left
    assert all(sum(note.startswith(f"the loop left the trace: {kind}") for note in left) <= 1 for kind in kinds)
    assert len(left) <= len(kinds)
