"""Who wins where among planners, and the page that shows it."""

from html.parser import HTMLParser

import pytest

from holdall.cli import app
from holdall.experiments.choices import every_planner
from holdall.registry import member_names
from holdall.reporting.comparison import Published, render_comparison
from holdall.reporting.standings import standings


def row(planner, seconds, *, model="m", budget="50%", numerics="exact", cramped=False, **more):
    found = {
        "kind": "planner",
        "model": model,
        "budget": budget,
        "budget_bytes": 1000,
        "planner": planner,
        "feasible": seconds is not None,
        "numerics": numerics,
        "cramped": cramped,
        "predicted_seconds": seconds,
        "predicted_overhead": None if seconds is None else seconds - 1,
        "predicted_peak_bytes": 900,
        "smallest_bytes": None,
        "problem": "",
    }
    return {**found, **more}


def test_the_fastest_wins_and_those_within_a_thousandth_too():
    (cell,) = standings([row("auto", 1.0005), row("rotor", 1.0), row("chen", 1.01)]).cells
    assert cell.winners == ["rotor", "auto"]
    assert cell.of("chen").behind == pytest.approx(0.01)


@pytest.mark.parametrize("out", [{"numerics": "lossy"}, {"cramped": True}])
def test_plans_out_of_the_contest_neither_win_nor_beat_others(out):
    found = standings([row("auto", 1.2), row("actnn", 1.0, **out)])
    assert found.cells[0].winners == ["auto"]
    assert found.worst()[0] == 0


def test_the_verdict_names_the_cell_where_auto_is_furthest_behind():
    rows = [row("auto", 1.0), row("pofo", 1.1), row("auto", 1.3, budget="20%"), row("pofo", 1.0, budget="20%")]
    assert standings(rows).verdict() == (
        "auto is the fastest, or within 0.1% of it, in 1 of 2 cells; at most 30.0% behind (pofo, m at 20%)"
    )
    rows[2] = row("auto", None, budget="20%", problem="does not fit")
    assert "pofo has a plan and auto has none for m at 20%" in standings(rows).verdict()
    assert standings([row("rotor", 1.0)]).verdict().startswith("rotor is the fastest")
    assert standings([row("auto", None)]).verdict() == "no plan fits any of the budgets"


class _Tags(HTMLParser):
    """Tags that are open, and what shows on hover."""

    def __init__(self):
        super().__init__()
        self.open, self.titles = [], []

    def handle_starttag(self, tag, attrs):
        self.titles += [value for name, value in attrs if name == "title"]
        if tag not in ("meta", "br"):  # which have no end
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_escapes_names_closes_its_tags_and_gives_reasons():
    rows = [row("auto", 1.0, model="<m>"), row("chen", None, model="<m>", smallest_bytes=2048)]
    published = [Published(planner="chen", paper="Chen & al.", idea="<i>", claims=[("a `k` claim", "tests/t.py::test")])]
    page = render_comparison(standings(rows), published, {"hardware": "a <gpu>"})
    assert "<m>" not in page and "<i>" not in page and "<gpu>" not in page
    tags = _Tags()
    tags.feed(page)
    assert not tags.open
    assert "needs 2.0 KiB" in tags.titles and "tests/t.py::test" in tags.titles


def test_all_means_every_planner_with_a_limit_for_exact_ones():
    found = {choice.name: choice.options for choice in every_planner(time_limit=3.0)}
    assert set(found) == set(member_names("planners"))
    assert found["moccasin"] == {"time_limit": 3.0} and found["rotor"] == {} == found["rockmate"]


def test_two_models_on_one_page(tmp_path):
    pytest.importorskip("transformers")
    from typer.testing import CliRunner

    page = tmp_path / "page.html"
    words = ["compare", "tiny-gpt2", "tiny-llama", "--seq", "16", "--gpu", "rtx-4090", "--planners", "auto,rotor"]
    done = CliRunner().invoke(app, [*words, "--budgets", "60%", "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "auto is the fastest" in done.output
    text = page.read_text()
    assert "tiny-gpt2" in text and "tiny-llama" in text and "test_rotor.py" in text
    refused = CliRunner().invoke(app, [*words, "--plot", "x.png"])
    assert refused.exit_code != 0
