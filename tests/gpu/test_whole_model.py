"""A model on the host whose batch is on the GPU trains there, also under plans that place no model states."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import GPT2Config, GPT2LMHeadModel

import holdall

STEPS = 4


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def world():
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 1024}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", bos_token_id=0, eos_token_id=0)).train()
    ids = torch.randint(0, 1024, (4, 128), device="cuda")
    return model, {"input_ids": ids, "labels": ids}


def train(model, batch, optimizer, steps=STEPS):
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_the_gpu(model, batch):
    plain = copy.deepcopy(model).cuda()
    torch.manual_seed(1)
    return train(plain, batch, torch.optim.AdamW(plain.parameters(), lr=1e-3)), [p.detach().cpu() for p in plain.parameters()]


@pytest.mark.parametrize("planner", ["auto", "chen", "nop"])
def test_the_model_comes_back_trained_and_goes_on(planner):
    model, batch = world()
    expected, weights = on_the_gpu(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = list(model.parameters())
    for steps in (1, STEPS - 1):  # the second time with states from the first
        with holdall.fit(model, optimizer, batch, planner=planner, budget="20GiB") as harness:
            if steps == 1:
                torch.manual_seed(1)
                numbers = None
            if numbers is not None:
                torch.cuda.set_rng_state(numbers)
            losses = train(model, batch, optimizer, steps)
            numbers = torch.cuda.get_rng_state()
            assert not any(action.places_states for action in harness.plan.actions)
            assert next(model.parameters()).is_cuda
        assert losses == (expected[:1] if steps == 1 else expected[1:])
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
        assert {v.device.type for s in optimizer.state.values() for v in s.values()} == {"cpu"}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    assert all(p is q for p, q in zip(model.parameters(), own, strict=True))
    train(model, {name: t.cpu() for name, t in batch.items()}, optimizer, 1)  # plain training goes on, on the host


def test_a_plan_that_places_states_gives_way_to_one_that_does_not():
    model, batch = world()
    expected, _ = on_the_gpu(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda")
    hardware = holdall.probe("cuda", quick=True)
    placed = holdall.plan(trace, planner="zero_offload", budget="20GiB", hardware=hardware)
    bare = holdall.plan(trace, planner="nop", budget="20GiB", hardware=hardware)
    assert any(action.places_states for action in placed.actions)
    torch.manual_seed(1)
    with holdall.apply(placed, model, optimizer) as harness:
        losses = train(model, batch, optimizer, 2)
        harness.switch(bare)
        losses += train(model, batch, optimizer, 1)
        harness.switch(placed)
        losses += train(model, batch, optimizer, 1)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)  # the host's update may differ by an ulp


@pytest.mark.parametrize("recipe", ["int8", "int4", "fp4", "dorefa"])
def test_recipes_with_float32_weights_train(recipe):
    model, batch = world()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdall.fit(model, optimizer, batch, precision=recipe, budget="20GiB") as harness:
        losses = train(model, batch, optimizer, 6)
        assert max(harness.step_peaks) <= 1.02 * harness.plan.predicted.peak["gpu"]
    assert losses[-1] < losses[0]
