"""`holdall layout`: the table of layouts of a planned step, and a layout of one's own in it."""

import json

import pytest
from typer.testing import CliRunner

from holdall.cli import app
from holdall.registry import add_folder, member_names

MINE = """
from dataclasses import dataclass
from typing import ClassVar

from holdall.packing import LaidOut
from holdall.packing.orders import laid_out


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    gap: int = 0

    name: ClassVar[str] = "end_to_end"
    paper: ClassVar[str] = "none: an example"
    is_static: ClassVar[bool] = True

    def __call__(self, lifetimes):
        top, offsets = 0, {}
        for number, tensor in enumerate(lifetimes.tensors):
            offsets[number], top = top, top + tensor.size + self.gap
        return laid_out(lifetimes, offsets)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "little"
    root.mkdir()
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 128}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape}
    (root / "config.json").write_text(json.dumps(config))
    pytest.importorskip("transformers")
    return root


def says(*words):
    result = CliRunner().invoke(app, ["layout", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_table_has_all_layouts_static_ones_first(model):
    result = says(model, "--seq", 32, "--gpu", "t4", "--planner", "nop")
    lines = result.stdout.splitlines()
    assert "live at the peak" in lines[0]
    names = [line.split()[0] for line in lines[3:]]
    assert sorted(names) == sorted(member_names("layouts"))
    kinds = [line.split()[1] for line in lines[3:]]
    assert kinds == sorted(kinds, reverse=True)


def test_json_has_the_bound_and_what_is_reserved(model):
    words = [model, "--seq", 32, "--gpu", "t4", "--planner", "chen", "--json", "--layouts"]
    found = json.loads(says(*words, "best_fit,roam:nodes=100,caching,gmlake").stdout)
    for row in found:
        assert row["live"] <= row["bound"] <= row["reserved"]
        assert row["ratio"] == row["reserved"] / row["live"]
        assert row["is_static"] == (row["name"] in ("best_fit", "roam"))


def test_a_layout_of_ones_own_with_options_is_in_the_table(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDALL_MEMBERS", "")
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "end_to_end.py").write_text(MINE)
    add_folder(tmp_path)
    words = [model, "--seq", 32, "--gpu", "t4", "--planner", "nop", "--json", "--layouts"]
    plain, gaps = json.loads(says(*words, "end_to_end,end_to_end:gap=512").stdout)
    assert gaps["reserved"] == plain["reserved"] + 512 * (plain["tensors"] - 1)
    assert plain["reserved"] > plain["bound"]


@pytest.mark.parametrize(
    ("typed", "fact"), [("imanish", "unknown layout `imanish`"), ("imanishi:move=3", "option of imanishi")]
)
def test_an_unknown_layout_or_option_is_refused_with_the_nearest(typed, fact):
    result = says("gpt2", "--gpu", "t4", "--layouts", typed)
    assert result.exit_code == 2 and fact in result.stderr and "did you mean" in result.stderr
