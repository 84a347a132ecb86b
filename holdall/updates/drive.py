"""A process that owns files of masters and moments and updates them where they are; it stands for a drive that computes.

    host                                     drive: `python -m holdall.updates.drive FOLDER`
    gradient (or some entries of it)   ->    reads master and moments from its file, runs Adam, writes them back
    new master                         <-

Messages are a line of JSON and raw bytes; nothing is pickled and no shell is involved. The files of a drive go with its
process, which ends when its input does. A host has a thread for each drive, so drives work side by side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from holdall.errors import HoldallError

ALL = 3  # tensors in a file: master and two moments
OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize", "fused", "foreach")


# messages


def send(to: BinaryIO, header: Mapping[str, Any], payload: Sequence[torch.Tensor] = ()) -> int:
    """A message with these tensors, which are contiguous; the bytes of the tensors."""
    parts = [t.reshape(-1) for t in payload]
    described = [(str(t.dtype).removeprefix("torch."), t.numel()) for t in parts]
    to.write(json.dumps({**header, "tensors": described}).encode() + b"\n")
    for part in parts:
        to.write(memoryview(part.numpy()).cast("B"))  # type: ignore[arg-type]
    to.flush()
    return sum(t.nbytes for t in parts)


def receive(source: BinaryIO) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
    """The next message; None: the other side is gone."""
    line = source.readline()
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    payload = []
    for name, count in header.pop("tensors"):
        tensor = torch.empty(count, dtype=getattr(torch, name))
        view = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
        while len(view):
            got = source.readinto(view)  # type: ignore[attr-defined]
            if not got:
                return None
            view = view[got:]
        payload.append(tensor)
    return header, payload


# the host's side


class LargestEntries:
    """SmartComp: of each gradient a share of the entries, the largest; what is not sent is added to the next one."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.rest: dict[str, torch.Tensor] = {}  # key -> entries that were not sent

    def message(self, key: str, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradient, or positions and values of its entries that are sent."""
        if self._share >= 1:
            return [grad]
        whole = self.rest.pop(key, torch.zeros_like(grad)) + grad
        flat = whole.view(-1)
        at = flat.abs().topk(max(1, round(self._share * flat.numel()))).indices
        sent = flat[at].clone()
        flat[at] = 0
        self.rest[key] = whole
        return [at.to(torch.int32), sent]


class Drive:
    """The host's end of a drive. Calls wait for the answer; one thread at a time."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.sent = self.received = 0  # bytes of gradients, or of what stands for them, and of masters
        command = [sys.executable, "-m", "holdall.updates.drive", str(folder or "")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def set(self, key: str, value: torch.Tensor) -> None:
        """A master's values; its moments are those that it has, or zeros."""
        self._ask({"do": "set", "key": key}, [value])

    def update(self, key: str, rule: str, options: Mapping[str, Any], grad: Sequence[torch.Tensor]) -> torch.Tensor:
        """The new master. `grad`: whole, or (positions, values) of its entries that are not zero."""
        before = self.sent, self.received
        (value,) = self._ask({"do": "update", "key": key, "rule": rule, "options": dict(options)}, grad)[1]
        self.sent = before[0] + sum(t.nbytes for t in grad)
        self.received = before[1] + value.nbytes
        return value

    def moments(self, key: str) -> tuple[float, torch.Tensor, torch.Tensor]:
        """The number of steps, and both moments."""
        header, (first, second) = self._ask({"do": "moments", "key": key})
        return header["step"], first, second

    def set_moments(self, key: str, step: float, first: torch.Tensor, second: torch.Tensor) -> None:
        self._ask({"do": "set moments", "key": key, "step": step}, [first, second])

    def _ask(
        self, header: Mapping[str, Any], payload: Sequence[torch.Tensor] = ()
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            send(self.process.stdin, header, payload)  # type: ignore[arg-type]
            answer = receive(self.process.stdout)  # type: ignore[arg-type]
        except (OSError, ValueError):
            answer = None
        if answer is None:
            code = self.process.poll()
            raise HoldallError(
                f"the process that owns the optimizer states has ended (exit code {code})",
                hint="resume from the last checkpoint; its own message is above",
            )
        if "error" in answer[0]:
            raise HoldallError(
                f"the process that owns the optimizer states: {answer[0]['error']}",
                hint="if its disk is full, free some space; resume from the last checkpoint",
            )
        return answer

    def close(self) -> None:
        """Its files go with it."""
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                try:
                    end.close()
                except OSError:
                    continue
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# the drive's side


class Files:
    """What a drive does with its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, torch.Tensor] = {}  # (3, elements) of each master, mapped from its file
        self._steps: dict[str, torch.Tensor] = {}

    def answer(self, header: dict[str, Any], payload: list[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        key = header["key"]
        match header["do"]:
            case "set":
                self._of(key, payload[0].numel())[0].copy_(payload[0])
                return {}, []
            case "update":
                self._update(key, header["rule"], header["options"], payload)
                return {}, [self._tensors[key][0]]
            case "moments":
                return {"step": float(self._steps[key])}, [self._tensors[key][1], self._tensors[key][2]]
            case "set moments":
                kept = self._of(key, payload[0].numel())
                kept[1].copy_(payload[0])
                kept[2].copy_(payload[1])
                self._steps[key].fill_(header["step"])
                return {}, []
        return {"error": f"it does not know {header['do']!r}"}, []

    def _of(self, key: str, numel: int) -> torch.Tensor:
        if key not in self._tensors:
            path = self._folder / f"states-{len(self._tensors)}.bin"
            mapped = torch.from_file(str(path), shared=True, size=ALL * numel, dtype=torch.float32)
            self._tensors[key] = mapped.view(ALL, numel).zero_()
            self._steps[key] = torch.zeros(())
        return self._tensors[key]

    def _update(self, key: str, rule: str, options: dict[str, Any], payload: list[torch.Tensor]) -> None:
        master, first, second = self._tensors[key]
        p = torch.nn.Parameter(master)
        if len(payload) == 1:
            p.grad = payload[0]
        else:
            p.grad = torch.zeros_like(master)
            p.grad[payload[0].long()] = payload[1]
        made: torch.optim.Optimizer = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[rule]([p], **options)
        made.state[p] = {"step": self._steps[key], "exp_avg": first, "exp_avg_sq": second}
        made.step()


def serve(source: BinaryIO, to: BinaryIO, folder: Path) -> None:
    """Answer until the host is gone."""
    files = Files(folder)
    while (message := receive(source)) is not None:
        try:
            answer = files.answer(*message)
        except (OSError, RuntimeError) as error:
            answer = {"error": str(error).splitlines()[0]}, []
        send(to, *answer)


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory(prefix="holdall-drive-", dir=folder or None) as own:
        serve(sys.stdin.buffer, sys.stdout.buffer, Path(own))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1])
