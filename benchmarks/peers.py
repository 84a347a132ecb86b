"""Other ways to train a model that does not fit, one method per process: speed, memory, losses.

python benchmarks/peers.py METHOD [--shape 3b] [--batch 4] [--seq 4096] [--cap 24] [--clip] [--steps 4] [--warmup 2]

METHOD is a name of `METHODS`; `fsdp2@4` takes the batch in four parts (gradient accumulation). Every method starts from the
same weights, sees the same batch in every step and uses the same AdamW, so that their losses can be compared. `--cap` is in GiB
and is kept by CUDA's caching allocator; methods take smaller buckets and loss chunks under a small one. Run it with
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, as `gpu_budget_curve.py` does. What is not installed is looked for in
`--wheels`, a folder of wheels and of DeepSpeed's source archive (`benchmarks/README.md` says how to fill it).

One line of standard output begins with RESULT and holds a JSON object. Bytes are bytes; `step_s` is wall-clock time over the
measured steps with one synchronization at the end; `median_step_s` is the median of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

GIB = 2**30

_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "1b": _LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "3b": _LLAMA | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MAX_NORM = 1.0


# -- the workload ------------------------------------------------------------------------------------------------------


def build_model(shape: str, *, seq: int, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """A Llama with random weights, equal on every device: made on meta, filled from one random block that is laid end to end.

    The block's length is a prime, so that the rows of a matrix are different pieces of it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=max(seq, 4096), use_cache=False, attn_implementation="sdpa")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to(dtype).to_empty(device=device)
    model.tie_weights()
    reset_rotary(model, device)
    block = (torch.randn(4_194_301, generator=torch.Generator().manual_seed(0)) * 0.02).to(device)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                parameter.fill_(1)
            else:
                _tile(parameter.view(-1), block, offset=index * 104_729 % len(block))
    return model.train()


def _tile(flat: torch.Tensor, block: torch.Tensor, *, offset: int) -> None:
    filled = 0
    while filled < len(flat):
        piece = block[offset : offset + len(flat) - filled]
        flat[filled : filled + len(piece)].copy_(piece)
        filled, offset = filled + len(piece), 0


def reset_rotary(model: torch.nn.Module, device: str) -> None:
    """Rotary frequencies in fp32: `to_empty` leaves them unset, and a cast of the whole module rounds them."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)


def build_ids(shape: str, *, batch: int, seq: int, device: str) -> torch.Tensor:
    """The batch of every step; the same on every device."""
    source = torch.Generator().manual_seed(1)
    return torch.randint(0, SHAPES[shape]["vocab_size"], (batch, seq), generator=source).to(device)


class WithLoss(torch.nn.Module):
    """A causal language model and its loss as one module, so that hooks on any parameter fire inside its forward.

    `chunk`: tokens whose logits exist at a time (they are computed again in backward); None: the model's own loss, all at once.
    """

    def __init__(self, model: torch.nn.Module, chunk: int | None) -> None:
        super().__init__()
        self.lm = model
        self.chunk = chunk

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.chunk is None:
            return self.lm(input_ids=ids, labels=ids).loss
        hidden = self.lm.model(input_ids=ids).last_hidden_state
        hidden = hidden[:, :-1].flatten(0, 1)  # [batch * (seq - 1), hidden]
        wanted = ids[:, 1:].flatten()
        parts = zip(hidden.split(self.chunk), wanted.split(self.chunk), strict=True)
        return sum(checkpoint(self._chunk_loss, h, y, use_reentrant=False) for h, y in parts) / len(wanted)

    def _chunk_loss(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm.lm_head(hidden).float(), wanted, reduction="sum")


# -- measuring ---------------------------------------------------------------------------------------------------------


def cap_memory(gib: float | None, device: str) -> None:
    """Let CUDA's caching allocator refuse what goes over `gib`."""
    if gib and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)


