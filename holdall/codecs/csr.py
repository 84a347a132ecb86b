"""Words that are not zero, packed, and one bit per word that says where: FlashNeuron's form of compressed sparse rows.

Lossless for any words: only those whose bits are all zero are left out, so that -0.0 and NaN come back as they were. The size
follows from the values, so this is not one of the codecs whose buffers a plan knows to the byte.

    [ mask: a bit per word, up to a multiple of 8 bytes ][ the words that are not zero, in order ]
"""

from __future__ import annotations

import torch

from holdall.errors import InvalidInput

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGN = 8  # bytes of the mask are a multiple of this, for the words behind it


def csr_bytes(words: int, nonzero: int, width: int) -> int:
    """Bytes of the form: the mask, and the words that are not zero."""
    return _mask_bytes(words) + nonzero * width


def encode_csr(data: torch.Tensor, width: int) -> torch.Tensor:
    """The form of a flat tensor of bytes, in words of `width` bytes; a rest that is no whole word follows at the end."""
    words = _words(data, width)
    there = words != 0
    bits = torch.zeros(8 * _mask_bytes(words.numel()), dtype=torch.uint8, device=data.device)
    bits[: words.numel()] = there
    mask = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=data.device)).sum(1, dtype=torch.uint8)
    rest = data[words.numel() * width :]
    return torch.cat([mask, words[there].view(torch.uint8), rest])


def decode_csr(codes: torch.Tensor, nbytes: int, width: int) -> torch.Tensor:
    """The `nbytes` bytes that were encoded."""
    count = nbytes // width
    bits = (codes[: _mask_bytes(count), None] >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1
    there = bits.view(-1)[:count].bool()
    end = codes.numel() - (nbytes - count * width)
    data = torch.zeros(nbytes, dtype=torch.uint8, device=codes.device)
    packed = codes[_mask_bytes(count) : end].clone().view(_word_type(width))  # cloned: views need aligned offsets
    _words(data, width).masked_scatter_(there, packed)
    data[count * width :] = codes[end:]
    return data


def _words(data: torch.Tensor, width: int) -> torch.Tensor:
    kind = _word_type(width)
    return data[: data.numel() // width * width].view(kind)


def _word_type(width: int) -> torch.dtype:
    if width not in _WORDS:
        raise InvalidInput(f"words of {width} bytes cannot be packed", hint="use 1, 2, 4 or 8")
    return _WORDS[width]


def _mask_bytes(words: int) -> int:
    return -(-words // (8 * _ALIGN)) * _ALIGN
