"""What the Hugging Face Trainer saves on two processes: runs go on from it, and one process loads it."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import holdall
from holdall.testing.ranks import on_ranks
from holdall.testing.worlds import machine

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
WORDS, LENGTH, ROWS, STEPS = 64, 12, 2, 6
WAYS = {"fsdp": (1, False), "zero1": (2, True)}  # shard: accumulation, mixed precision
BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


def made():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, attention_dropout=0.2, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config)


def trainer(folder, callbacks, how=(1, False), **more):
    accumulate, bf16 = how
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, WORDS, (LENGTH,), generator=generator) for _ in range(STEPS * 2 * ROWS * accumulate)]
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    said = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulate,
        max_steps=STEPS,
        max_grad_norm=0.5,
        bf16=bf16,
        learning_rate=0.01,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **({"save_steps": 2} | more),
    )
    return transformers.Trainer(model=made(), args=said, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


class Found(transformers.TrainerCallback):
    """What a run that is resumed begins with."""

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        self.moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
        self.schedule = lr_scheduler.last_epoch, lr_scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]


class SavesAlone(transformers.TrainerCallback):
    said = ""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        try:
            model.save_pretrained(args.output_dir)
        except holdall.HoldallError as error:
            self.said = error.hint


def callback(**options):
    return holdall.integrations.HoldallCallback(**({"budget": "1GiB", "hardware": machine()} | options))


def run(folder, callbacks, how, resume=None, **more):
    accelerate.state.AcceleratorState._reset_state()  # else it would have the precision of the trainer before
    found = trainer(folder, callbacks, how, **more)
    found.train(resume_from_checkpoint=resume)
    return found


def losses(done):
    return {e["step"]: e.get("loss", e.get("eval_loss")) for e in done.state.log_history if "train_loss" not in e}


def whole(tensors):
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in tensors.items()}


def killed(folder, left):
    """What is left of a run that is killed while it saves step 3."""
    if dist.get_rank() == 0:
        for name in ("checkpoint-2", "checkpoint-3"):
            shutil.copytree(Path(folder, "checkpoint-2"), Path(left, name))
        Path(left, "checkpoint-3", "trainer_state.json").write_text("{")
    dist.barrier()
    return left


def run_all(folder):
    os.environ.update(MASTER_ADDR="localhost", LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")  # as torchrun has them
    found, alone = {"plain": losses(run(f"{folder}/plain", [], WAYS["fsdp"], **BEST))}, SavesAlone()
    for way, how in WAYS.items():
        more = BEST if way == "fsdp" else {}
        through = run(f"{folder}/{way}", [callback(shard=way), alone], how, **more)
        found[way] = {"through": losses(through), "best": whole(through.model.state_dict())}
        found[way] |= {"folder": through.state.best_model_checkpoint, "restored": "save_pretrained" not in vars(through.model)}
        left = killed(f"{folder}/{way}", f"{folder}/{way}-again")
        found[way]["again"] = losses(run(left, [callback(shard=way)], how, resume=True, save_total_limit=2, **more))
        through.save_model(f"{folder}/{way}-end")
        with pytest.raises(holdall.HoldallError) as error:
            through.train()
        found[way]["twice"] = str(error.value)
    plain = run(f"{folder}/on", [callback(shard="fsdp")], WAYS["fsdp"], resume=f"{folder}/plain/checkpoint-4", **BEST)
    return found | {"alone": alone.said, "on": losses(plain)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, on_ranks(2, run_all, str(folder))


def same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(t, expected[name]) for name, t in found.items())


def saved(folder):
    """Weights and optimizer states, read by torch."""
    at = str(folder / "holdall" / "sharded")
    about = dcp.FileSystemReader(at).read_metadata().state_dict_metadata
    states = {name: torch.empty(s.size, dtype=s.properties.dtype) for name, s in about.items()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(states, checkpoint_id=at)
    return load_file(folder / "model.safetensors") | states


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_killed_and_resumed_is_one_that_is_not(ran, way):
    """Losses, weights and states of the optimizer, bit for bit."""
    folder, ranks = ran
    for rank in ranks:
        assert set(rank[way]["through"]) == set(range(1, STEPS + 1))
        assert rank[way]["again"] == rank[way]["through"]  # those before are in the checkpoint
    last, again = (folder / name / f"checkpoint-{STEPS}" for name in (way, f"{way}-again"))
    assert "optimizer.model.norm.weight.exp_avg" in saved(last)
    assert same(saved(last), saved(again))
    assert sorted(p.name for p in again.parent.iterdir()) == ["checkpoint-4", "checkpoint-6"]  # save_total_limit=2


def test_saving_does_not_change_a_loss(ran):
    for rank in ran[1]:
        assert rank["fsdp"]["through"] == rank["plain"]


def test_a_run_goes_on_in_shards_from_one_that_was_not(ran):
    for rank in ran[1]:
        assert rank["on"] == rank["plain"]


def test_the_best_model_is_loaded_and_saved_whole(ran):
    folder, ranks = ran
    assert len({rank["fsdp"]["folder"] for rank in ranks}) == 1
    best = load_file(Path(ranks[0]["fsdp"]["folder"], "model.safetensors"))
    for rank in ranks:
        assert all(torch.equal(rank["fsdp"]["best"][name], t) for name, t in best.items())
    ended = transformers.LlamaForCausalLM.from_pretrained(folder / "fsdp-end")
    assert same(ended.state_dict(), ranks[0]["fsdp"]["best"])
    assert ended.lm_head.weight is ended.model.embed_tokens.weight


def test_one_process_goes_on_from_it(ran):
    folder, ranks = ran
    last, seen = folder / "zero1" / f"checkpoint-{STEPS}", Found()
    loaded = transformers.LlamaForCausalLM.from_pretrained(last)
    assert same(loaded.state_dict(), ranks[0]["zero1"]["best"])
    one = trainer(folder / "one", [callback(), seen])
    one.train(resume_from_checkpoint=str(last))
    assert seen.schedule == (STEPS, [0.0, 0.0], 0.0)
    there = [t for name, t in saved(last).items() if name.endswith("exp_avg")]
    assert sorted(t.double().sum().item() for t in seen.moments) == sorted(t.double().sum().item() for t in there)
    with pytest.raises(pickle.UnpicklingError):  # without holdall it would begin with new states, silently
        trainer(folder / "without", []).train(resume_from_checkpoint=str(last))


def test_what_one_process_cannot_do_is_refused_until_training_ends(ran):
    for rank in ran[1]:
        assert rank["alone"] == "call `trainer.save_model(folder)` on all processes"
        assert rank["fsdp"]["restored"]
        assert "in shards from the training before" in rank["fsdp"]["twice"]
