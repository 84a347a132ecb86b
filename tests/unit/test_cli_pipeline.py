"""`holdall pipeline`: one schedule, all of them, the picture, refusals."""

import json
import re

from typer.testing import CliRunner

from holdall.cli import app


def says(*words):
    return CliRunner().invoke(app, ["pipeline", *map(str, words)], env={"COLUMNS": "80"})


def test_one_schedule_rank_by_rank():
    result = says("1f1b", "--stages", 4, "--micro-batches", 8, "--activations", "1GiB", "--weights", "512MiB")
    assert result.exit_code == 0
    assert "bubble 27.3 %, makespan 33" in result.stdout
    assert re.search(r"^0 +0 +24 +9 +4 +1 +4\.5 GiB$", result.stdout, re.M)
    assert re.search(r"^3 +3 +24 +9 +1 +1 +1\.5 GiB$", result.stdout, re.M)


def test_the_work_of_a_rank_is_the_same_for_all_schedules():
    found = json.loads(says("--json").stdout)["schedules"]
    assert {row["makespan"] - row["held"][0]["idle"] for row in found} == {24}
    assert all(row["source"] == "simulated" for row in found)
    times = [row["makespan"] for row in found]
    assert times == sorted(times)


def test_all_schedules_fit_80_columns_and_what_is_not_defined_is_named():
    result = says("--stages", 3, "--micro-batches", 6)
    assert result.exit_code == 0
    table = result.stdout.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 80 and len(table) >= 14
    assert "the schedule `chimera` needs an even number of ranks, not 3" in result.stdout


def test_the_picture_has_a_box_for_every_task(tmp_path):
    for name, boxes in (("zb_h1", 4 * 8 * 3), ("pipedream", 4 * 8 * 2), ("chimera", 4 * 8 * 2)):
        page = tmp_path / f"{name}.html"
        result = says(name, "--html", page)
        assert result.exit_code == 0 and f"written to {page}" in result.stdout.replace("\n", "")
        text = page.read_text()
        assert len(re.findall(r'<rect class="t-', text)) == boxes
        assert "simulated, not measured" in text
        assert "<script src" not in text and "https:" not in text


def test_wrong_words_are_refused_with_a_hint():
    for words, said in (
        (("1f1c",), "unknown schedule `1f1c`"),
        (("chimera", "--stages", 3), "needs an even number of ranks"),
        (("1f1b", "--forward", 0), "positive times"),
        (("--html", "x.html"), "--html draws one schedule"),
        (("1f1b", "--micro-batches", 0), "`micro_batches` is 0"),
    ):
        result = says(*words)
        assert result.exit_code != 0
        assert said in result.output and "hint:" in result.output
