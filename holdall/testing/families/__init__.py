"""Small models of many families, through which `fit` is compared with plain training.

One file per kind: decoders, encoders, encoders with decoders, images, sound and time, several inputs at once, recurrent nets,
generative models, tables and graphs, and ways of writing a module that people use (hooks, parametrizations, own Functions).
"""

from __future__ import annotations

from holdall.testing.families import (
    decoders,
    encoders,
    generative,
    images,
    manners,
    recurrent,
    several_inputs,
    sound_and_time,
    tables_and_graphs,
    translators,
)
from holdall.testing.families._registry import FAMILIES, Family, register

__all__ = [
    "FAMILIES",
    "Family",
    "decoders",
    "encoders",
    "generative",
    "images",
    "manners",
    "recurrent",
    "register",
    "several_inputs",
    "sound_and_time",
    "tables_and_graphs",
    "translators",
]
