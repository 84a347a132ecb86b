"""The Hugging Face Trainer on two processes: the same losses and weights as with its own DistributedDataParallel."""

import os

import pytest
import torch

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
WORDS, LENGTH, ROWS, STEPS = 64, 12, 2, 3
RUNS = {  # shard, (accumulation, clipping, mixed precision), other arguments of `fit`
    "bf16": ("fsdp", (1, 0.0, True), {"planner": "chen", "variant": "all"}),
    "clipped": ("ddp", (2, 0.5, False), {}),
}


def trainer(callbacks, accumulate=1, clip=0.0, bf16=False, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes))
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, WORDS, (LENGTH,), generator=generator) for _ in range(STEPS * 2 * ROWS * accumulate)]
    said = transformers.TrainingArguments(
        output_dir="unused",
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulate,
        max_steps=STEPS,
        max_grad_norm=clip,
        bf16=bf16,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **more},
    )
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    return transformers.Trainer(model=model, args=said, train_dataset=data, callbacks=callbacks)


def trained(callbacks, how):
    made = trainer(callbacks, *how)
    made.train()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in made.model.parameters()]
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return {"weights": [w.detach().clone() for w in weights], "losses": losses, "class": type(made.model_wrapped).__name__}


def callback(**options):
    return holdall.integrations.HoldallCallback(**({"budget": "1GiB", "hardware": machine()} | options))


def refused():
    said = {}

    def error_of(name, act):
        try:
            act()
        except holdall.HoldallError as error:
            said[name] = error.fact, error.hint

    error_of("mesh", lambda: trainer([callback(mesh={"dp": 1, "tp": 2})]))
    late = trainer([])
    late.add_callback(callback())
    error_of("late", late.train)
    return said


def trained_all():
    os.environ.update(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")  # as torchrun has them
    found = {}
    for case, (shard, how, options) in RUNS.items():
        found[how] = trained([], how)
        accelerate.state.AcceleratorState._reset_state()  # else the next trainer would have the precision of this one
        with callback(shard=shard, **options) as own:
            found[case] = trained([own], how)
        accelerate.state.AcceleratorState._reset_state()
        found[case] |= {
            "peaks": own.harness.step_peaks,
            "predicted": own.harness.plan.predicted.peak["cpu"],
            "actions": own.harness.plan.count(),
        }
    return found | {"refused": refused()}


@pytest.fixture(scope="module")
def ran():
    return on_ranks(2, trained_all)


@pytest.mark.parametrize("case", RUNS)
def test_losses_and_weights_are_those_of_ddp(ran, case):
    """The bits of a step without accumulation; else means are taken in another order."""
    _, how, _ = RUNS[case]
    for rank in ran:
        own, plain = rank[case], rank[how]
        assert plain["class"] == "DistributedDataParallel" != own["class"]
        near = 0 if how[0] == 1 else 1e-7
        assert len(own["losses"]) == STEPS
        assert own["losses"] == pytest.approx(plain["losses"], rel=near, abs=0)
        assert all(torch.allclose(a, b, rtol=0, atol=near) for a, b in zip(own["weights"], plain["weights"], strict=True))


@pytest.mark.parametrize("case", RUNS)
def test_the_peak_is_the_predicted_one(ran, case):
    """But for numbers that the trainer logs, and a buffer that gloo may hold."""
    for rank in ran:
        assert rank[case]["predicted"] * 0.99 <= min(rank[case]["peaks"][1:]) <= rank[case]["predicted"] + 16_000
    assert "recompute" in ran[0]["bf16"]["actions"]
    assert ran[0]["bf16"]["predicted"] < ran[0]["clipped"]["predicted"]


def test_settings_that_do_not_work_are_refused_in_a_line(ran):
    for rank in ran:
        said = rank["refused"]
        assert "`tp` divides one" in said["mesh"][0]
        assert "callbacks=[callback]" in said["late"][1]
