"""Pipelines beside one another, 2 x 2 ranks: gradients of replicated and sharded stages, and what ranks hold of them."""

import pytest
import torch
from torch import nn

import holdall.pipelines
from holdall.errors import InvalidInput, TraceMismatch, Unsupported
from holdall.parallel.counting import CollectiveBytes
from holdall.pipelines import pipeline
from holdall.pipelines.hybrid.plans import HybridPlan
from holdall.pipelines.hybrid.starting import start_call
from holdall.pipelines.hybrid.strategies import Strategy
from holdall.pipelines.running.pieces import pieces_of
from holdall.testing.ranks import on_ranks

LAYERS, WIDTH, N = 8, 8, 4
MESH = {"pp": 2, "dp": 2}
CASES = [
    ("1f1b", "ddp"),
    ("chimera", "ddp"),
    ("1f1b", "zero2"),
    ("zb_v", "zero2"),
    ("interleaved", "zero3"),
    ("gpipe", "zero3"),
    ("1f1b", "mixed"),
    ("interleaved", "mixed"),
]
MIXED = ["ddp", "zero3", "zero2", "ddp", "zero3", "ddp", "ddp", "zero2"]
AGAIN = {("gpipe", "zero3"): {"recompute": [0, 2, 5], "offload": [3, 7]}, ("zb_v", "zero2"): {"recompute": [1, 6]}} | {
    ("interleaved", "mixed"): {"recompute": [1, 3, 7], "offload": [0, 4]}
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).double()


def batch(replica):
    made = torch.Generator().manual_seed(1 + replica)
    return [torch.randn(8, WIDTH, generator=made, dtype=torch.float64) for _ in range(2)]


def loss(output, target):
    return ((output - target) ** 2).mean()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def local_bytes(tensors):
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)


def step(name, shard):
    more = {**AGAIN[name, shard], "sample": batch(0)} if (name, shard) in AGAIN else {}
    given = {"mesh": MESH, "shard": MIXED if shard == "mixed" else shard}
    pipe = holdall.pipelines.start(build(), schedule=name, micro_batches=N, loss=loss, **given, **more)
    means = [pipe.step(*batch(pipe.replica)).item()]
    with CollectiveBytes("dp", 2) as counted:
        means.append(pipe.step(*batch(pipe.replica)).item())  # gradients are added up
    assert pipe.saving is None or pipe.saving.predicted == pipe.saving.held.most > 0
    held = local_bytes(pipe.parameters()), local_bytes(p.grad for p in pipe.parameters())
    gradients = {i: [whole(p.grad) for p in module.parameters()] for i, module in pipe.modules.items()}
    names = [key for key, _ in pipe.named_parameters()]
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, foreach=True)
    norm = whole(torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1e9)), pipe.clip_grad_norm_(1e9).item()
    optimizer.step()
    return means, gradients, held, names, [whole(p.detach()) for p in pipe.parameters()], counted.sent, norm


def planned(*ways):
    """The mesh of a plan, by the call that it is shown with."""
    strategies = tuple(Strategy(1, 2, ways[n % len(ways)], recompute=n in (1, 4)) for n in range(LAYERS))
    plan = HybridPlan(cut=(0, 3, 8), devices=(2, 2), strategies=strategies, micro_batches=N)
    model = build()
    call, why = start_call(plan, model)
    pipe = eval(call, {"holdall": holdall, "model": model, "loss": loss})
    pipe.step(*batch(pipe.replica))
    ways = pipe.saving.by_layer
    return call, why, ways, [whole(p.grad) for p in pipe.parameters()], pipe.rank


def refused(what):
    asked = {"schedule": "1f1b", "micro_batches": N, "loss": loss, "mesh": MESH}
    tries = {
        "dims": {"mesh": {"pp": 2, "xp": 2}},
        "ranks": {"mesh": {"pp": 2, "dp": 4}},
        "versions": {"schedule": "pipedream", "optimizer": torch.optim.SGD},
        "copies": {"schedule": "chimera", "shard": "zero2"},
        "split": {"schedule": "zb_v", "shard": "fsdp"},
        "way": {"shard": "zero9"},
        "alone": {"mesh": {"pp": 4}, "shard": "zero2"},
        "count": {"shard": ["ddp", "zero2"]},
        "both": {"mesh": {"pp": 2, "tp": 2}, "shard": MIXED},
        "two ways": {"mesh": {"pp": 1, "dp": 2, "tp": 2}, "shard": MIXED},
    }
    with pytest.raises((InvalidInput, Unsupported)) as error:
        holdall.pipelines.start(build(), **{**asked, **tries[what]})
    return str(error.value)


