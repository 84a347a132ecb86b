"""GB/s of every codec on this machine, each way, and what it saves.

python benchmarks/codecs.py [--device cpu|cuda] [--mi 4] [--dtype float32] [--repeats 5] [--out codecs.csv]

GB/s counts the bytes of the tensor itself, once: what a plan has to set against recomputing or copying it. On a GPU the group
codecs are one Triton kernel each way where Triton is there; `path` says which was used.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from holdall.codecs import _triton, codec_for

CODECS = [*(("group", bits) for bits in (1, 2, 3, 4, 8)), ("int8", 8), ("fp8", 8), ("fp8_e5m2", 8), ("sign", 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mi", type=float, default=4.0, help="Mi elements of the tensor")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="", help="also write a CSV")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    x = torch.randn(int(options.mi * 2**20), device=device).to(dtype)
    size = x.numel() * x.element_size()
    generator = torch.Generator().manual_seed(0)
    rows = []
    print(f"{x.numel():,} elements of {options.dtype} on {name_of(device)}, {torch.get_num_threads()} threads")
    heads = f"{'codec':10}{'bits':>5}{'path':>8}{'encode GB/s':>13}{'decode GB/s':>13}"
    print(f"{heads}{'smaller':>9}{'saved MB':>10}{'rms error':>11}")
    for name, bits in CODECS:
        codec = codec_for(name, bits)
        codes = codec.encode(x, generator)
        back = codec.decode(codes, x.numel(), dtype)
        error = float("nan") if name == "sign" else float((back.float() - x.float()).square().mean().sqrt())
        encode = median(lambda codec=codec: codec.encode(x, generator), options.repeats, device)
        decode = median(lambda codec=codec, codes=codes: codec.decode(codes, x.numel(), dtype), options.repeats, device)
        path = "triton" if name in ("group", "int8") and _triton.works_on(device) else "torch"
        row = {
            "codec": name,
            "bits": bits,
            "path": path,
            "encode_gb_s": size / encode / 1e9,
            "decode_gb_s": size / decode / 1e9,
        }
        row |= {"nbytes": size, "coded": codes.numel(), "smaller": size / codes.numel(), "rms_error": error}
        rows.append(row)
        print(
            f"{name:10}{bits:5}{path:>8}{row['encode_gb_s']:13.3f}{row['decode_gb_s']:13.3f}"
            f"{row['smaller']:9.2f}{(size - codes.numel()) / 1e6:10.2f}{error:11.2e}",
            flush=True,
        )
    if options.out:
        about = {"device": name_of(device), "dtype": options.dtype, "threads": torch.get_num_threads()}
        about |= {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "python": platform.python_version()}
        with open(options.out, "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *about])
            writer.writeheader()
            writer.writerows({**row, **about} for row in rows)
        print(f"{len(rows)} rows in {options.out}")


def median(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds, after one run that does not count."""
    times = []
    for n in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if n:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
