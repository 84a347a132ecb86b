"""`holdall plan --gpus`: what it prints, what it answers, what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from holdall.cli import app

BASE = ("plan", "tiny-llama", "--seq", "64", "--gpu", "h100")


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def test_a_plan_over_gpus_names_mesh_bytes_and_time(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = run(*BASE, "--gpus", 16, "--dtype", "bf16-mixed")
    assert max(map(len, said.splitlines())) <= 80
    for word in ("16 x h100-sxm", "nodes: infiniband-ndr", "float32 shards", "memory per rank", "tokens/s", "simulated"):
        assert word in said
    assert "zero3 over dp 8, replicated over nodes 2" in said
    searches = said.split("by a closed form")[1]
    assert all(name in searches for name in ("AMSP", "PaRO", "MiCS group of"))


def test_the_smallest_group_that_fits_is_simulated_too():
    """With little memory MiCS takes groups of two nodes, which are no dimension of the cluster."""
    tried = json.loads(run(*BASE, "--gpus", 16, "--per-node", 4, "--json"))
    whole = next(t["bytes"] for t in tried["tried"] if t["way"].startswith("zero3 over nodes"))
    said = json.loads(run(*BASE, "--gpus", 16, "--per-node", 4, "--budget", int(1.1 * whole), "--json"))
    mics = next(f for f in said["closed_form"] if f["system"] == "MiCS")
    assert mics["factors"] == [8, 8, 8]
    assert "zero3 over nodes 2 x dp 4, replicated over 2 groups" in [t["way"] for t in said["tried"]]


def test_the_answer_as_json(tmp_path):
    out = tmp_path / "plan.json"
    said = json.loads(run(*BASE, "--gpus", 4, "--across", "ethernet-100", "--out", out, "--json"))
    assert said["mesh"] == {"dp": 4}
    assert said["source"] == "simulated"
    assert said["bytes_per_rank"] == min(t["bytes"] for t in said["tried"] if t["way"].startswith(f"{said['shard']} "))
    assert said["tokens_per_second"] == pytest.approx(4 * 64 / said["seconds"])
    assert json.loads(out.read_text())["actions"][0]["action"] == "shard"
    mesh = said["over_meshes"]
    assert mesh["cut"][0] == 0 and sum(mesh["devices"]) == 4 and len(mesh["bytes_per_rank"]) == len(mesh["devices"])
    assert said["fastest_seconds"] == min(said["seconds"], mesh["seconds"])


def test_the_fewest_gpus():
    tried = json.loads(run(*BASE, "--gpus", 8, "--search", "shard", "--json"))["tried"]
    budget = min(t["bytes"] for t in tried)  # too little for one
    fewest = json.loads(run(*BASE, "--gpus", 16, "--fewest-gpus", "--budget", budget, "--json"))
    assert 1 < fewest["mesh"]["dp"] <= 8
    assert fewest["bytes_per_rank"] <= budget


def test_the_largest_model():
    said = run("plan", "phi-2", "--seq", 64, "--gpu", "h100", "--gpus", 8, "--largest", "model")
    assert said == "largest model that fits: phi-2\n"  # the only one of its family


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("--gpus", 12), "12 GPUs do not fill nodes of 8"),
        (("--gpus", 8, "--pareto"), "the only questions are"),
        (("--fewest-gpus",), "--fewest-gpus has no bound"),
        (("--gpus", 8, "--inside", "nvlink4"), "did you mean `nvlink-4`"),
        (("--gpus", 8, "--planner", "chen"), "have no effect yet"),
    ],
)
def test_what_cannot_be_asked_is_refused(words, fact):
    assert fact in CliRunner().invoke(app, [*BASE, *map(str, words)]).output


def test_a_budget_that_no_way_fits():
    assert "no way to shard over 8 GPUs fits" in run(*BASE, "--gpus", 8, "--budget", "1MiB", code=3)