def measure(step: Callable[[], torch.Tensor], *, device: str, warmup: int, steps: int, tokens: int) -> dict[str, Any]:
    """Run warm-up steps, then `steps` steps with one synchronization at the end.

    Work that a method leaves to a host thread after its step is in the figure too: the next step waits for it.
    """
    cuda = device == "cuda"
    losses = [step() for _ in range(warmup)]
    before = 0
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    marks = [_mark(cuda)]
    for _ in range(steps):
        losses.append(step())
        marks.append(_mark(cuda))
    if cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / steps
    each = [_between(a, b) for a, b in pairwise(marks)]
    found: dict[str, Any] = {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds,
        "median_step_s": statistics.median(each),
        "losses": [float(loss) for loss in losses],
    }
    if cuda:
        found["peak_allocated"] = torch.cuda.max_memory_allocated()
        found["peak_reserved"] = torch.cuda.max_memory_reserved()
        found["peak_reserved_run"] = max(before, torch.cuda.max_memory_reserved())
    return found


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


def environment() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version()}


def explain_failure(error: BaseException) -> dict[str, str]:
    """`oom` where memory ran out, else `error`; with the first line of what was said."""
    text = str(error).strip() or type(error).__name__
    out = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in text.lower()
    first = text.splitlines()[0][:300]
    return {"status": "oom" if out else "error", "why": first if out else f"{type(error).__name__}: {first}"}


def finish(result: dict[str, Any]) -> None:
    """Print the result and leave at once: process groups and pinned pools may take minutes to come down."""
    result["host_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    print("RESULT", json.dumps(result), flush=True)
    sys.stderr.flush()
    os._exit(0)


# -- the methods -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a method is asked to do."""

    shape: str
    seq: int
    device: str
    batches: list[torch.Tensor]  # the parts of one step's batch
    cap: float | None  # GiB; None: the whole device
    clip: bool

    @property
    def chunk(self) -> int:
        """Tokens per piece of the chunked loss: 2048 rows of 128k fp32 logits are 1 GiB, and there are a few of them."""
        return 2048 if self.cap is None or self.cap >= 16 else 512

    @property
    def bucket(self) -> int:
        """Elements in one of DeepSpeed's buckets. Its default is 5e8: 1 GB each, and there are two or more."""
        if self.cap is None or self.cap >= 24:
            return 500_000_000
        return 200_000_000 if self.cap >= 12 else 50_000_000

    def build(self, dtype: torch.dtype, *, device: str | None = None) -> torch.nn.Module:
        return build_model(self.shape, seq=self.seq, dtype=dtype, device=device or self.device)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A method that is ready to train."""

    step: Callable[[], torch.Tensor]  # one optimizer step; returns the loss before it
    precision: str
    cannot_clip: str = ""  # why not; empty: it can


def train_step(
    forward: Callable[[torch.Tensor], torch.Tensor],
    parameters: Iterable[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    setting: Setting,
    *,
    clip: bool,
) -> Callable[[], torch.Tensor]:
    """The ordinary loop body."""
    owned = list(parameters)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=setting.device)
        for ids in setting.batches:
            loss = forward(ids) / len(setting.batches)
            loss.backward()
            total += loss.detach()
        if clip:
            torch.nn.utils.clip_grad_norm_(owned, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def enable_checkpointing(model: torch.nn.Module) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def prepare_plain(setting: Setting, *, chunked: bool = False, checkpointing: bool = False) -> Prepared:
    """fp32 weights, bf16 autocast, fused AdamW: all on the GPU."""
    model = setting.build(torch.float32)
    if checkpointing:
        enable_checkpointing(model)
    wrapped = WithLoss(model, setting.chunk if chunked else None)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setting.device, torch.bfloat16):
            return wrapped(ids)

    step = train_step(forward, model.parameters(), optimizer, setting, clip=setting.clip)
    return Prepared(step=step, precision="fp32 weights, bf16 autocast")


def prepare_bf16_master(setting: Setting, *, checkpointing: bool = False) -> Prepared:
    """bf16 weights, fp32 master weights and AdamW, all on the GPU; gradients are cast to fp32, then clipped."""
    model = setting.build(torch.float32)
    masters = [p.detach() for p in model.parameters()]
    for parameter in model.parameters():  # one by one: a cast of the module would round the rotary frequencies
        parameter.data = parameter.data.to(torch.bfloat16)
    if checkpointing:
        enable_checkpointing(model)
    wrapped = WithLoss(model, setting.chunk)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=setting.device)
        for ids in setting.batches:
            loss = wrapped(ids) / len(setting.batches)
            loss.backward()
            total += loss.detach()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        if setting.clip:
            torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return total

    return Prepared(step=step, precision="bf16 weights, fp32 master")


def prepare_deepspeed(setting: Setting, *, stage: int, super_offload: bool = False) -> Prepared:
    """ZeRO-Offload: optimizer states on the host and, in stage 3, the weights too.

    `super_offload`: DeepSpeed's SuperOffload, which updates on the host while backward goes on; the weights stay on the GPU.
    """
    import deepspeed

    model = setting.build(torch.bfloat16, device="cpu")
    enable_checkpointing(model)
    wrapped = WithLoss(model, setting.chunk)
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": setting.device == "cuda"}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": offload,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": setting.bucket,
        "allgather_bucket_size": setting.bucket,
    }
    if super_offload:  # as in its published examples
        zero["offload_optimizer"] = offload | {"super_offload": True, "cpuadam_cores_perc": 0.9}
        zero |= {"overlap_comm": False, "sub_group_size": min(setting.bucket, 400_000_000)}
    elif stage == 3:
        live = 2 * setting.bucket
        zero |= {
            "offload_param": offload,
            "stage3_prefetch_bucket_size": setting.bucket // 5,  # a block of the 3B shape is 1e8
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    config = {
        "train_micro_batch_size_per_gpu": len(setting.batches[0]),
        "gradient_accumulation_steps": len(setting.batches),
        "gradient_clipping": MAX_NORM if setting.clip else 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=wrapped, model_parameters=list(wrapped.parameters()), config=config)
    reset_rotary(model, setting.device)  # DeepSpeed casts buffers to bf16

    def step() -> torch.Tensor:
        total = torch.zeros((), device=setting.device)
        for ids in setting.batches:
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / len(setting.batches)
        return total

    return Prepared(step=step, precision="bf16 weights, fp32 master")


def prepare_fsdp2(setting: Setting) -> Prepared:
    """FSDP2 on one rank with everything on the host; blocks are fetched one ahead, computed in bf16 and let go again."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    cuda = setting.device == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    model = setting.build(torch.float32, device="cpu")
    enable_checkpointing(model)
    wrapped = WithLoss(model, setting.chunk)
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(setting.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
    }
    blocks = [fully_shard(block, **policy) for block in model.model.layers]
    fully_shard(wrapped, **policy)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    reset_rotary(model, setting.device)
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True, **ADAMW)
    step = train_step(wrapped, wrapped.parameters(), optimizer, setting, clip=setting.clip)
    return Prepared(step=step, precision="fp32 weights, bf16 compute")


