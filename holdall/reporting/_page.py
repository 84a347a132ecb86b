"""The common parts of every report: template, style, script, and small helpers for markup.

The script only adds the cursor and its tooltip, and inserts names as text, never as markup.
"""

from __future__ import annotations

import re
from html import escape

from holdall.types import Kind, Outcome


def legend_item(style: str, label: str) -> str:
    """A legend entry. `label` is markup: the caller escapes names from a model."""
    return f'<li><span class="swatch {style}"></span>{label}</li>'


def voice(outcome: Outcome) -> str:
    """ "measured" or "predicted", for a figure of this outcome."""
    return "measured" if outcome.source == "measured" else "predicted"


def marked(text: str) -> str:
    """Text as markup: backticks become code, everything is escaped."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def shortened(name: str, limit: int = 46) -> str:
    """A long name without its middle, since adjacent names differ at their ends."""
    return name if len(name) <= limit else f"{name[: limit // 3]}…{name[-(limit - limit // 3 - 1) :]}"


def percent(share: float) -> str:
    """A share as a CSS percentage, clamped to 0 to 100 %."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}: holdall report</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>{script}</script>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #fff; --ink: #20252b; --soft: #5d6670; --line: #e4e4df; --good: #1d7a4c; --bad: #b3372f;
  --accent: #3d6ea5;
  --param: #3f6fa6; --buffer: #b59d7c; --state: #a78cc9; --grad: #4fa394; --input: #8f979f; --activation: #eaa945;
  --temp: #d2655f;
  --rest: #9aa3ad; --keep: #b4bac1; --recompute: #3f8fb0; --offload: #8d6cb8; --other: #b08a3c; --compute: #66778a;
  --fetch: #c07fae; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --card: #1c2024; --ink: #e7e8e6; --soft: #a1a9b1; --line: #30363c; --good: #6cc79a; --bad: #ef8a80;
  --accent: #7fb0e3;
  --param: #5a8cc6; --buffer: #a08a6b; --state: #ab92cf; --grad: #55ab9b; --input: #7d858d; --activation: #dc9f41;
  --temp: #d4706a;
  --rest: #7d868f; --keep: #69717a; --recompute: #4f9fc0; --offload: #a384cf; --other: #c29b4d; --compute: #8494a5;
  --fetch: #d08fbd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
h1, h2, h3, p, ul, ol, dl, dd { margin: 0; padding: 0; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin-bottom: 4px; }
h2 .soft { font-weight: 400; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 20px 22px;
  margin-top: 18px; }
header { margin-bottom: 24px; }
.soft { color: var(--soft); font-size: 14px; overflow-wrap: anywhere; }
.brand { color: var(--soft); font-size: 13px; letter-spacing: .04em; margin-bottom: 4px; }
.verdict { display: inline-block; margin: 12px 0 16px; padding: 4px 14px; border-radius: 99px; font-weight: 600; }
.good { color: var(--good); background: color-mix(in srgb, var(--good) 13%, transparent); }
.bad { color: var(--bad); background: color-mix(in srgb, var(--bad) 13%, transparent); }
.plain { color: var(--soft); background: color-mix(in srgb, var(--soft) 13%, transparent); }
.facts { display: flex; flex-wrap: wrap; gap: 8px 36px; }
dt { color: var(--soft); font-size: 13px; }
dd { overflow-wrap: anywhere; }
.parity { margin-top: 12px; }
.parity b { font-weight: 400; color: var(--soft); font-size: 13px; margin-right: 6px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; padding: 0; border: 0; background: none; }
.card { flex: 1 1 max(150px, calc(100% / var(--columns) - 12px)); background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 14px 16px; }
.card h3 { display: flex; justify-content: space-between; font-size: 13px; font-weight: 400; color: var(--soft);
  min-height: 22px; }
.card p { display: flex; justify-content: space-between; color: var(--soft); font-size: 13px;
  font-variant-numeric: tabular-nums; }