REFUSALS = {
    "dims": "a mesh of pipelines has `pp`, and where they are wanted `dp` and one of tp, cp, ep, not pp x xp",
    "ranks": "the mesh has 8 ranks, but the process group 4",
    "versions": "`pipedream` updates inside a step",
    "copies": "two copies of every stage",
    "split": "`zb_v` computes gradients of weights later",
    "way": "unknown way to share a stage `zero9`",
    "alone": 'shard="zero2" is for stages that several ranks share',
    "count": "`shard` names 2 ways, but the model is cut into 8 pieces",
    "both": 'shard=["ddp", "zero3",',
    "two ways": "pieces that are divided over `tp` are sharded in one way all",
}


def other_batches():
    """Every rank has a batch of its own, as by a sampler over all ranks."""
    pipe = holdall.pipelines.start(build(), micro_batches=N, loss=loss, mesh=MESH)
    with pytest.raises(TraceMismatch) as error:
        pipe.step(*batch(torch.distributed.get_rank()))
    return str(error.value)


def everything():
    return (
        {case: step(*case) for case in CASES},
        {what: refused(what) for what in REFUSALS},
        other_batches(),
        planned("zero2"),
        planned("zero2", "ddp"),
    )


@pytest.fixture(scope="module")
def ran():
    return on_ranks(4, everything)


