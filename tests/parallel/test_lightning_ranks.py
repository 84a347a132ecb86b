"""Lightning on two processes: the same losses and weights as with its own DistributedDataParallel."""

import os
import warnings

import pytest
import torch
from torch import nn

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

lightning = pytest.importorskip("lightning")
WIDTH, ROWS, STEPS = 24, 4, 3
RUNS = {  # shard, (accumulation, clipping, mixed precision), other arguments of `fit`
    "bf16": ("fsdp", (1, None, "bf16-mixed"), {"planner": "chen", "variant": "all"}),
    "clipped": ("zero2", (2, 0.5, "32-true"), {}),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Module(lightning.LightningModule):
    """Its steps call a network inside, not the module itself."""

    def __init__(self, adam=False):
        super().__init__()
        self.adam = adam
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))

    def training_step(self, batch, number):
        loss = (self.layers(batch) - batch.sin()).square().mean()
        self.log("loss", loss * self.trainer.world_size)
        return loss

    def validation_step(self, batch, number):
        return self.layers(batch).mean()

    def configure_optimizers(self):
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Other(lightning.pytorch.strategies.DDPStrategy):
    """One that may do more than wrap the module."""


class Kept(lightning.Callback):
    def __init__(self):
        self.losses, self.evaluated = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append(outputs.item())


def trained(callbacks, accumulate, clip, precision, resume=None, adam=False, **more):
    torch.manual_seed(0)
    module, kept = Module(adam), Kept()
    rows = torch.randn(STEPS * 2 * ROWS * accumulate, WIDTH, generator=torch.Generator().manual_seed(3))
    given = {"strategy": "ddp", "accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, "barebones": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        callbacks=[*callbacks, kept],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        precision=precision,
        log_every_n_steps=1,
        **(given | quiet | more),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaders = torch.utils.data.DataLoader(rows, ROWS), torch.utils.data.DataLoader(rows[: 2 * ROWS], ROWS)
        trainer.fit(module, *loaders, ckpt_path=resume)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return {
        "weights": [w.detach().clone() for w in weights],
        "losses": kept.losses,
        "evaluated": kept.evaluated,
        "again": lambda: trainer.validate(module, torch.utils.data.DataLoader(rows, ROWS), verbose=False),
    }


def callback(**options):
    return holdall.integrations.lightning.HoldallCallback(**({"budget": "1GiB", "hardware": machine()} | options))


def resumed(folder, way):
    """Two epochs, and one that is saved and gone on from."""
    more = {"enable_checkpointing": True, "default_root_dir": f"{folder}/{way}", "max_epochs": 2, "adam": True}
    file = lightning.pytorch.callbacks.ModelCheckpoint(f"{folder}/{way}", filename="{epoch}", save_top_k=-1)
    whole = trained([callback(shard=way), file], 1, 0.5, "32-true", **more)
    file = lightning.pytorch.callbacks.ModelCheckpoint(f"{folder}/{way}-again", filename="{epoch}")
    again = trained([callback(shard=way), file], 1, 0.5, "32-true", resume=f"{folder}/{way}/epoch=0.ckpt", **more)
    return {"whole": {k: whole[k] for k in ("weights", "losses")}, "again": {k: again[k] for k in ("weights", "losses")}}


def refused(again):
    said = {}

    def error_of(name, act):
        with pytest.raises(holdall.HoldallError) as error:
            act()
        said[name] = str(error.value)

    plain = (1, None, "32-true")
    error_of("mesh", lambda: trained([callback(mesh={"dp": 1, "tp": 2})], *plain))
    error_of("strategy", lambda: trained([callback()], *plain, strategy=Other()))
    error_of("again", again)
    return said


def trained_all(folder):
    rank = os.environ["RANK"]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", TORCHELASTIC_RUN_ID="0", GROUP_RANK="0", LOCAL_WORLD_SIZE="2")
    os.environ.update(LOCAL_RANK=rank)  # as torchrun has them
    found = {}
    for case, (shard, how, options) in RUNS.items():
        found[how] = trained([], *how)
        own = callback(shard=shard, **options)
        found[case] = trained([own], *how) | {
            "peaks": own.harness.step_peaks,
            "predicted": own.harness.plan.predicted.peak["cpu"],
            "actions": own.harness.plan.count(),
        }
    said = refused(found["clipped"]["again"])
    for one in found.values():
        del one["again"]
    return found | {"refused": said, "resumed": {way: resumed(folder, way) for way in ("fsdp", "zero1")}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    return folder, on_ranks(2, trained_all, str(folder))


@pytest.fixture(scope="module")
def ran(saved):
    return saved[1]


@pytest.mark.parametrize("case", RUNS)
def test_losses_and_weights_are_those_of_ddp(ran, case):
    """The bits of a step without accumulation; else means are taken in another order."""
    _, how, _ = RUNS[case]
    for rank in ran:
        own, plain = rank[case], rank[how]
        near = 0 if how[0] == 1 else 1e-7
        assert len(own["losses"]) == STEPS * how[0]
        assert own["losses"] == pytest.approx(plain["losses"], rel=near, abs=0)
        assert own["evaluated"] == pytest.approx(plain["evaluated"], rel=10 * near, abs=0)
        assert all(torch.allclose(a, b, rtol=0, atol=near) for a, b in zip(own["weights"], plain["weights"], strict=True))


@pytest.mark.parametrize("case", RUNS)
def test_the_peak_is_the_predicted_one(ran, case):
    """But for numbers that the trainer logs, and a buffer that gloo may hold."""
    for rank in ran:
        assert rank[case]["predicted"] * 0.99 <= min(rank[case]["peaks"][1:]) <= rank[case]["predicted"] + 16_000
    assert "recompute" in ran[0]["bf16"]["actions"]


def test_settings_that_do_not_work_are_refused_in_a_line(ran):
    for rank in ran:
        said = rank["refused"]
        assert "is sharded over processes already" in said["again"]
        assert "`tp` divides one" in said["mesh"]
        assert "the trainer's strategy is Other" in said["strategy"]


@pytest.mark.parametrize("way", ["fsdp", "zero1"])
def test_a_run_goes_on_from_lightnings_own_file(saved, way):
    """With the bits of one that was not interrupted; what the file holds is whole."""
    folder, ranks = saved
    for rank in ranks:
        whole, again = rank["resumed"][way]["whole"], rank["resumed"][way]["again"]
        assert len(whole["losses"]) == 2 * STEPS and again["losses"] == whole["losses"][STEPS:]
        assert all(torch.equal(a, b) for a, b in zip(again["weights"], whole["weights"], strict=True))
    first, last = (torch.load(folder / name / "epoch=1.ckpt", weights_only=False) for name in (way, f"{way}-again"))
    module = Module(adam=True)
    module.load_state_dict(first["state_dict"])
    assert all(
        torch.equal(p, w) for p, w in zip(module.parameters(), ranks[0]["resumed"][way]["whole"]["weights"], strict=True)
    )
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(first["optimizer_states"][0])
    for n, p in enumerate(module.parameters()):
        assert type(optimizer.state[p]["exp_avg"]) is torch.Tensor and optimizer.state[p]["exp_avg"].shape == p.shape
        assert torch.equal(optimizer.state[p]["exp_avg"], last["optimizer_states"][0]["state"][n]["exp_avg"])
