"""Turns a text or JSONL file into sequences of equal length, in an order that one integer can resume.

Documents are tokenised, joined by the end-of-text token and cut every `seq` tokens, so that every batch has the planned shape.
Sequence `position` of a run is number `position % n` of epoch `position // n`, and each epoch's order is drawn from the seed
and the epoch's number: the position is the only state.

Tokens are numpy arrays, not tensors: on a CPU the ledger counts tensors against the budget, and must not count the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdall.errors import InvalidInput
from holdall.units import MiB

_LINES = (".jsonl", ".ndjson", ".json")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
_NUL = 0  # ends a document of bytes: text does not contain it

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Text to token ids."""

    encode: Callable[[str], Tokens]  # (tokens,)
    end: int | None  # appended to each document; None: nothing
    tokenizer: Any = None  # saved with the weights; None: bytes are tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The packed file. The last sequences are held out, so that training and evaluation data are separate."""

    train: Tokens  # (n, seq)
    held_out: Tokens  # (m, seq)
    seed: int
    fingerprint: str  # of all sequences and their split: a resumed run must have the same

    def batch(self, position: int, size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The `size` sequences from `position` on; a batch may span two epochs."""
        count = len(self.train)
        rows = [_order(self.seed, p // count, count)[p % count] for p in range(position, position + size)]
        return _as_batch(self.train[rows], device)

    def held_out_batches(self, size: int, device: str = "cpu") -> Iterator[dict[str, torch.Tensor]]:
        """The held-out sequences in order; the last batch may be smaller."""
        for first in range(0, len(self.held_out), size):
            yield _as_batch(self.held_out[first : first + size], device)


@lru_cache(maxsize=2)  # a batch may span two epochs
def _order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    mixed = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    # the legacy generator: its numbers are the same in every version of numpy
    return np.random.RandomState(int.from_bytes(mixed, "little")).permutation(count)


def _as_batch(rows: Tokens, device: str) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(rows.astype(np.int64)).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def load_sequences(
    path: Path, encoder: Encoder, *, seq: int, vocabulary: int, seed: int = 0, eval_fraction: float = 0.0, field: str = "text"
) -> Sequences:
    """Read, tokenise, pack and split a file. `vocabulary`: the model's number of tokens."""
    tokens = _tokenise(path, encoder, field)
    if not len(tokens):
        raise InvalidInput(f"`{path}` is empty", hint="use a file with text in it")
    largest = int(tokens.max())
    if largest >= vocabulary:
        raise InvalidInput(
            f"the text contains token {largest}, but the model knows {vocabulary} tokens",
            hint="use the tokenizer that belongs to the model",
        )
    count = len(tokens) // seq
    held_out = max(1, round(count * eval_fraction)) if eval_fraction else 0
    if count - held_out < 1:
        what = f"one sequence of {seq}" if not held_out else f"two sequences of {seq}, one to train on and one held out"
        hint = "use a shorter sequence or a longer file" + (", or hold nothing out (`eval_fraction` 0)" if held_out else "")
        raise InvalidInput(f"`{path}` holds {len(tokens)} tokens, fewer than {what}", hint=hint)
    rows = tokens[: count * seq].reshape(count, seq)
    digest = hashlib.blake2b(f"{seq} {held_out} ".encode(), digest_size=16)
    digest.update(rows.data)
    split = count - held_out
    return Sequences(train=rows[:split], held_out=rows[split:], seed=seed, fingerprint=digest.hexdigest())


def make_encoder(folder: Path | None) -> Encoder:
    """The folder's own tokenizer if it has one; otherwise each UTF-8 byte is a token."""
    if folder is None or not any((folder / name).is_file() for name in _VOCABULARIES):
        return Encoder(encode=_encode_bytes, end=_NUL)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each tokenizer family raises its own errors
        reason = str(error).strip().split("\n", 1)[0]
        raise InvalidInput(
            f"the tokenizer in `{folder}` cannot be read: {reason}",
            hint="save it again with `save_pretrained`, or remove its files from the folder to train on bytes",
        ) from error

    def encode(text: str) -> Tokens:
        return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)

    return Encoder(encode=encode, end=tokenizer.eos_token_id, tokenizer=tokenizer)


def _encode_bytes(text: str) -> Tokens:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def _tokenise(path: Path, encoder: Encoder, field: str) -> Tokens:
    """All documents as one sequence of tokens."""
    read = _json_documents(path, field) if path.suffix.lower() in _LINES else _text_pieces(path)
    found = []
    try:
        for piece, ends in read:
            found.append(encoder.encode(piece))
            if ends and encoder.end is not None and piece:
                found.append(np.array([encoder.end], dtype=np.int32))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"`{path}` is not UTF-8 text: {error}", hint="convert it to UTF-8") from None
    except OSError as error:
        raise InvalidInput(f"cannot read `{path}`: {error.strerror or error}", hint="give a text or JSONL file") from None
    return np.concatenate(found) if found else np.empty(0, dtype=np.int32)


def _text_pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """A text file as one document, in pieces of whole lines, since tokenising takes more memory than the text."""
    with path.open(encoding="utf-8-sig") as file:
        while lines := file.readlines(MiB):
            yield "".join(lines), False


def _json_documents(path: Path, field: str) -> Iterator[tuple[str, bool]]:
    """One document per line: an object with the text in `field`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _document(line, f"line {number} of `{path}`", field), True


def _document(line: bytes, where: str, field: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:  # not JSON, or not text
        raise InvalidInput(f"{where} is not JSON: {error}", hint="each line must be one object") from None
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where} is {type(entry).__name__}, not an object", hint='write lines as {"text": "..."}')
    if field not in entry:
        has = ", ".join(map(str, entry)) or "none"
        raise InvalidInput(f"{where} has no field `{field}`", hint=f"its fields: {has}; choose one with `--field`")
    if not isinstance(entry[field], str):
        hint = "the field must hold the text of a document"
        raise InvalidInput(f"`{field}` in {where} is {type(entry[field]).__name__}, not text", hint=hint)
    # half of a surrogate pair is legal JSON, but not a character
    return str(entry[field]).encode("utf-8", "replace").decode("utf-8")
