"""A report says the same numbers in every form, survives odd names, and is written whole or not at all."""

import dataclasses
import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import PurePosixPath
from typing import ClassVar

import pytest

from holdall.errors import InvalidInput
from holdall.reporting import BlockRow, Report, chrome_trace, render_html
from holdall.reporting.html import LIMIT, thin_moments, thin_spans
from holdall.reporting.text import bars, blocks_text, plan_text, report_text
from holdall.types import Action, Facts, Holder, Kind, Moment, Outcome, Plan, Span
from holdall.units import GiB, MiB

EVIL = "</script><script>alert('x')</script>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forget(Facts):
    name: ClassVar[str] = "forget"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 10

    block: str

    @staticmethod
    def samples(trace):
        return []

    def rewrite(self, schedule, problem):
        return schedule

    def install(self, harness):
        pass


def gib(number: float) -> int:
    return int(number * GiB)


def hill(n: int, top: int, seconds: float = 1.0, kinds: bool = True) -> tuple[Moment, ...]:
    """Memory that rises in forward and falls in backward."""
    moments = []
    for i in range(n):
        held = round(top * (1 - abs(2 * i / (n - 1) - 1)))
        where = f"{'forward' if i < n / 2 else 'backward'} of `layers.{i}` (mm #{i})"
        split = {Kind.PARAM: GiB, Kind.ACTIVATION: held} if kinds else {}
        moments.append(Moment(at=seconds * i / n, where=where, total=GiB + held, kinds=split))
    return tuple(moments)


LANES = (
    Span(lane="copy out", name="saved of layers.0", start=0.1, end=0.3),
    Span(lane="compute", name="mm", start=0.0, end=0.5),
    Span(lane="compute", name="mm_backward", start=0.6, end=0.9),
    Span(lane="waiting", name="fetch of layers.0", start=0.5, end=0.6),
)
PREDICTED = Outcome(
    source="simulated",
    seconds=0.96,
    peak={"gpu": gib(23.6), "cpu": gib(41)},
    recompute_seconds=0.081,
    peak_where="backward of `layers.3` (mm #3)",
    peak_kinds={Kind.PARAM: gib(6), Kind.ACTIVATION: gib(14), Kind.GRAD: gib(3), Kind.STATE: 0, Kind.TEMP: gib(0.6)},
    at_peak=(Holder(name="logits", kind=Kind.ACTIVATION, nbytes=gib(2)), Holder(name="w", kind=Kind.PARAM, nbytes=MiB)),
    traffic={"gpu->cpu": gib(3)},
    timeline=hill(41, gib(22)),
    lanes=LANES,
)
MEASURED = Outcome(
    source="measured",
    seconds=0.99,
    peak={"gpu": gib(23.7), "cpu": gib(41.3)},
    recompute_seconds=0.084,
    stall_seconds=0.012,
    reserved=gib(24.1),
    timeline=hill(50, gib(22.1), kinds=False),
)
BLOCKS = (
    BlockRow(module="embed", decision="keep", nbytes_held=MiB, nbytes_plain=MiB, seconds=0.001),
    *(
        BlockRow(
            module=f"layers.{i}", decision="forget" if i < 9 else "keep + forget", nbytes_held=gib(0.5), nbytes_plain=GiB,
            seconds=0.02, extra_seconds=0.005,
        )
        for i in range(11)
    ),
)  # fmt: skip


def make_plan(**changes) -> Plan:
    fields = {
        "planner": "auto",
        "options": {},
        "actions": (Forget(block="layers.0"), Forget(block="layers.1")),
        "predicted": PREDICTED,
        "trace": "0123abcd",
        "signature": "s",
        "budget": {"gpu": gib(24), "cpu": gib(64)},
        "hardware": "rtx-4090",
        "solve_seconds": 1.5,
        "why": ("two blocks forget: the rest fits [bold]without[/bold] help",),
    }
    return Plan(**{**fields, **changes})


def make_report(**changes) -> Report:
    fields = {
        "plan": make_plan(),
        "predicted": PREDICTED,
        "measured": MEASURED,
        "steps": 5,
        "blocks": BLOCKS,
        "notes": ("the first step was left out",),
        "parity": "identical to the unplanned model (5 steps, seed 0)",
        "environment": {"model": "toy", "torch": "2.11.0"},
    }
    return Report(**{**fields, **changes})


