"""Steps in an arena on a real GPU: the same bits, every tensor at its offset, less memory reserved for what is live."""

import copy
import gc

import pytest
import torch

pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import GPT2Config, GPT2LMHeadModel

import holdall
from holdall.errors import Unsupported
from holdall.runtime.arena.step_arena import StepArena, lifetimes_of_events
from holdall.runtime.arena.together import move_together
from holdall.types import PlannedLayout
from holdall.units import MiB, format_bytes
from holdall.updates.host_library import find_compiler

if find_compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

STEPS = 8
SHAPES = {  # layers, width, heads, rows, tokens, vocabulary
    "tiny": (2, 64, 2, 2, 32, 256),
    "mid": (8, 768, 12, 8, 512, 8192),
}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


def world(shape):
    layers, width, heads, rows, tokens, vocabulary = SHAPES[shape]
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": tokens, "vocab_size": vocabulary}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", bos_token_id=0, eos_token_id=0)).train()
    ids = torch.randint(0, vocabulary, (rows, tokens), device="cuda")
    return model.cuda(), {"input_ids": ids, "labels": ids}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model, batch, optimizer):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plainly(model, batch):
    model = copy.deepcopy(model)
    optimizer = adamw(model)
    torch.manual_seed(1)
    return [step(model, batch, optimizer) for _ in range(STEPS)], [p.detach().cpu() for p in model.parameters()]


def fitted(model, batch, optimizer, planner, layout):
    return holdall.fit(model, optimizer, batch, planner=planner, layout=layout, head="whole")


def used():
    """(reserved, allocated) at the peak of the last step: the meter resets these when one begins."""
    return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("layout", ["best_fit", "stalloc"])
@pytest.mark.parametrize("planner", ["nop", "chen"])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_in_an_arena_have_the_same_bits_and_their_offsets(shape, planner, layout):
    model, batch = world(shape)
    expected, trained = plainly(model, batch)
    optimizer, losses = adamw(model), []
    torch.cuda.empty_cache()
    with fitted(model, batch, optimizer, planner, layout) as harness:
        arena = harness.arena
        try:
            arena.poison()
        except Unsupported as error:
            print(f"memory is not poisoned: {error.fact}")
        torch.manual_seed(1)
        for n in range(STEPS):
            losses.append(step(model, batch, optimizer))
            print(n, arena.counts, torch.cuda.memory_allocated())  # statistics are torch's still
        counts, size = arena.counts, arena.size
        reserved, allocated = used()
        live = allocated - arena.idle
        planned = harness.plan.about.layout.reserved
        print(f"{shape} {planner} {layout}: planned {format_bytes(planned)}, arena {format_bytes(size)}")
        print(f"  reserved {format_bytes(reserved)}, live {format_bytes(live)}, ratio {reserved / live:.4f}, {harness.notes}")
    assert losses == expected
    assert all(torch.equal(p, q.detach().cpu()) for p, q in zip(trained, model.parameters(), strict=True))
    assert counts.placed > 0
    assert (counts.missed, counts.live) == (0, 0)
    assert counts.peak <= size
    assert size <= 1.1 * counts.peak or shape == "tiny"


@pytest.mark.parametrize("shape", SHAPES)
def test_addresses_of_a_recorded_step_agree_with_its_lifetimes(shape):
    model, batch = world(shape)
    optimizer = adamw(model)
    with fitted(model, batch, optimizer, "chen", "best_fit") as harness:
        arena = harness.arena
        for _ in range(STEPS):
            step(model, batch, optimizer)
        arena.record_next()
        step(model, batch, optimizer)
        torch.cuda.synchronize()
        events = arena.recorded()
        live = {}
        for key, size, offset in events:
            if size < 0:
                live.pop(key, None)
            elif offset >= 0:
                assert all(offset + size <= low or top <= offset for low, top in live.values())
                live[key] = (offset, offset + size)
        assert not live
        born = [e for e in events if e.size >= 0]
        assert {e.offset for e in born} <= set(arena.layout.offsets)
        assert lifetimes_of_events(events, arena.layout.align).load == arena.counts.peak


def test_no_more_is_reserved_than_by_todays_allocator():
    model, batch = world("mid")
    found = {}
    for layout in (None, "best_fit"):
        twin = copy.deepcopy(model)
        optimizer = adamw(twin)
        torch.cuda.empty_cache()
        with fitted(twin, batch, optimizer, "chen", layout) as harness:
            for _ in range(STEPS):
                step(twin, batch, optimizer)
            reserved, allocated = used()
            live = allocated - (harness.arena.idle if harness.arena is not None else 0)
        found[layout] = reserved, live
        print(f"{layout}: reserved {format_bytes(reserved)}, live {format_bytes(live)}, ratio {reserved / live:.4f}")
        del twin, optimizer, harness  # the harness holds the model and its states
        gc.collect()
    (before, _), (now, live) = found[None], found["best_fit"]
    assert now <= before
    assert now - live < 128 * MiB  # segments from before, the last page, and pages of small tensors


def test_a_tensor_that_another_stream_uses_is_freed_after_that():
    size = 8 * MiB
    layout = PlannedLayout(name="best_fit", reserved=2 * size, align=512, smallest=MiB, sizes=(size, size), offsets=(0, size))
    arena = StepArena(layout, torch.device("cuda"), first=0)
    side = torch.cuda.Stream()
    try:
        arena.begin_step()
        first = torch.zeros(size, dtype=torch.uint8, device="cuda")
        assert first.data_ptr() == arena.base
        with torch.cuda.stream(side):
            other = torch.zeros(size, dtype=torch.uint8, device="cuda")
        assert not arena.base <= other.data_ptr() < arena.base + arena.size
        assert arena.counts.other_streams == 1
        first.record_stream(side)
        del first
        assert arena.counts.waits == 1
        second = torch.ones(size, dtype=torch.uint8, device="cuda")
        assert second.data_ptr() == arena.base + size
        arena.end_step()
    finally:
        arena.close()
    assert "record_stream" not in vars(torch.Tensor)
    assert bool((second == 1).all())


def test_an_arena_that_finds_no_room_is_done_without():
    told = []
    reserved = torch.cuda.get_device_properties(0).total_memory * 2
    layout = PlannedLayout(name="best_fit", reserved=reserved, align=512, smallest=MiB, sizes=(), offsets=())
    arena = StepArena(layout, torch.device("cuda"), first=0, note=told.append)
    arena.begin_step()
    kept = torch.ones(4 * MiB, dtype=torch.uint8, device="cuda")
    arena.end_step()
    assert arena.size == 0
    assert "cannot be allocated" in told[0]
    assert bool((kept == 1).all())


def test_moves_leave_cublas_the_workspaces_that_it_had():
    """Were they allocated in a step, a tensor of their size in its plan would give them its place, for good."""
    weight = torch.randn(256, 256, device="cuda", requires_grad=True)
    given = torch.randn(256, 256, device="cuda")

    def multiply():
        torch.autograd.grad((given @ weight).sum(), weight)
        torch.cuda.synchronize()

    multiply()
    before = torch.cuda.memory_allocated()
    move_together([weight, given], torch.device("cuda", 0))
    assert torch.cuda.memory_allocated() >= before
    moved = torch.cuda.memory_allocated()
    multiply()
    assert torch.cuda.memory_allocated() == moved