def prepare_torchao(setting: Setting, *, dtype: torch.dtype = torch.bfloat16) -> Prepared:
    """torchao's optimizer on the host; gradients leave the GPU as backward makes them."""
    from torchao.optim import CPUOffloadOptimizer

    model = setting.build(dtype)
    enable_checkpointing(model)
    wrapped = WithLoss(model, setting.chunk)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=len(setting.batches) == 1, fused=True, **ADAMW
    )

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setting.device, torch.bfloat16, enabled=dtype == torch.float32):
            return wrapped(ids)

    step = train_step(forward, (), optimizer, setting, clip=False)
    precision = "bf16 weights and states" if dtype == torch.bfloat16 else "fp32 weights, bf16 autocast"
    return Prepared(step=step, precision=precision, cannot_clip="gradients are on the host before their norm is known")


@dataclass(frozen=True, kw_only=True)
class Method:
    prepare: Callable[..., Prepared]
    with_options: dict[str, Any]
    needs: tuple[str, ...] = ()  # modules beyond torch and transformers


def _method(prepare: Callable[..., Prepared], *needs: str, **with_options: Any) -> Method:
    return Method(prepare=prepare, with_options=with_options, needs=needs)


METHODS = {
    "plain": _method(prepare_plain),
    "plain_chunked": _method(prepare_plain, chunked=True),
    "checkpointing": _method(prepare_plain, chunked=True, checkpointing=True),
    "bf16_master": _method(prepare_bf16_master),
    "bf16_master_checkpointing": _method(prepare_bf16_master, checkpointing=True),
    "zero2": _method(prepare_deepspeed, "deepspeed", stage=2),
    "zero3": _method(prepare_deepspeed, "deepspeed", stage=3),
    "zero3_super": _method(prepare_deepspeed, "deepspeed", stage=3, super_offload=True),
    "fsdp2": _method(prepare_fsdp2),
    "torchao": _method(prepare_torchao, "torchao"),
    "torchao_fp32": _method(prepare_torchao, "torchao", dtype=torch.float32),
}


