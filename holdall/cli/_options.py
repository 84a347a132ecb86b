"""Options that several verbs share, each with its help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdall.cli import _words as words

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A preset such as gpt2 or llama-3.2-1b, a Hugging Face folder, or a config.json.")
]
MaybeModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A preset such as gpt2 or llama-3.2-1b, a Hugging Face folder, or a config.json.",
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option("--batch", "-b", metavar="N", help="Sequences (or images) in one step.")]
Seq = Annotated[int, typer.Option("--seq", "-s", metavar="N", help="Tokens in one sequence; images have none.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="NAME",
        callback=words.known_dtype,
        help="Of weights and computation: float32, bfloat16, float16; bf16-mixed: float32 weights, computed in bf16.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision", metavar="NAME", help="One of `holdall precisions`, such as bf16, instead of --dtype.", show_default=False
    ),
]
Autocast = Annotated[
    str | None,
    typer.Option(
        "--autocast",
        metavar="NAME",
        callback=words.known_autocast,
        help="The loop runs forward and loss under autocast to bf16 or fp16.",
        show_default=False,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        callback=words.known_optimizer,
        help="One of `holdall optimizers`, with options as in galore:rank=64; or none.",
    ),
]
Rule = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        callback=words.known_rule,
        help="One of `holdall optimizers`, with options as in galore:rank=64.",
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="SIZE",
        callback=words.a_budget,
        help="24GiB, 24GB, 0.9 of the device, auto (all of it), or one per tier: gpu=24GiB,cpu=64GiB.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        callback=words.known_gpu,
        help="Plan for this GPU from its datasheet; none is needed here.",
        show_default=False,
    ),
]
HardwareFile = Annotated[
    Path | None,
    typer.Option(
        "--hardware", metavar="FILE", help="Plan for a machine measured with `holdall probe --out`.", show_default=False
    ),
]
Planner = Annotated[
    str, typer.Option("--planner", metavar="NAME", callback=words.known_planner, help="One of `holdall planners`.")
]
Allow = Annotated[
    str | None,
    typer.Option(
        "--allow",
        metavar="A,B",
        callback=words.known_actions,
        help="Actions that may be used, such as recompute,offload; see `holdall actions`.",
        show_default=False,
    ),
]
PlannerOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the planner; may be repeated.", show_default=False),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="A trace written by `holdall trace --out`, instead of a model.", show_default=False
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME",
        help="Give tensors offsets in one arena by a static layout, such as best_fit; see `holdall layout`.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
