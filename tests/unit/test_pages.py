"""The HTML pages in a real browser: no errors, nothing wider than the screen, the cursor and every point answer.

One start of Chromium for all: a page of ours holds each page twice, wide and narrow, in frames that it can reach into.
"""

import dataclasses
import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest
import torch

import holdall
from holdall.analysis.pareto import Curve, Point
from holdall.analysis.pareto_page import pareto_page
from holdall.reporting import BlockRow, Report, render_html
from holdall.reporting._page import marked, shortened
from holdall.testing.worlds import family
from holdall.types import Outcome
from holdall.units import MiB

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
    "--dump-dom",
]
WIDTHS = (1200, 390)
EVIL = "</script><script>throw Error('a name was run')</script>"

# Does a frame scroll sideways, does its chart show the tip under pointer and keys and hide it again, do points speak?
CHECK = """
<script>
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement, wrong = [];
    const say = (fine, what) => { if (!fine) wrong.push(what); };
    const inside = (box, what) => say(box.left >= 0 && box.right <= frame.clientWidth + 1, what + " off the screen");
    say(root.scrollWidth <= root.clientWidth, "scrolls sideways: " + root.scrollWidth);
    say(page.querySelector("h1").textContent.trim(), "no title");
    const chart = page.getElementById("chart"), tip = page.querySelector(".tip"), points = page.querySelectorAll(".point");
    if (chart) {
      const box = chart.querySelector(".field").getBoundingClientRect();
      for (const share of [0.01, 0.3, 0.6, 0.99]) {
        const at = { clientX: box.left + box.width * share, clientY: box.top + 40, bubbles: true };
        chart.dispatchEvent(new view.PointerEvent("pointermove", at));
        say(!tip.hidden && /total/.test(tip.textContent), "no tip at " + share);
        inside(tip.getBoundingClientRect(), "tip at " + share);
      }
      chart.dispatchEvent(new view.PointerEvent("pointerleave"));
      say(tip.hidden, "the tip stays when the pointer leaves");
      const press = key => chart.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true }));
      press("ArrowRight");
      const first = tip.textContent;
      press("ArrowRight");
      say(!tip.hidden && tip.textContent != first, "the keys do not move the cursor");
      press("Escape");
      say(tip.hidden, "Escape does not hide the tip");
    }
    for (const point of points) {
      point.focus();
      const label = point.querySelector("b");
      say(view.getComputedStyle(label).display == "block" && label.textContent, "a point says nothing");
      inside(label.getBoundingClientRect(), "label of a point");
    }
    found[frame.id] = { wrong, chart: !!chart, points: points.length };
  }
  document.body.innerHTML = "";
  document.body.append(Object.assign(document.createElement("pre"), { id: "found", textContent: JSON.stringify(found) }));
});
</script>
"""


@pytest.fixture(scope="module")
def report():
    """What three steps of a small model have measured."""
    model, batch = family("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdall.fit(model, optimizer, batch, budget="660KiB", planner="chen") as harness:
        for _ in range(3):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return harness.report()


def awkward(report: Report) -> Report:
    """The same with names that nobody would give, over its budget, and far from what was said."""
    measured = dataclasses.replace(report.latest, peak={t: 9 * n for t, n in report.latest.peak.items()}, seconds=9.0)
    blocks = tuple(
        BlockRow(module="model." * 30 + str(i), decision="keep", nbytes_held=MiB, nbytes_plain=MiB, seconds=0.1)
        for i in range(40)
    )
    names = {"model": "organisation/name-" * 12 + EVIL, "path": "x" * 300}
    return dataclasses.replace(report, measured=measured, blocks=blocks, environment=names, notes=(EVIL, "long " * 100))


def curve(report: Report) -> Curve:
    def point(budget: int, seconds: float, best: bool) -> Point:
        predicted = dataclasses.replace(report.predicted, seconds=seconds)
        return Point(budget=budget * MiB, plan=dataclasses.replace(report.plan, predicted=predicted), is_best=best)

    return Curve(points=(point(2, 0.31, True), point(3, 0.2, True), point(4, 0.21, False), point(5, 0.1, True)), refused=(MiB,))


@pytest.fixture(scope="module")
def pages(report):
    bare = Outcome(source="simulated", seconds=0.1, peak={"cpu": MiB})
    return {
        "report": render_html(report),
        "planned": render_html(Report(plan=report.plan, predicted=report.plan.predicted, measured=None, steps=0)),
        "awkward": render_html(awkward(report)),
        "bare": render_html(Report(plan=report.plan, predicted=bare, measured=None, steps=0)),
        "pareto": pareto_page(curve(report), title="tied " + EVIL, facts={"planner": "auto", "rates": "of a datasheet " * 8}),
    }


@pytest.fixture(scope="module")
def browsed(pages, tmp_path_factory):
    """(what each frame found, what the browser said about errors)"""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    folder = tmp_path_factory.mktemp("browser")
    frames = "".join(
        f'<iframe id="{name}-{width}" width="{width}" height="900" srcdoc="{escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in WIDTHS
    )
    (folder / "all.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{CHECK}", encoding="utf-8")
    words = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", (folder / "all.html").as_uri()]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
    told = re.search(r'<pre id="found">(.*?)</pre>', run.stdout, re.S)
    if told is None:
        pytest.skip(f"this Chromium does not run here: {run.stderr[-300:]}")
    return json.loads(unescape(told[1])), [line for line in run.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "planned", "awkward", "bare", "pareto"])
def test_a_page_is_in_order(browsed, name, width):
    found = browsed[0][f"{name}-{width}"]
    assert found["wrong"] == []
    assert found["chart"] == (name in ("report", "planned", "awkward"))
    assert found["points"] == (4 if name == "pareto" else 0)


def test_the_browser_has_nothing_to_complain_about(browsed):
    assert browsed[1] == []


def test_a_step_far_longer_than_predicted_is_drawn_over_its_length_and_says_so(report):
    quick = dataclasses.replace(report.predicted, seconds=1e-3, timeline=report.predicted.timeline, lanes=())
    page = render_html(dataclasses.replace(report, predicted=quick))
    assert "drawn over the length of the predicted step" in page
    assert "drawn over" not in render_html(dataclasses.replace(report, predicted=report.measured))


def test_names_are_shortened_in_the_middle_and_code_is_marked_after_escaping():
    assert shortened("model." * 20 + "layers.7", 30).endswith("layers.7") and len(shortened("x" * 99, 30)) == 30
    assert shortened("short") == "short"
    assert marked("of `a<b`, <i>") == "of <code>a&lt;b</code>, &lt;i&gt;"
