"""A model in a pipeline as a user has it: a training loop, a decoder of Hugging Face, time, refusals."""

import time

import pytest
import torch
from torch import nn

import holdall.pipelines
from holdall.errors import InvalidInput, Unsupported
from holdall.pipelines import PipeCosts, StageCosts, pipeline, simulate
from holdall.testing.ranks import RanksFailed, on_ranks

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def build(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def batch(rows=16):
    made = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made)


def loss(output, target):
    return ((output - target) ** 2).mean()


# time


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Sleeper(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Nap.apply(x * self.scale, self.seconds, 2 * self.seconds)


def naps(name, stages, seconds, enough):
    """The shortest of a few steps, each as long as its slowest rank; others may be on the machine's cores."""
    pipe = holdall.pipelines.start(
        nn.Sequential(*(Sleeper(seconds) for _ in range(stages))), schedule=name, micro_batches=4, loss=loss
    )
    pipe.step(*batch())  # finds the shapes
    took = []
    while len(took) < 12 and min(took, default=enough + 1) > enough:
        torch.distributed.barrier()
        start = time.perf_counter()
        pipe.step(*batch())
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        took.append(slowest.item())
    return min(took)


@pytest.mark.parametrize(("name", "stages", "seconds"), [("1f1b", 4, 0.05), ("interleaved", 8, 0.03), ("chimera", 4, 0.05)])
def test_sleeping_stages_take_the_simulated_time(name, stages, seconds):
    made = pipeline(name, ranks=4, micro_batches=4)
    each = StageCosts(forward=seconds, input=seconds, weight=seconds)
    expected = simulate(made, PipeCosts(stages=(each,) * stages)).makespan
    measured = max(on_ranks(4, naps, name, stages, seconds, 1.15 * expected))
    assert expected <= measured <= 1.15 * expected


# use


def train(name):
    """Two steps with an optimizer and gradients that accumulate over two batches."""
    pipe = holdall.pipelines.start(build(8), schedule=name, micro_batches=4, loss=loss, cut=[1])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for _ in range(2):
        pipe.step(*batch())
        pipe.step(*batch(8))
        optimizer.step()
        optimizer.zero_grad()
    return {key: p.detach() for key, p in pipe.named_parameters()}


def test_a_loop_trains_as_one_process_does():
    model = build(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for inputs, targets in (batch(), batch(8)):
            before = [p.grad for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                loss(model(x), y).backward()
            for p, old in zip(model.parameters(), before, strict=True):
                p.grad = p.grad / 4 if old is None else old + p.grad / 4
        optimizer.step()
        optimizer.zero_grad()
    first, second = on_ranks(2, train, "1f1b")
    assert len(first) == 4 and len(second) == 28  # the cut: one block, and seven
    expected = dict(model.named_parameters())
    assert (first | second).keys() == expected.keys()
    assert all(torch.equal(p, expected[key]) for key, p in (first | second).items())


def llama_step():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model, whole = LlamaForCausalLM(config), LlamaForCausalLM(config)
    whole.load_state_dict(model.state_dict())
    ids = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(2))

    def words(logits, target):
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    pipe = holdall.pipelines.start(model, schedule="interleaved", micro_batches=2, loss=words)
    pipe.step(ids, ids)
    for part in ids.chunk(2):
        words(whole(part).logits, part).backward()
    expected = {name: p.grad / 2 for name, p in whole.named_parameters()}
    here = dict(pipe.named_parameters())
    on_meta = sum(p.is_meta for p in model.parameters())
    worst = max((p.grad - expected[name]).abs().max().item() for name, p in here.items())
    return len(here), on_meta, worst


def test_a_hugging_face_decoder_is_cut_by_its_layers():
    pytest.importorskip("transformers")
    results = on_ranks(2, llama_step)
    total = 4 * 9 + 3
    assert sum(count for count, _, _ in results) == total
    assert all(count + on_meta == total for count, on_meta, _ in results)  # other ranks' stages take no memory
    assert max(worst for _, _, worst in results) <= 1e-6


# refusals


def refused(what):
    given = {"schedule": "1f1b", "micro_batches": 4, "loss": loss}
    model = build(4)
    changes = {
        "layout": lambda: holdall.pipelines.start(Block(), **given),
        "few": lambda: holdall.pipelines.start(build(1), **given),
        "cut": lambda: holdall.pipelines.start(model, cut=[3, 2], **given),
        "rows": lambda: holdall.pipelines.start(build(4), **given).step(*batch(6)),
        "optimizer": lambda: holdall.pipelines.start(model, **{**given, "schedule": "pipedream"}),
        "gradients": lambda: holdall.pipelines.start(build(4), optimizer=torch.optim.SGD, **given).step(*batch(8)),
        "predict": lambda: holdall.pipelines.start(model, optimizer=torch.optim.Adagrad, **{**given, "schedule": "xpipe"}),
    }
    said = {}
    for name in what:
        with pytest.raises((InvalidInput, Unsupported)) as error:
            changes[name]()
        said[name] = str(error.value)
    return said


REFUSALS = {
    "layout": "neither an nn.Sequential nor laid out like Llama",
    "few": "1 layers do not make 2 stages",
    "cut": "does not make 2 stages of 4 layers",
    "rows": "6 rows does not split into 4 equal micro-batches",
    "optimizer": "makes the optimizer itself",
    "gradients": "no optimizer has been made",
    "predict": "cannot predict the weights of Adagrad",
}


def test_what_does_not_work_is_refused_in_one_line():
    for said in on_ranks(2, refused, list(REFUSALS)):
        for name, part in REFUSALS.items():
            assert part in said[name].splitlines()[0]
    with pytest.raises(InvalidInput, match="no process group"):
        holdall.pipelines.start(build(4), micro_batches=4, loss=loss)


def test_fit_does_not_take_a_pipeline_for_shards():
    with pytest.raises(Unsupported, match="a mesh with `pp` is a pipeline"):
        holdall.trace(build(2), batch()[0], loss=lambda model, x: model(x).sum(), mesh={"pp": 2})


def differ():
    torch.manual_seed(torch.distributed.get_rank())
    name = "1f1b" if torch.distributed.get_rank() == 0 else "nonsense"
    holdall.pipelines.start(build(4), schedule=name, micro_batches=4, loss=loss)


def test_an_error_of_one_rank_is_raised_on_all():
    with pytest.raises(RanksFailed, match="rank 1 failed, so no rank goes on"):
        on_ranks(2, differ)