def bare() -> Report:
    """Nothing but the figures that every outcome has."""
    predicted = Outcome(source="simulated", seconds=0.5, peak={"gpu": GiB})
    return Report(plan=make_plan(predicted=predicted, budget={}, why=()), predicted=predicted, measured=None, steps=0)


def test_the_action_of_these_tests_is_one():
    assert isinstance(Forget(block="x"), Action)


# --- text


def test_the_text_is_the_comparison_and_nothing_else():
    assert str(make_report()) == "\n".join(
        [
            "              predicted   measured   error",
            "peak GPU       23.6 GiB   23.7 GiB   -0.4%",
            "peak host      41.0 GiB   41.3 GiB   -0.7%",
            "step             960 ms     990 ms   -3.0%",
            "recomputed        81 ms      84 ms",
            "waiting              --      12 ms",
            "reserved             --   24.1 GiB",
            "loss, grads          --   identical to the unplanned model (5 steps, seed 0)",
            "note: the first step was left out",
            "measured over 5 steps",
        ]
    )


def test_a_plan_that_never_ran_has_an_empty_column():
    assert str(bare()) == "\n".join(
        [
            "             predicted   measured   error",
            "peak GPU       1.0 GiB         --",
            "step            500 ms         --",
            "recomputed          --         --",
            "waiting             --         --",
            "not measured yet",
        ]
    )


def test_where_the_cpu_computes_it_is_not_called_the_host():
    outcome = Outcome(source="simulated", seconds=1, peak={"cpu": GiB, "far": GiB})
    labels = [row.label for row in make_report(predicted=outcome, measured=None).rows()]
    assert labels[:2] == ["peak CPU", "peak far"]


def test_the_plan_summary_gives_figures_reasons_and_bars():
    assert plan_text(make_plan()) == "\n".join(
        [
            "planner    auto (decided in 1.50 s)",
            "hardware   rtx-4090",
            "budget     24.0 GiB GPU, 64.0 GiB host",
            "actions    2 x forget",
            "expected   23.6 GiB GPU, 41.0 GiB host, 960 ms/step",
            "- two blocks forget: the rest fits [bold]without[/bold] help",
            "",
            "at the peak (backward of `layers.3` (mm #3)):",
            "activations    14.0 GiB   59%   ████████████████████████████████",
            "parameters      6.0 GiB   25%   ██████████████",
            "gradients       3.0 GiB   13%   ███████",
            "temporary     614.4 MiB    3%   █",
        ]
    )


def test_blocks_that_share_a_decision_share_a_line():
    assert blocks_text(BLOCKS) == "\n".join(
        [
            "block                   decision           held      plain     time    added",
            "embed                   keep            1.0 MiB    1.0 MiB     1 ms",
            "layers.0 .. 8    x 9    forget          4.5 GiB    9.0 GiB   180 ms   +45 ms",
            "layers.9 .. 10   x 2    keep + forget   1.0 GiB    2.0 GiB    40 ms   +10 ms",
            "total            x 12                   5.5 GiB   11.0 GiB   221 ms   +55 ms",
        ]
    )


def test_empty_tables_do_not_fail():
    assert bars({}) == "" and "total" in blocks_text(())


