"""Plans of published planners for pipelines, run on ranks."""

import torch
from torch import nn

import holdall.pipelines
from holdall.pipelines import pipeline
from holdall.pipelines.running.budget.trial import try_stage
from holdall.pipelines.swapping.shared_link import SharedLink, SwapBlock
from holdall.pipelines.swapping.tmo import DISJOINT, tmo_way
from holdall.pipelines.swapping.yuan import YuanLayer, plan_yuan
from holdall.testing.ranks import on_ranks

WIDTH, N, ROWS, PIECES = 8, 4, 16, 8


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        inner = WIDTH * (1 + n % 3)
        self.a, self.norm, self.b, self.drop = (
            nn.Linear(WIDTH, inner),
            nn.LayerNorm(inner),
            nn.Linear(inner, WIDTH),
            nn.Dropout(0.2),
        )

    def forward(self, x):
        return x + self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(n) for n in range(PIECES)))


def batch():
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, WIDTH, generator=made)


def planned():
    """Bytes of the layers by a trial of each, and a plan for two ranks with two stages each."""
    made = pipeline("interleaved", ranks=2, micro_batches=N)
    layers = []
    for block in build():
        given = torch.randn(ROWS // N, WIDTH, requires_grad=True)
        (found,) = try_stage(nn.Sequential(block), given, torch.device("cpu")).layers
        nbytes = ROWS // N * WIDTH * 4
        saved = sum(found.saved.values()) + nbytes
        layers.append(YuanLayer(forward=1.0, backward=2.0, saved=saved, input=nbytes))
    stages = [layers[n : n + 2] for n in range(0, PIECES, 2)]
    most = plan_yuan(made, stages, memory=10**9, host=1000.0, divided=False)
    return plan_yuan(made, stages, memory=int(0.55 * max(most.peak)), host=1000.0, divided=False)


def trained(asked):
    pipe = holdall.pipelines.start(
        build(),
        schedule="interleaved",
        micro_batches=N,
        loss=nn.functional.mse_loss,
        cut=[2, 4, 6],
        sample=batch(),
        **asked,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    torch.manual_seed(3)
    means = []
    for _ in range(3):
        means.append(pipe.step(*batch()).item())
        optimizer.step()
        optimizer.zero_grad()
    saving = pipe.saving
    return means, [p.detach() for p in pipe.parameters()], saving and (saving.predicted, saving.held.most, saving.by_layer)


def both(asked):
    return trained({}), trained(asked)


def test_a_plan_runs_on_two_ranks_with_the_bits_of_plain_training_and_the_bytes_predicted():
    plan = planned()
    asked = plan.start_with()
    assert asked["offload"] and asked["recompute"] and not {*asked["offload"]} & {*asked["recompute"]}
    for rank, (plain, ran) in enumerate(on_ranks(2, both, asked)):
        assert ran[0] == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(ran[1], plain[1], strict=True))
        predicted, held, ways = ran[2]
        assert predicted == held <= plan.peak[rank]
        assert {n for n, way in ways.items() if way == "offload"} <= {*asked["offload"]}
        assert {n for n, way in ways.items() if way == "recompute"} <= {*asked["recompute"]}


def alike(away):
    """Gradients after a step of two data-parallel ranks, of which each sends layers of its own away; and what each holds."""
    found = []
    for layers in (None, away[torch.distributed.get_rank()]):
        pipe = holdall.pipelines.start(
            build(),
            schedule="naive",
            micro_batches=1,
            loss=nn.functional.mse_loss,
            mesh={"pp": 1, "dp": 2},
            offload=layers,
            sample=[part.chunk(2)[0] for part in batch()],
        )
        torch.manual_seed(3)
        pipe.step(*(part.chunk(2)[pipe.replica] for part in batch()))
        found.append([p.grad for p in pipe.parameters()])
    return *found, pipe.saving.predicted == pipe.saving.held.most, pipe.saving.by_layer


def test_ranks_that_send_different_layers_away_have_the_same_gradients():
    """TMO's fourth relation: different sets on data-parallel ranks, and all-reduced gradients with the bits of keeping all."""
    blocks = [SwapBlock(nbytes=100)] * PIECES
    plan = tmo_way(DISJOINT, blocks, SharedLink(rate=200.0), gpus=2, memory=500)
    ranks = on_ranks(2, alike, plan.away)
    assert plan.away[0] != plan.away[1]
    for own, (kept, away, is_predicted, ways) in zip(plan.away, ranks, strict=True):
        assert is_predicted and [n for n, way in ways.items() if way == "offload"] == list(own)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(kept, away, ranks[0][0], strict=True))
