"""Layers made of a trace against the sharded step of the same trace; `holdall plan --gpus --search`."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from holdall.analysis.over_meshes import model_of
from holdall.analysis.over_ranks import GpuCluster, plan_over_ranks, ways
from holdall.cli import app
from holdall.experiments.request import find_machine
from holdall.experiments.workload import describe_workload
from holdall.machine.networks import network
from holdall.models import override
from holdall.pipelines.hybrid.picture import held_over_time, mesh_page
from holdall.pipelines.hybrid.plans import HybridPlan, judged, played
from holdall.pipelines.hybrid.strategies import Pricing, Strategy
from holdall.pipelines.meshes import Cluster
from holdall.tracing import groups_of
from holdall.types.plan import silent

GPUS, BATCH = 16, 32


@pytest.fixture(scope="module")
def read():
    workload = describe_workload("smollm2-135m", batch=BATCH, seq=512, dtype="bfloat16", optimizer="adamw")
    workload = replace(workload, source=override(workload.source, {"num_hidden_layers": 4}))
    machine = find_machine("h100-sxm", None, silent)
    model, trace = workload.build()[0], workload.trace(machine.device)
    return model, trace, machine, model_of(trace, model, machine, batch=BATCH, gpus=GPUS, held="float32")


def test_layers_have_all_of_the_model(read):
    model, _, _, layers = read
    assert layers.parameters == sum(p.numel() for p in model.parameters())
    assert layers.batch == GPUS * BATCH
    assert (layers.states.held, layers.states.gradient, layers.states.copy) == (12, 4, 2)
    assert len(layers.layers) == model.config.num_hidden_layers + 2
    block = layers.layers[1]
    assert block.reduces == 2 and block.most_tensor == 3  # rows of attention and of the MLP; three heads of keys
    assert 0.4 < block.divided / block.activations < 0.8  # norms and residuals are whole on every tensor rank
    assert block.output == 2 * 512 * model.config.hidden_size


def test_a_data_parallel_plan_is_near_the_sharded_trace(read):
    model, trace, machine, layers = read
    cluster = GpuCluster(gpus=GPUS)
    listed = [way for way in ways(cluster) if not way.replicate and way.shard != "fsdp"]
    tried = plan_over_ranks(trace, groups_of(model, trace), cluster, machine, held="float32", choices=listed).trials
    networks = {"inside": network("nvlink-4"), "between": network("infiniband-ndr")}
    pricing = Pricing(layers, Cluster(devices=GPUS, per_node=8, memory=2**40, rate=1, **networks))
    count = len(layers.layers)
    for trial in tried:
        strategy = Strategy(1, GPUS, trial.way.shard, trial.recomputes)
        plan = HybridPlan(cut=(0, count), devices=(GPUS,), strategies=(strategy,) * count, micro_batches=1)
        found = judged(pricing, plan)
        assert found.seconds == pytest.approx(trial.outcome.seconds, rel=0.1)
        assert found.peak + machine.context + machine.resident == pytest.approx(trial.peak, rel=0.15)


def run(*words, code=0):
    result = CliRunner().invoke(app, ["plan", "tiny-llama", "--seq", "64", "--gpu", "h100", "--gpus", "8", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_a_search_names_mesh_cut_bytes_and_time(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = run("--search", "galvatron")
    assert max(map(len, said.splitlines())) <= 80
    for word in ("galvatron", "mesh", "stages begin at layer", "memory per rank", "time/step", "simulated"):
        assert word in said
    assert "run by" in said or "not run" in said


def test_what_a_search_does_not_answer_is_refused():
    assert "did you mean `alpa`" in run("--search", "alpaa", code=2)
    assert "answers no other question" in run("--search", "alpa", "--fewest-gpus", code=2)
    assert "--html draws the mesh" in run("--search", "shard", "--html", "x.html", code=2)


def test_a_mesh_is_drawn_with_the_memory_that_it_was_judged_by(read, tmp_path):
    layers = read[-1]
    networks = {"inside": network("nvlink-4"), "between": network("infiniband-ndr")}
    cluster = Cluster(devices=GPUS, per_node=8, memory=2**40, rate=1, **networks)
    pricing, count = Pricing(layers, cluster), len(layers.layers)
    ways = (Strategy(1, GPUS // 2, "ddp", False),) * count
    for schedule in ("one_f_one_b", "zb_h1", "gpipe"):
        plan = HybridPlan(cut=(0, 3, count), devices=(GPUS // 2,) * 2, strategies=ways, micro_batches=4, schedule=schedule)
        plan, found = judged(pricing, plan), played(pricing, plan)
        for rank in range(2):  # another path to the peak than the one that judges
            assert found.fixed(rank) + max(b for _, b in held_over_time(found, rank)) == pytest.approx(plan.peaks[rank], abs=2)
            assert held_over_time(found, rank)[-1][1] == 0
        page = mesh_page(found, plan, title="two stages", memory=cluster.memory, facts={"search": "by hand"})
        assert page.count("<svg") == 2 and page.count('class="held"') == 2
        for word in ("Who does what when", "Memory of every rank", "Bytes between stages", "Stage by stage", "simulated"):
            assert word in page
    target = tmp_path / "mesh.html"
    assert "written to" in run("--search", "galvatron", "--html", target)
    assert "not measured" in target.read_text()