def test_colour_comes_only_when_asked_for(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in str(make_report())
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in report_text(make_report(), color=True)


def test_a_name_cannot_move_the_cursor():
    assert "\x1b" not in blocks_text([dataclasses.replace(BLOCKS[0], module="a\x1b[2J\nb")])


# --- the verdict


@pytest.mark.parametrize(
    ("budget", "measured", "fits", "verdict"),
    [
        ({"gpu": gib(24)}, MEASURED, True, "fits: 23.7 GiB of 24.0 GiB GPU"),
        ({"gpu": gib(24)}, None, None, "nothing was measured; should fit: 23.6 GiB of 24.0 GiB GPU"),
        ({"gpu": gib(80), "cpu": gib(40)}, MEASURED, False, "1.3 GiB over the host budget"),
        ({"gpu": gib(20)}, None, None, "nothing was measured; predicted 3.6 GiB over the GPU budget"),
        ({}, MEASURED, None, "no budget was set"),
    ],
)
def test_the_verdict_names_the_tightest_tier(budget, measured, fits, verdict):
    report = make_report(plan=make_plan(budget=budget), measured=measured)
    assert (report.fits, report.verdict) == (fits, verdict)


# --- JSON


def test_json_survives_the_way_to_disk_and_back(tmp_path):
    report = make_report(environment={"model": "toy", "where": PurePosixPath("data")})
    report.save(tmp_path / "run.json")
    read = json.loads((tmp_path / "run.json").read_text())
    assert read == report.to_json()
    assert read["format"] == "holdall-report-1"
    assert read["measured"]["peak"] == {"gpu": gib(23.7), "cpu": gib(41.3)}
    assert read["plan"]["actions"][0] == {"action": "forget", "block": "layers.0"}
    assert read["environment"]["where"] == "data"
    assert json.loads(json.dumps(bare().to_json()))["measured"] is None


# --- the page


class Page(HTMLParser):
    """Refuses tags that are not closed in order; keeps the text and what each element was."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data

    def classes(self) -> set[str]:
        return {c for _, attrs in self.seen for c in (attrs.get("class") or "").split()}


def test_the_page_shows_every_part_of_a_full_report():
    page = Page(render_html(make_report()))
    for part in (
        "toy", "fits: 23.7 GiB of 24.0 GiB GPU", "-0.4%", "identical to the unplanned model", "the first step was left out",
        "Memory over the step", "peak 23.0 GiB", "budget 24.0 GiB", "measured total", "copy out", "What sits at the peak",
        "logits", "Block by block", "keep + forget", "two blocks forget", "2.11.0", "backward of layers.3 (mm #3)",
    ):  # fmt: skip
        assert part in page.text, part
    assert {"k-param", "k-activation", "l-compute", "l-waiting", "measured", "budget", "dot"} <= page.classes()


@pytest.mark.parametrize("report", [make_report(), make_report(measured=None), bare()])
def test_the_page_needs_nothing_from_elsewhere(report):
    html = render_html(report)
    assert not re.findall(r"https?://(?!www\.w3\.org)|url\(|@import", html)
    assert not [tag for tag, attrs in Page(html).seen if "src" in attrs or "href" in attrs or tag in ("link", "iframe", "img")]


def test_the_page_without_a_timeline_says_so():
    page = Page(render_html(bare()))
    assert "No timeline was recorded" in page.text and "no budget was set" in page.text
    assert "Block by block" not in page.text


def test_a_measured_timeline_alone_is_drawn():
    page = Page(render_html(make_report(predicted=dataclasses.replace(PREDICTED, timeline=(), lanes=()))))
    assert "Memory over the step, measured" in page.text and "not told apart" in page.text
    assert "k-rest" in page.classes()


@pytest.mark.parametrize("lanes", [(), LANES])
def test_a_timeline_of_one_empty_moment_is_drawn(lanes):
    outcome = Outcome(source="simulated", seconds=0.0, peak={}, timeline=(Moment(at=0.0, where="", total=0),), lanes=lanes)
    assert "Memory over the step" in Page(render_html(make_report(predicted=outcome, measured=None))).text


def test_names_are_text_wherever_they_appear():
    moment = Moment(at=0.1, where=EVIL, total=GiB, kinds={Kind.PARAM: GiB})
    outcome = Outcome(
        source="simulated", seconds=1.0, peak={EVIL: GiB}, peak_where=EVIL, peak_kinds={Kind.PARAM: GiB}, traffic={EVIL: 1},
        at_peak=(Holder(name=EVIL, kind=Kind.PARAM, nbytes=GiB),), timeline=(moment,),
        lanes=(Span(lane=EVIL, name=EVIL, start=0.0, end=1.0),),
    )  # fmt: skip
    plan = make_plan(planner=EVIL, hardware=EVIL, trace=EVIL, why=(EVIL,), budget={EVIL: GiB}, predicted=outcome)
    row = BlockRow(module=EVIL, decision=f'"{EVIL}', nbytes_held=1, nbytes_plain=1, seconds=1.0)
    report = Report(
        plan=plan, predicted=outcome, measured=outcome, steps=1, blocks=(row,), notes=(EVIL,), parity=EVIL,
        environment={"model": EVIL, EVIL: {EVIL: [EVIL]}},
    )  # fmt: skip
    html = render_html(report)
    page = Page(html)
    assert "<script>alert" not in html
    assert [attrs.get("id") for tag, attrs in page.seen if tag == "script"] == ["data", None]
    assert not [name for _, attrs in page.seen for name in attrs if name.startswith("on") or "<" in name]
    assert json.loads(page.scripts[0])["where"] == [EVIL]
    assert page.text.count(EVIL) > 10


def test_long_timelines_are_thinned_and_keep_their_peak():
    spike = Moment(at=0.5, where="the peak", total=gib(50))
    moments = (*hill(20_000, GiB), spike)
    thin = thin_moments(moments)
    assert len(thin) <= LIMIT and spike in thin
    assert [m.at for m in thin] == sorted(m.at for m in thin)
    assert thin_moments(moments[:100]) == list(moments[:100])


def test_long_lanes_are_joined_and_still_cover_the_step():
    spans = [Span(lane="compute", name=f"op {i}", start=i, end=i + 1) for i in range(4001)]
    thin = thin_spans(spans)
    assert len(thin) <= LIMIT and (thin[0].start, thin[-1].end) == (0, 4001)
    assert thin[0].name == "op 0 and 2 more"


def test_the_page_of_a_long_step_stays_light():
    lanes = tuple(Span(lane="compute", name="mm", start=i / 1e4, end=(i + 1) / 1e4) for i in range(10_000))
    outcome = dataclasses.replace(PREDICTED, timeline=hill(20_000, gib(3)), lanes=lanes)
    page = Page(render_html(make_report(predicted=outcome)))
    data = json.loads(page.scripts[0])
    assert len(data["at"]) <= LIMIT and len(data["lanes"][0]["spans"]) <= LIMIT


def test_copies_that_fly_together_are_counted_once():
    together = tuple(Span(lane="copy in", name=str(i), start=0.1, end=0.4 + i / 10) for i in range(3))
    assert "copy in500 ms" in Page(render_html(make_report(predicted=dataclasses.replace(PREDICTED, lanes=together)))).text


# --- the Chrome trace


def test_chrome_events_have_what_viewers_require():
    trace = json.loads(json.dumps(chrome_trace(PREDICTED, "predicted")))
    events = trace["traceEvents"]
    assert all({"ph", "name", "ts", "pid", "tid"} <= e.keys() and e["ts"] >= 0 for e in events)
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert [(threads[e["tid"]], e["name"], e["ts"], e["dur"]) for e in slices if e["cat"] != "compute"] == [
        ("copy out", "saved of layers.0", 1e5, 2e5),
        ("waiting", "fetch of layers.0", 5e5, 1e5),
    ]
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "memory by kind"]
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters) and len(counters) == 41
    assert counters[0]["args"] == {"param": GiB, "activation": 0}


def test_slices_of_one_track_never_overlap():
    spans = [Span(lane="copy in", name=str(i), start=i * 0.1, end=i * 0.1 + 0.15) for i in range(6)]
    events = chrome_trace(Outcome(source="measured", seconds=1.0, peak={}, lanes=tuple(spans)), "x")["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    for tid in {e["tid"] for e in slices}:
        track = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == tid)
        assert all(a + took <= b for (a, took), (b, _) in pairwise(track))
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"copy in", "copy in (2)"}


# --- files


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("run.html", "<!doctype html>"),
        ("RUN.HTML", "<!doctype html>"),
        ("run.json", '{"format":"holdall-report-1"'),
        ("run.trace.json", '{"traceEvents":'),
        ("run.txt", "              predicted"),
        ("run", "              predicted"),
    ],
)
def test_the_ending_chooses_the_form(tmp_path, name, start):
    make_report().save(tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert os.listdir(tmp_path) == [name]


def test_a_saved_trace_holds_prediction_and_measurement(tmp_path):
    make_report().save(tmp_path / "run.trace.json")
    events = json.loads((tmp_path / "run.trace.json").read_text())["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {1: "predicted", 2: "measured"}


@pytest.mark.parametrize("name", ["run.html", "run.json", "run.trace.json", "run.txt"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("before")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InvalidInput, match="No space left"):
        make_report().save(tmp_path / name)
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "before"