def split_name(name: str) -> tuple[str, int]:
    """`fsdp2@4` is `fsdp2` with the batch in four parts."""
    method, _, parts = name.partition("@")
    if method not in METHODS:
        raise SystemExit(f"unknown method `{method}`\nhint: known: {', '.join(METHODS)}")
    return method, int(parts or 1)


# -- what is not installed ---------------------------------------------------------------------------------------------


def use_wheels(folder: Path, modules: Iterable[str]) -> None:
    """Unpack `folder` once and put it first on the path, if any of `modules` is not installed."""
    if all(find_spec(module) for module in modules):
        return
    if not folder.is_dir():
        raise ModuleNotFoundError(f"{', '.join(modules)} not installed, and there is no folder of wheels `{folder}`")
    into = Path(tempfile.gettempdir()) / f"holdall-peers-{os.getuid()}"
    if not (into / "complete").exists():
        into.mkdir(exist_ok=True)
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
        for source in sorted(folder.glob("*.tar.gz")):
            with tarfile.open(source) as archive:
                archive.extractall(into, filter="data")
        for program in into.glob("*.data/scripts/*"):
            program.chmod(0o755)  # zipfile forgets modes
        (into / "complete").touch()
    found = [str(p.parent) for p in into.glob("deepspeed-*/setup.py")] + [str(into)]
    sys.path[:0] = found
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, os.environ.get("PYTHONPATH", "")])  # for processes they start
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *(str(p) for p in into.glob("*.data/scripts"))])


def alone_in_the_world() -> None:
    """What torch.distributed reads: one rank, any free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # its host Adam is C++; another minor version of CUDA will do


# -- the command line --------------------------------------------------------------------------------------------------


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Options that say what is trained; every method must be given the same."""
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--clip", action=argparse.BooleanOptionalAction, default=False, help="clip the global norm to 1.0")
    parser.add_argument("--wheels", type=Path, default=Path(".peers"))


def run_method(options: argparse.Namespace) -> dict[str, Any]:
    name, parts = split_name(options.method)
    method = METHODS[name]
    result: dict[str, Any] = {"method": options.method, "shape": options.shape, "cap_gib": options.cap, **environment()}
    try:
        use_wheels(options.wheels, method.needs)
        alone_in_the_world()
        if options.device == "cuda":
            torch.cuda.set_device(0)
        cap_memory(options.cap, options.device)
        ids = build_ids(options.shape, batch=options.batch, seq=options.seq, device=options.device)
        setting = Setting(
            shape=options.shape,
            seq=options.seq,
            device=options.device,
            batches=list(ids.chunk(parts)),
            cap=options.cap,
            clip=options.clip,
        )
        began = time.perf_counter()
        prepared = method.prepare(setting, **method.with_options)
        result["setup_s"] = time.perf_counter() - began
        result["precision"] = prepared.precision
        result["clip"] = f"no: {prepared.cannot_clip}" if prepared.cannot_clip else "yes" if options.clip else "off"
        result |= measure(prepared.step, device=options.device, warmup=options.warmup, steps=options.steps, tokens=ids.numel())
        result["status"] = "ok"
    except Exception as error:
        traceback.print_exc()
        result |= explain_failure(error)
        if options.device == "cuda" and torch.cuda.is_available():
            result["peak_allocated"] = torch.cuda.max_memory_allocated()
            result["peak_reserved"] = result["peak_reserved_run"] = torch.cuda.max_memory_reserved()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", metavar="METHOD", help=", ".join(METHODS))
    add_workload(parser)
    parser.add_argument("--cap", type=float, default=None, help="GiB; none by default")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    split_name(options.method)
    finish(run_method(options))


if __name__ == "__main__":
    main()
