"""Who wins where among planners, and the page that shows it."""

from html.parser import HTMLParser

import pytest

from holdall.cli import app
from holdall.experiments.choices import every_planner
from holdall.registry import member_names
from holdall.reporting.comparison import Published, PublishedOrder, render_comparison
from holdall.reporting.standings import standings, tally


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
        "solve_seconds": 0.5,
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


def test_two_planners_are_compared_where_both_have_a_plan():
    rows = [row("tsplit", 1.0), row("vdnn", 3.0), row("tsplit", 2.0, budget="20%"), row("vdnn", 1.0, budget="20%")]
    rows += [row("tsplit", 1.0, budget="10%"), row("vdnn", None, budget="10%", problem="does not fit")]
    ours = tally(standings(rows), "tsplit", "vdnn")
    assert (ours.kept, ours.cells, ours.low, ours.high) == (1, 2, 0.5, 3.0)
    assert str(ours) == "tsplit is as fast as vdnn or faster in 1 of 2 cells (0.50 to 3.00 times)"
    assert tally(standings(rows), "tsplit", "pofo") is None


def test_the_page_has_all_figures_of_a_cell_and_the_published_orders():
    rows = [row("tsplit", 1.25), row("vdnn", 2.5)]
    orders = [PublishedOrder(faster=fast, slower="vdnn", says="up to 4.7 times") for fast in ("tsplit", "capuchin")]
    page = render_comparison(standings(rows), [], {}, orders)
    for figure, shown in (("overhead", "+25.0%"), ("seconds", "1.25 s"), ("peak", "900 B"), ("solved", "500 ms")):
        assert f'<span data-shown="{figure}">{shown}</span>' in page
        assert f'data-figure="{figure}"' in page and f'[data-shown="{figure}"]' in page
    assert "2.00 to 2.00 times as fast" in page and "1 of 1 cells" in page
    assert "capuchin" not in page  # it has no plan here


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


def test_many_planners_are_a_matrix_that_a_terminal_can_show():
    from typer.testing import CliRunner

    many = "auto,pofo,rotor,chen,vdnn,yuan,memo,korthikanti,te_offload"
    words = ["compare", "tiny-vgg", "--gpu", "v100-16gb", "--planners", many, "--budgets", "100%,90%,1MB,500KiB"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    head = next(line for line in done.output.splitlines() if line.startswith("planner "))
    assert head.split() == ["planner", "100%", "90%", "1MB", "500KiB"]
    table = [line for line in done.output.splitlines() if line.startswith(("auto ", "pofo ", "rotor "))]
    assert len(table) >= 3 and all(len(line) <= 80 for line in table)
    assert any("needs " in line for line in table) and any(" *" in line or " ~" in line for line in table)
    assert "published orders of two planners: " in done.output
