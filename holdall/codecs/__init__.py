"""Codecs: floats stored in a few bits each, in groups of 256 that share a scale.

A codec turns a flat float tensor into one buffer of bytes, and back. The size of the buffer (`nbytes`) and of the scratch
memory (`workspace`) follow from the number of elements alone, so that plans know both to the byte.

name        bits     rounding     per group of 256
`group`     1 to 8   stochastic   32 bytes per bit, minimum and step in bfloat16 (ActNN, arXiv 2104.14129)
`int8`      8        nearest      256 bytes, minimum and step in bfloat16
`fp8`       8        nearest      256 bytes in e4m3, a float32 scale
`fp8_e5m2`  8        nearest      256 bytes in e5m2, a float32 scale
`sign`      1        exact        32 bytes: whether a value is above zero, all that the backward of a ReLU needs
"""

from __future__ import annotations

from holdall.codecs._base import GROUP, Codec, seed_from
from holdall.codecs.fp8 import Fp8
from holdall.codecs.group import Group
from holdall.codecs.sign import Sign
from holdall.errors import InvalidInput, unknown_name

__all__ = ["GROUP", "NAMES", "Codec", "Fp8", "Group", "Sign", "codec_for", "seed_from"]

NAMES = ("group", "int8", "fp8", "fp8_e5m2", "sign")


def codec_for(name: str, bits: int = 8) -> Codec:
    """The codec of that name; `bits` applies to `group` only."""
    if name not in NAMES:
        raise unknown_name("codec", name, NAMES)
    if name == "group":
        if not 1 <= bits <= 8:
            raise InvalidInput(f"`bits` is {bits}; it must be from 1 to 8", hint="give whole bits per element, such as bits=4")
        return Group(bits=bits)
    if name == "sign":
        return Sign()
    if bits != 8:
        raise InvalidInput(f"codec `{name}` always has 8 bits, not {bits}", hint='use codec="group" for other widths')
    return Group(bits=8, stochastic=False) if name == "int8" else Fp8(wide=name == "fp8_e5m2")