def expected(name, cut=None):
    """Of one process: gradients of each stage by its own order of additions, the mean over replicas, then micro-batches."""
    made = pipeline(name, ranks=2, micro_batches=N)
    bounds = [4 * n for n in cut or range(0, LAYERS + 1, LAYERS // made.chain)]
    means, totals = [], {}
    for replica in range(2):
        each = []
        for x, y in zip(*(part.chunk(N) for part in batch(replica)), strict=True):
            model = build()
            value = loss(model(x), y)
            value.backward()
            means.append(value.item())
            each.append([p.grad for p in model.parameters()])
        for stage in range(made.stages):
            own = slice(*bounds[stage % made.chain :][:2])
            for n, m in enumerate(made.summed(stage)):
                before = totals.get((stage, replica))
                totals[stage, replica] = each[m][own] if not n else [a + b for a, b in zip(before, each[m][own], strict=True)]
        for stage in range(made.chain, made.stages):  # copies
            pair = zip(totals[stage - made.chain, replica], totals[stage, replica], strict=True)
            totals[stage, replica] = totals[stage - made.chain, replica] = [a + b for a, b in pair]
    mean = {s: [(a + b) / 2 / N for a, b in zip(totals[s, 0], totals[s, 1], strict=True)] for s in range(made.stages)}
    return sum(means) / len(means), {stage: [2 * g for g in grads] for stage, grads in mean.items()}  # two equal steps


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gradients_are_the_bits_of_one_process(ran, case):
    mean, gradients = expected(case[0])
    seen = set()
    for ranks, *_ in ran:
        means, found, *_ = ranks[case]
        assert means == [pytest.approx(mean, rel=1e-6)] * 2  # the loss is a float32
        for stage, own in found.items():
            seen.add(stage)
            assert all(torch.equal(a, b) for a, b in zip(own, gradients[stage], strict=True))
        chain = pipeline(case[0], ranks=2, micro_batches=N).chain
        once = [g.flatten() for stage in range(chain) for g in gradients[stage]]
        assert ranks[case][6][1] == pytest.approx(torch.cat(once).norm().item(), rel=1e-6)
    assert seen == set(gradients)


def mixed_bytes(name, rank):
    """Of a rank's pieces: whole, or halves."""
    made, found = pipeline(name, ranks=2, micro_batches=N), 0
    for n, piece in enumerate(build()):
        if made.rank_of[n * made.chain // LAYERS] == rank:
            found += sum(p.nbytes for p in piece.parameters()) // (1 if MIXED[n] == "ddp" else 2)
    return found


def test_replicas_stay_alike_and_shards_are_halves(ran):
    parameters = sum(p.nbytes for p in build().parameters()) // 2
    for (name, shard), copies in {case: 2 if case[0] == "chimera" else 1 for case in CASES}.items():
        ranks = [found[name, shard] for found, *_ in ran]
        for n, rank in enumerate(ranks):
            share = 1 if shard == "ddp" else 2
            assert rank[2] == (mixed_bytes(name, n // 2) if shard == "mixed" else copies * parameters // share,) * 2
            gradients = [g for own in rank[1].values() for g in own]
            assert torch.allclose(rank[6][0], torch.cat([g.flatten() for g in gradients]).norm(), rtol=1e-14, atol=0)
        for first, second in ((0, 1), (2, 3)):  # of one stage
            assert ranks[first][3] == ranks[second][3]
            assert all(torch.equal(a, b) for a, b in zip(ranks[first][4], ranks[second][4], strict=True))
        names = {key for rank in ranks for key in rank[3]}
        assert names == {key for key, _ in build().named_parameters()}


def test_parameters_are_gathered_once_in_a_step_or_for_every_pass_of_a_micro_batch(ran):
    half = sum(p.nbytes for p in build().parameters()) // 2 // 2  # what a rank does not have of its stage
    for found, *_ in ran:
        sent = {case: rank[5] for case, rank in found.items()}
        assert sent["1f1b", "zero2"]["dp all_gather"] == sent["zb_v", "zero2"]["dp all_gather"] == half
        assert sent["interleaved", "zero3"]["dp all_gather"] == 2 * N * half
        assert {sent[case]["dp reduce_scatter"] for case in CASES if case[1] not in ("ddp", "mixed")} == {half}
        assert not any("all_gather" in link for link in sent["1f1b", "ddp"])


def test_a_plan_is_run_by_the_call_that_it_is_shown_with(ran):
    _, gradients = expected("1f1b", cut=(0, 3, 8))
    alternating = "[" + ", ".join(['"zero2", "ddp"'] * (LAYERS // 2)) + "]"
    plans = [(found, shard) for rank in ran for found, shard in zip(rank[3:], ('"zero2"', alternating), strict=True)]
    for (call, why, ways, found, stage), shard in plans:
        assert call == (
            'holdall.pipelines.start(model, loss=loss, schedule="one_f_one_b", micro_batches=4, cut=[3], '
            f'mesh={{"pp": 2, "dp": 2}}, shard={shard}, recompute=[1, 4])'
        )
        assert not why and {n for n, way in ways.items() if way == "recompute"} == ({1} if stage == 0 else {4})
        assert all(torch.equal(2 * a, b) for a, b in zip(found, gradients[stage], strict=True))


def test_plans_that_are_not_run_say_why():
    same, other = Strategy(1, 2, "zero2"), Strategy(1, 2, "zero3")
    for strategies, changes, why in (
        (
            (Strategy(2, 2, "zero2"),) * 7 + (Strategy(2, 2, "zero3"),),
            {"devices": (4, 4)},
            "sharded differently (zero2, zero3)",
        ),
        ((same,) * 7 + (other,), {"schedule": "zb_h1"}, "`zb_h1` does not run with zero3"),
        ((same,) * 7 + (Strategy(2, 1),), {}, "layers are divided differently, or stages have different"),
        ((same,) * 8, {"cut": (0, 8), "devices": (2,)}, "there is one stage"),
        ((same,) * 9, {}, "the model is cut into 8 pieces, not 9 layers"),
        ((other,) * 8, {"schedule": "zb_h1"}, "`zb_h1` does not run with zero3"),
    ):
        given = {"cut": (0, 3, 8), "devices": (2, 2), "strategies": strategies, "micro_batches": N} | changes
        call, said = start_call(HybridPlan(**given), build())
        assert not call and why in said


def test_a_module_that_a_model_calls_twice_is_two_pieces():
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), tanh, nn.Linear(WIDTH, WIDTH), tanh)
    pieces = pieces_of(model)
    assert len(pieces) == 4 and len(list(nn.Sequential(*pieces).children())) == 4
    x = torch.randn(2, WIDTH)
    assert torch.equal(nn.Sequential(*pieces)(x), model(x))


def test_what_does_not_work_is_refused_in_one_line(ran):
    for _, said, other, *_ in ran:
        for what, part in REFUSALS.items():
            assert part in said[what].splitlines()[0]
        assert "the batch of rank 2 differs from that of rank 0, but they are of one pipeline" in other