.card b { font-weight: 400; color: var(--ink); }
.card .big { color: var(--ink); font-size: 24px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.chip { font-size: 12px; line-height: 20px; padding: 0 8px; border-radius: 99px; font-variant-numeric: tabular-nums; }
.meter { position: relative; height: 5px; margin: 6px 0 7px; border-radius: 3px; background: var(--line); }
.meter i { position: absolute; inset: 0 auto 0 0; border-radius: 3px; background: var(--accent); }
.meter.over i { background: var(--bad); }
.meter .mark { inset: -3px auto -3px auto; width: 2px; margin-left: -1px; background: var(--ink); }
.notes { border-left: 4px solid var(--activation); }
.notes ul { list-style: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0 12px; font-size: 13px;
  color: var(--soft); }
.legend b { color: var(--ink); font-weight: 600; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; background: var(--c); }
.swatch.line { height: 0; width: 16px; border-top: 2px solid var(--ink); border-radius: 0; vertical-align: 4px;
  background: none; }
.chart { position: relative; outline-offset: 6px; border-radius: 4px; touch-action: pan-y; --gutter: 86px; }
.row { display: flex; }
.gutter { flex: 0 0 var(--gutter); position: relative; padding-right: 10px; text-align: right; font-size: 12px;
  color: var(--soft); }
.field, .flags, .times { flex: 1; min-width: 0; position: relative; }
.field svg { position: absolute; inset: 0; width: 100%; height: 100%; display: block; }
.memory { height: 320px; border-bottom: 1px solid var(--soft); cursor: crosshair; }
.unit { align-self: flex-end; }
.ticks span { position: absolute; right: 10px; transform: translateY(50%); font-variant-numeric: tabular-nums; }
.rule { position: absolute; left: 0; right: 0; border-top: 1px solid var(--line); }
.area { fill: var(--c); stroke: var(--card); stroke-width: .6; vector-effect: non-scaling-stroke; }
.measured { fill: none; stroke: var(--ink); stroke-width: 1.6; vector-effect: non-scaling-stroke; }
.flag { padding: 0 8px 5px; font-size: 13px; color: var(--soft); overflow-wrap: anywhere; }
.flag b { color: var(--ink); }
.flag.left { border-left: 1px solid var(--ink); }
.flag.right { border-right: 1px solid var(--ink); text-align: right; }
.stem { position: absolute; top: 0; border-left: 1px solid var(--ink); }
.stem.right { margin-left: -1px; }
.dot { position: absolute; width: 9px; height: 9px; margin: 0 0 -4.5px -4.5px; border-radius: 50%; background: var(--ink);
  border: 2px solid var(--card); }
.budget { z-index: 1; position: absolute; left: 0; right: 0; border-top: 1.5px dashed var(--bad); }
.budget.far { border: 0; top: 22px; }
.budget span { position: absolute; right: 6px; bottom: 2px; font-size: 12px; color: var(--bad); background: var(--card);
  padding: 0 5px;
  border-radius: 4px; white-space: nowrap; }
.budget.off-right span { right: auto; left: 6px; }
.phases .field { height: 22px; margin-bottom: 10px; }
.phases span { position: absolute; padding-left: 5px; font-size: 12px; line-height: 22px; color: var(--soft);
  overflow: hidden;
  border-left: 1px solid var(--soft); white-space: nowrap; text-overflow: ellipsis; }
.phases span:last-child { overflow: visible; }
.phases span.end { transform: translateX(-100%); padding: 0 5px 0 0; border-left: 0; border-right: 1px solid var(--soft); }
.lane { margin-top: 6px; align-items: center; cursor: crosshair; }
.lane .gutter { line-height: 1.15; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: var(--ink); }
.lane .gutter small { display: block; color: var(--soft); font-size: 11px; }
.lane .field { height: 24px; border-radius: 4px; overflow: hidden;
  background: color-mix(in srgb, var(--soft) 9%, transparent); }
.shade0 { fill: var(--c); } .shade1 { fill: var(--c); opacity: .82; }
.l-compute { --c: var(--compute); } .l-recompute { --c: var(--recompute); }
.l-copy-out { --c: var(--offload); } .l-copy-in { --c: var(--fetch); }
.l-waiting { --c: var(--bad); } .l-other { --c: var(--other); }
.axis { margin-top: 4px; }
.times { height: 20px; }
.times span { position: absolute; transform: translateX(-50%); font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.times span:first-child { transform: none; }
.cursor { position: absolute; top: 0; bottom: 22px; border-left: 1px solid var(--ink); opacity: .55; pointer-events: none; }
.tip { position: fixed; z-index: 2; width: max-content; max-width: min(360px, 92vw); padding: 10px 13px;
  pointer-events: none;
  font-size: 13px; background: var(--card); border: 1px solid var(--line); border-radius: 9px;
  box-shadow: 0 6px 24px rgb(0 0 0 / .18); }
.tip p { display: flex; justify-content: space-between; gap: 18px; font-variant-numeric: tabular-nums; }
.tip p > span:first-child { flex: none; max-width: 190px; color: var(--soft); white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.tip p span:last-child { text-align: right; overflow-wrap: anywhere; }
.tip .where { display: block; font-weight: 600; margin-bottom: 4px; overflow-wrap: anywhere; }
.tip hr { border: 0; border-top: 1px solid var(--line); margin: 6px 0; }
.stack { display: flex; height: 16px; margin-top: 14px; border-radius: 5px; overflow: hidden; gap: 1px; }
.stack i { background: var(--c); }
.table { overflow: auto; margin-top: 8px; }
.tall { max-height: 520px; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { position: sticky; top: 0; z-index: 1; background: var(--card); text-align: left; font-weight: 400; font-size: 13px;
  color: var(--soft); }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.name { max-width: 360px; overflow: hidden; text-overflow: ellipsis; }
.num { text-align: right; font-variant-numeric: tabular-nums; }
td.soft { font-size: inherit; }
td.share { position: relative; width: 20%; min-width: 110px; }
td.share + td { padding-left: 14px; }
.share i { position: absolute; left: 0; top: 50%; height: 8px; margin-top: -4px; border-radius: 3px; background: var(--c); }
.share .ghost { width: 100%; background: var(--line); opacity: .6; }
.strip { display: flex; gap: 2px; margin-top: 14px; }
.strip i { flex: 1; height: 22px; border-radius: 3px; background: var(--c); min-width: 1px; }
.pill { font-size: 13px; padding: 1px 10px; border-radius: 99px; color: color-mix(in srgb, var(--c) 62%, var(--ink));
  background: color-mix(in srgb, var(--c) 17%, transparent); }
.d-keep { --c: var(--keep); } .d-recompute { --c: var(--recompute); } .d-offload { --c: var(--offload); }
.d-recompute-offload { --c: var(--accent); } .d-other { --c: var(--other); }
.why { padding-left: 20px; max-width: 78ch; }
.why li { margin-top: 5px; }
.environment { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px 24px;
  margin-top: 8px; }
.environment .two { grid-column: span 2; } .environment .all { grid-column: 1 / -1; }
@media (max-width: 620px) {
  main { padding: 22px 12px 40px; } section { padding: 16px 14px; } h1 { font-size: 24px; }
  .chart { --gutter: 80px; } .gutter { padding-right: 8px; } .memory { height: 240px; }
  .phases span { font-size: 11px; }
  .times span:nth-child(even) { display: none; } .name { max-width: 190px; } }
@media print { .tall { max-height: none; } body { background: none; } }
"""
STYLE += "".join(f".k-{kind.value} {{ --c: var(--{kind.value}); }}\n" for kind in Kind) + ".k-rest { --c: var(--rest); }\n"

SCRIPT = """
(() => {
  const chart = document.getElementById("chart");
  if (!chart) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const field = chart.querySelector(".field"), cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  const size = n => n >= 2 ** 30 ? (n / 2 ** 30).toFixed(2) + " GiB"
    : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : n >= 1024 ? (n / 1024).toFixed(1) + " KiB" : n + " B";
  const time = s => s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " us";
  const before = (xs, t, key) => {  // index of the last that has begun by t
    let low = 0, high = xs.length;
    while (low < high) { const mid = (low + high) >> 1; if (key(xs[mid]) <= t) low = mid + 1; else high = mid; }
    return low - 1;
  };
  const element = (tag, text, style) => {
    const made = document.createElement(tag);
    if (text) made.textContent = text;  // as text: a name may hold anything
    if (style) made.className = style;
    return made;
  };
  const line = (label, value, swatch) => {
    const row = element("p"), left = element("span");
    if (swatch) left.append(element("span", "", "swatch " + swatch));
    left.append(label);
    row.append(left, element("span", value));
    tip.append(row);
  };
  function fill(t) {
    tip.replaceChildren();
    const i = t > data.until ? -1 : before(data.at, t, x => x);  // the longer of the two outcomes goes on alone
    if (i >= 0 && data.where[i]) tip.append(element("span", data.where[i].replaceAll("`", ""), "where"));
    line("at", time(t));
    if (i >= 0) {
      line("total", size(data.total[i]));
      for (const kind of [...data.kinds].reverse()) if (kind.bytes[i]) line(kind.label, size(kind.bytes[i]), kind.style);
    }
    const j = before(data.seen.at, t, x => x);
    if (j >= 0) line("measured total", size(data.seen.total[j]), "line");
    const lanes = data.lanes.map(lane => [lane.name, lane.spans.filter(([start, end]) => start <= t && t <= end)]);
    if (lanes.some(([, spans]) => spans.length)) tip.append(element("hr"));
    for (const [name, spans] of lanes) {
      for (const [start, end, what] of spans.slice(0, 3)) line(name, what.replaceAll("`", "") + ", " + time(end - start));
    }
  }
  function show(t, y) {
    const box = field.getBoundingClientRect(), outer = chart.getBoundingClientRect(), x = box.left + box.width * t / data.end;
    fill(t);
    cursor.hidden = tip.hidden = false;
    cursor.style.left = x - outer.left + "px";
    const wide = tip.offsetWidth, high = tip.offsetHeight, right = x + 16 + wide < innerWidth;
    tip.style.left = Math.max(8, right ? x + 16 : x - 16 - wide) + "px";
    tip.style.top = Math.max(8, Math.min(y + 12, innerHeight - high - 8)) + "px";
  }
  const hide = () => { cursor.hidden = tip.hidden = true; };
  let at = 0;
  const point = event => {
    const box = field.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    if (share < 0 || share > 1) return hide();
    show(share * data.end, event.clientY);
    at = Math.max(0, before(data.at, share * data.end, x => x));
  };
  chart.addEventListener("pointermove", point);
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!move || !data.at.length) return;
    event.preventDefault();
    at = Math.max(0, Math.min(data.at.length - 1, at + move * (event.shiftKey ? 10 : 1)));
    show(data.at[at], chart.getBoundingClientRect().top + 40);
  });
})();
"""
