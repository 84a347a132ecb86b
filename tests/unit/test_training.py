"""A run that was interrupted ends as one that was not; nothing half-written is taken for a checkpoint; mistakes get a line."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from holdall import models
from holdall.cli.train import train
from holdall.errors import HoldallError, Infeasible, InvalidInput, OverBudget, Unsupported
from holdall.testing.stand_ins import full_disk
from holdall.training import TrainOptions, loop
from holdall.training.checkpoint import latest_checkpoint, save_checkpoint
from holdall.training.data import load_sequences, make_encoder
from holdall.training.loop import run_training
from holdall.units import MiB

ONE_LAYER = {}  # preset -> folder
CORPUS = Path(str(files("holdall") / "data" / "corpus.txt"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def one_layer(tmp_path_factory):
    """The presets with a single layer, as folders: tracing a step costs more than running it."""
    for name in ("tiny-llama", "tiny-gpt2"):
        source = models.override(models.describe(name), {"num_hidden_layers": 1})
        ONE_LAYER[name] = str(tmp_path_factory.mktemp("models") / name)
        models.build(source, device="cpu").save_pretrained(ONE_LAYER[name])


def options(out, **changes):
    small = {"model": ONE_LAYER["tiny-llama"], "batch": 2, "seq": 32, "steps": 6, "save_every": 3, "keep": 9}
    rest = {"data": CORPUS, "planner": "nop", "device": "cpu", "eval_fraction": 0.0, "warmup": 2, "lr": 1e-3}
    return TrainOptions(out=out, **{**small, **rest, **changes})


def rows_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# data


def sequences(tmp_path, text, name="data.txt", **changes):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_sequences(path, make_encoder(None), **{"seq": 2, "vocabulary": 512, **changes})


def test_documents_are_joined_by_the_end_token_and_cut_to_length(tmp_path):
    lines = '{"text": "ab"}\n\n{"text": "cde", "other": 1}\n'
    packed = sequences(tmp_path, lines, "data.jsonl")
    assert packed.train.tolist() == [[97, 98], [0, 99], [100, 101]]  # the last end token fills no sequence


def test_a_text_file_is_one_document(tmp_path):
    assert sequences(tmp_path, "a\n\nb\n").train.tolist() == [[97, 10], [10, 98]]


def test_a_text_longer_than_one_piece_is_read_whole(tmp_path):
    text = "".join(f"{i}\n" for i in range(300_000))
    packed = sequences(tmp_path, text)
    assert bytes(packed.train.flatten().tolist()) == text.encode()


def test_the_chosen_field_is_read(tmp_path):
    assert sequences(tmp_path, '{"body": "ab"}', "data.jsonl", field="body").train.tolist() == [[97, 98]]


def test_every_epoch_is_a_new_order_of_all_sequences(tmp_path):
    packed = sequences(tmp_path, "".join(chr(97 + i) * 2 for i in range(20)))
    epochs = [packed.batch(20 * e, 20)["input_ids"][:, 0].tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(97, 117)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = sequences(tmp_path, packed.train.astype("u1").tobytes(), seed=1)
    assert epochs[0] != other.batch(0, 20)["input_ids"][:, 0].tolist()


def test_a_position_is_all_that_is_needed_to_go_on(tmp_path):
    packed = sequences(tmp_path, "the quick brown fox jumps")
    whole = packed.batch(0, 30)["input_ids"]  # more than two epochs
    parts = [packed.batch(position, 5)["input_ids"] for position in range(0, 30, 5)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_end_of_the_file_is_held_out(tmp_path):
    packed = sequences(tmp_path, "aabbccdd", eval_fraction=0.25)
    assert packed.held_out.tolist() == [[100, 100]]
    assert packed.train[:, 0].tolist() == [97, 98, 99]
    assert [len(b["labels"]) for b in packed.held_out_batches(4)] == [1]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data.txt", b"", "is empty"),
        ("data.jsonl", b"\n\n", "is empty"),
        ("data.txt", b"a", "holds 1 tokens, fewer than one sequence of 2"),
        ("data.txt", b"\xff\xfe\xff\xfe", "not UTF-8"),
        ("data.jsonl", b'{"text": "ab"}\n{"text": ', "line 2 of"),
        ("data.jsonl", b'{"text": "ab"}\n[1]\n', "line 2 of"),
        ("data.jsonl", b'{"body": "ab"}', "line 1 of .* has no field `text`"),
        ("data.jsonl", b'{"text": 5}', "is int, not text"),
    ],
)
def test_bad_data_is_refused_in_a_line(tmp_path, name, content, says):
    with pytest.raises(InvalidInput, match=says) as caught:
        sequences(tmp_path, content, name)
    assert "\n" not in caught.value.fact and caught.value.hint


def test_the_fields_that_are_there_are_offered(tmp_path):
    with pytest.raises(InvalidInput, match="its fields: body, id"):
        sequences(tmp_path, '{"body": "ab", "id": 1}', "data.jsonl")


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "nowhere.txt", tmp_path):
        with pytest.raises(InvalidInput, match="cannot read"):
            load_sequences(path, make_encoder(None), seq=2, vocabulary=512)


def test_too_little_to_hold_out_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="held out"):
        sequences(tmp_path, "ab", eval_fraction=0.1)


def test_tokens_the_model_does_not_know_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="token 98, but the model knows 98"):
        sequences(tmp_path, "ab", vocabulary=98)


def save_tokenizer(folder):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(kinds.WordLevel({"<end>": 0, "<unk>": 1, "the": 2, "fox": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)


def test_the_folders_own_tokenizer_is_used(tmp_path):
    save_tokenizer(tmp_path)
    encoder = make_encoder(tmp_path)
    assert encoder.encode("the fox the cat").tolist() == [2, 3, 2, 1]
    assert encoder.end == 0 and encoder.tokenizer is not None


def test_a_broken_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"tokenizer in .* cannot be read"):
        make_encoder(tmp_path)


# options


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"steps": 0},
        {"accumulate": -1},
        {"keep": 0},
        {"seq": 1},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"clip": -1.0},
        {"eval_fraction": 1.0},
        {"betas": (0.9, 1.0)},
        {"dtype": "float99"},
    ],
)
def test_an_option_out_of_range_is_named(tmp_path, change):
    with pytest.raises(InvalidInput, match=next(iter(change))):
        options(tmp_path, **change)


# checkpoints


@pytest.fixture
def trained():
    """A tiny model and its optimizer after one step."""
    source = models.describe("tiny-llama")
    model = models.build(models.override(source, {"num_hidden_layers": 1}), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**models.sample_batch(source, batch=1, seq=8)).loss.backward()
    optimizer.step()
    return model, optimizer


def save(out, step, trained, **changes):
    model, optimizer = trained
    return save_checkpoint(out, step, **{"model": model, "optimizer": optimizer, "about": {}, "keep": 9, **changes})


def folders(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_the_last_checkpoints_are_kept(tmp_path, trained):
    for step in (1, 2, 3):
        save(tmp_path, step, trained, keep=2)
    assert folders(tmp_path) == ["step-000002", "step-000003"]
    assert latest_checkpoint(tmp_path).step == 3


def test_no_folder_has_no_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_a_save_that_was_killed_is_ignored_and_later_cleared(tmp_path, trained):
    save(tmp_path, 1, trained)
    with full_disk(100, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, trained)
    assert folders(tmp_path) == ["step-000001", "step-000002.tmp"]
    assert latest_checkpoint(tmp_path).step == 1
    save(tmp_path, 2, trained)
    assert folders(tmp_path) == ["step-000001", "step-000002"]


def test_a_complete_folder_that_was_not_renamed_is_ignored(tmp_path, trained):
    folder = save(tmp_path, 1, trained)
    folder.rename(folder.with_name("step-000001.tmp"))
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("lost", ["complete.json", "optimizer.safetensors", "model.safetensors"])
def test_a_checkpoint_that_lost_a_file_or_a_part_of_it_is_passed_over(tmp_path, trained, lost):
    save(tmp_path, 1, trained)
    damaged = save(tmp_path, 2, trained) / lost
    damaged.write_bytes(damaged.read_bytes()[:20])
    assert latest_checkpoint(tmp_path).step == 1
    damaged.unlink()
    assert latest_checkpoint(tmp_path).step == 1


def test_a_full_disk_is_said_in_a_line_and_leaves_the_checkpoint_before(tmp_path, trained):
    before = save(tmp_path, 1, trained)
    files_before = {path.name: path.read_bytes() for path in before.iterdir()}
    with full_disk(len(files_before["model.safetensors"]) + 100), pytest.raises(HoldallError) as caught:
        save(tmp_path, 2, trained, keep=1)
    assert caught.value.fact == ("cannot save the checkpoint of step 2: No space left on device; the one of step 1 is intact")
    assert folders(tmp_path) == ["step-000001"]  # what was half-written is gone, and gives its space back
    assert {path.name: path.read_bytes() for path in before.iterdir()} == files_before


def test_everything_loads_without_holdall_and_without_pickle(tmp_path, trained):
    from transformers import AutoModelForCausalLM

    model, optimizer = trained
    folder = save(tmp_path, 1, trained)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.use_cache and not model.config.use_cache
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    about = json.loads((folder / "training.json").read_text())["optimizer"]  # from here on as the module's docstring says
    named = dict(loaded.named_parameters())
    rebuilt = torch.optim.AdamW([{**g, "params": [named[n] for n in g["params"]]} for g in about["groups"]])
    for key, value in load_file(folder / "optimizer.safetensors").items():
        name, _, field = key.rpartition(".")
        rebuilt.state[named[name]][field] = value
    batch = models.sample_batch(models.describe(folder), batch=1, seq=8)
    for m, o in ((model, optimizer), (loaded.train(), rebuilt)):
        o.zero_grad()
        m(**batch).loss.backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


# runs


def interrupted(step):
    def stop(row):
        if row["step"] == step:
            raise KeyboardInterrupt

    return stop


def assert_same_bits(one, other):
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        first, second = load_file(one / name), load_file(other / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])  # the second one drops out
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, model):
    model, mine = ONE_LAYER[model], torch.get_rng_state()
    whole = run_training(options(tmp_path / "whole", model=model))
    assert torch.equal(torch.get_rng_state(), mine)  # the caller's numbers are the caller's
    with pytest.raises(KeyboardInterrupt):
        run_training(options(tmp_path / "parts", model=model), on_metrics=interrupted(5))
    resumed = run_training(options(tmp_path / "parts", model=model))
    assert (whole.resumed_from, resumed.resumed_from) == (None, 3)
    assert_same_bits(whole.checkpoint, resumed.checkpoint)
    one, other = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    assert [row["step"] for row in other] == [1, 2, 3, 4, 5, 6]  # the lost steps were run again, and are there once
    assert [(row["loss"], row["learning_rate"]) for row in one] == [(row["loss"], row["learning_rate"]) for row in other]


def test_a_run_may_go_on_under_another_budget(tmp_path):
    model = {"model": "tiny-gpt2", "batch": 4, "seq": 64, "steps": 4, "save_every": 2}
    whole = run_training(options(tmp_path / "whole", **model))
    with pytest.raises(KeyboardInterrupt):
        run_training(options(tmp_path / "parts", **model), on_metrics=interrupted(3))
    tight = round(0.75 * whole.predicted_peak_bytes)
    resumed = run_training(options(tmp_path / "parts", **model, planner="auto", budget=tight))
    assert resumed.peak_bytes <= tight
    assert_same_bits(whole.checkpoint, resumed.checkpoint)


def test_the_loss_goes_down_and_what_was_held_out_is_asked(tmp_path):
    changes = {"model": "tiny-llama", "steps": 30, "batch": 4, "lr": 3e-3, "eval_fraction": 0.005, "eval_every": 10}
    result = run_training(options(tmp_path, **changes, save_every=0))
    rows = rows_of(tmp_path)
    assert result.loss < result.first_loss - 1.0
    asked = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert list(asked) == [10, 20, 30]
    assert asked[30] < asked[10] and result.eval_loss == asked[30]
    assert result.peak_bytes == result.predicted_peak_bytes  # on a CPU, to the byte
    assert all(row["tokens_per_second"] > 0 and row["peak_bytes"] <= row["predicted_peak_bytes"] for row in rows)
    assert folders(tmp_path) == ["step-000030"]
    assert (tmp_path / "report.html").is_file()
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 30


def test_a_local_folder_is_fine_tuned_from_its_weights(tmp_path):
    source = models.describe("tiny-llama")
    model = models.build(source, device="cpu", seed=7)
    model.save_pretrained(tmp_path / "mine")
    save_tokenizer(tmp_path / "mine")
    lines = tmp_path / "data.jsonl"
    lines.write_text('{"text": "the fox the fox the cat"}\n' * 40)
    result = run_training(options(tmp_path / "out", model=str(tmp_path / "mine"), data=lines, seq=8, lr=1e-12, steps=1))
    data = load_sequences(lines, make_encoder(tmp_path / "mine"), seq=8, vocabulary=512)
    assert result.loss == pytest.approx(model(**data.batch(0, 2)).loss.item())
    assert make_encoder(result.checkpoint).encode("fox").tolist() == [3]  # the checkpoint is a whole model folder
    assert not result.notes


def test_a_folder_without_weights_or_tokenizer_says_so(tmp_path):
    models.describe("tiny-llama").config.save_pretrained(tmp_path / "mine")
    config = tmp_path / "mine" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["LlamaForCausalLM"]}))
    result = run_training(options(tmp_path / "out", model=str(tmp_path / "mine"), steps=1))
    assert [note.split(" holds ")[1] for note in result.notes] == [
        "no weights: training begins with random ones",
        "no tokenizer: each byte of the text is a token",
    ]


def test_accumulated_gradients_are_planned_for(tmp_path):
    two = run_training(options(tmp_path / "two", accumulate=2, batch=2, steps=3))
    four = run_training(options(tmp_path / "four", accumulate=1, batch=4, steps=3))
    assert two.loss == pytest.approx(four.loss, rel=1e-4)
    assert two.peak_bytes == two.predicted_peak_bytes
    again = run_training(options(tmp_path / "again", accumulate=2, steps=3, budget=two.predicted_peak_bytes))
    assert again.loss == two.loss
    with pytest.raises(Infeasible):
        run_training(options(tmp_path / "tight", accumulate=2, steps=3, budget=two.predicted_peak_bytes - 1))


def test_what_was_in_memory_is_written_down_where_a_run_runs_out(tmp_path, monkeypatch):
    seen = {}

    def fit(*args, **given):
        seen.update(given)
        raise HoldallError("enough")

    monkeypatch.setattr("holdall.api.fit", fit)
    with pytest.raises(HoldallError, match="enough"):
        run_training(options(tmp_path / "out", record=tmp_path / "oom"))
    assert seen["record"] == tmp_path / "oom"


def test_blocks_can_be_compiled(tmp_path):
    plain = run_training(options(tmp_path / "plain", steps=2))
    compiled = run_training(options(tmp_path / "compiled", steps=2, compile="aot_eager"))
    assert compiled.loss == plain.loss
    assert any("are compiled by `aot_eager`" in note for note in compiled.notes)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(HoldallError, match=r"is (nan|inf) at step \d; .* step \d is intact") as caught:
        run_training(options(tmp_path, lr=1e30, clip=0.0, save_every=1, warmup=0))
    good = latest_checkpoint(tmp_path)
    assert f"at step {good.step + 1};" in caught.value.fact
    assert all(torch.isfinite(t).all() for t in load_file(good.folder / "model.safetensors").values())
    assert len(rows_of(tmp_path)) == good.step


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_check_finite", lambda *_: None)  # as if loss and gradient had still been numbers
    with pytest.raises(HoldallError, match="weights are no longer finite at step 2"):
        run_training(options(tmp_path, lr=1e30, clip=0.0, save_every=1, warmup=0))
    assert folders(tmp_path) == ["step-000001"]


def test_a_failed_save_in_a_run_leaves_the_one_before_to_go_on_from(tmp_path):
    changes = {"steps": 2, "save_every": 1}
    said = "step 2: No space left on device; the one of step 1 is intact"
    with full_disk(2 * MiB), pytest.raises(HoldallError, match=said):  # a checkpoint takes 1.3 MiB
        run_training(options(tmp_path, **changes))
    assert run_training(options(tmp_path, **changes)).resumed_from == 1


def test_what_cannot_be_continued_is_refused_and_what_was_changed_is_said(tmp_path):
    run_training(options(tmp_path, steps=1))
    with pytest.raises(InvalidInput, match="already holds a checkpoint of step 1"):
        run_training(options(tmp_path, steps=2, resume=False))
    for change in ({"seed": 1}, {"dtype": "bfloat16"}, {"seq": 16}, {"model": ONE_LAYER["tiny-gpt2"]}):
        with pytest.raises(InvalidInput, match="is not that of the checkpoint"):
            run_training(options(tmp_path, steps=2, **change))
    nothing = run_training(options(tmp_path, steps=1))
    assert "nothing to do" in nothing.notes[-1] and nothing.loss is None
    changed = run_training(options(tmp_path, steps=2, lr=2e-3))
    assert changed.notes[:2] == ("resumed with steps 2, which was 1", "resumed with lr 0.002, which was 0.001")
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_budget_that_is_too_small_is_refused_before_the_first_step(tmp_path):
    with pytest.raises((Infeasible, OverBudget)):
        run_training(options(tmp_path, budget="1MiB"))
    assert latest_checkpoint(tmp_path) is None


def test_only_causal_language_models_are_trained(tmp_path):
    with pytest.raises(Unsupported, match="masked-lm"):
        run_training(options(tmp_path, model="tiny-bert"))


@pytest.mark.parametrize("change", [{"planner": "magic"}, {"budget": "much"}, {"device": "gpu"}, {"hardware": "rtx-4090"}])
def test_a_wrong_name_or_size_is_said_before_the_data_is_read(tmp_path, change):
    with pytest.raises(InvalidInput, match=next(iter(change.values()))):
        run_training(options(tmp_path, data=tmp_path / "nowhere.txt", **change))


def test_a_checkpoint_that_the_disk_cannot_hold_is_refused_at_the_start(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(InvalidInput, match=r"a checkpoint takes 1\.3 MiB, but .* has 1000 B free"):
        run_training(options(tmp_path))


# the command


def command(*words):
    app = typer.Typer()
    app.command()(train)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_prints_one_object(tmp_path):
    small = ("--planner", "nop", "--batch", 2, "--seq", 32, "--steps", 2, "--eval-fraction", 0.001, "--device", "cpu")
    result = command("tiny-llama", "--data", CORPUS, "--out", tmp_path, *small, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["steps"] == 2 and said["eval_loss"] > 0
    assert said["checkpoint"] == str(tmp_path / "checkpoints" / "step-000002")
    again = command("tiny-llama", "--data", CORPUS, "--out", tmp_path, *small)
    assert "nothing to do" in again.stdout


def test_the_command_raises_what_is_wrong(tmp_path):
    result = command("tiny-llama", "--data", tmp_path / "nowhere.txt", "--out", tmp_path)
    assert isinstance(result.exception, InvalidInput)
