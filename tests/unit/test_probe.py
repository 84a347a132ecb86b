"""The probe on this machine's CPU, and the reading of control groups from made-up files."""

import time

import psutil
import pytest
import torch

from holdall.errors import InvalidInput, Unsupported
from holdall.host_memory import host_memory
from holdall.machine.host_rates import HostRates, host_rates
from holdall.machine.probe import ProbeClock, probe
from holdall.testing.stand_ins import forget_machine
from holdall.types import Hardware
from holdall.units import GiB, MiB


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def measured(told):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    begun = time.perf_counter()
    forget_machine()  # other tests of this process may have asked already
    hardware = probe("cpu", quick=True, progress=lambda *step: told.append(step))
    seconds = time.perf_counter() - begun
    assert torch.equal(torch.get_rng_state(), before)
    return hardware, seconds


def test_the_cpu_is_a_machine_of_two_memories(measured):
    hardware, _ = measured
    assert (hardware.device, hardware.overlap, hardware.efficiency) == ("cpu", False, 1.0)
    assert [t.name for t in hardware.tiers] == ["cpu", "far"]
    assert hardware.home.capacity == hardware.far.capacity == host_memory()
    assert "measured" in hardware.source and hardware.name


def test_every_figure_is_that_of_a_real_machine(measured):
    hardware, _ = measured
    assert 1e8 < hardware.flops["float32"] < 1e14
    assert 1e8 < hardware.bandwidth < 1e13
    assert 1e8 < hardware.far.read < 1e12 and 1e8 < hardware.far.write < 1e12
    assert 1e-7 < hardware.overhead < 1e-2 and 0 < hardware.far.latency < 1e-2
    assert all(p.rate > 0 and p.work > 0 for p in hardware.table)
    assert {p.family for p in hardware.table} == {"matmul", "attention", "conv", "memory"}
    assert {p.dtype for p in hardware.table if p.family == "matmul"} == set(hardware.flops)


def test_the_probe_is_short_and_tells_how_far_it_is(measured, told):
    _, seconds = measured
    assert seconds < 30  # about two on an idle machine; this one may be shared
    done = [step[1] for step in told]
    assert done == sorted(done) and told[-1][1] == told[-1][2] and told[0][0].startswith("measuring")


def test_the_second_answer_is_the_first_whoever_watches(measured):
    hardware, _ = measured
    assert probe("cpu", quick=True, progress=lambda *step: None) is hardware


def test_a_measured_machine_survives_the_disk(measured, tmp_path):
    hardware, _ = measured
    hardware.save(tmp_path / "machine.json")
    assert Hardware.load(tmp_path / "machine.json") == hardware


def test_where_the_cpu_computes_updates_are_as_fast_as_its_memory(measured):
    hardware, _ = measured
    assert host_rates(torch.device("cpu")) == HostRates()
    assert hardware.updates == pytest.approx(hardware.bandwidth / 28)
    assert hardware.updates_beside == 0


def test_a_device_that_is_not_there_is_refused_with_what_to_do():
    with pytest.raises(InvalidInput, match="unknown device `gpu`"):
        probe("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="no CUDA device"):
            probe("cuda")


def test_the_clock_finds_the_time_of_a_call():
    clock = ProbeClock(torch.device("cpu"), 0.05)
    assert 0.0039 < clock.seconds(lambda: time.sleep(0.004)) < 0.02  # others may use the machine
    assert clock.seconds(lambda: None) < 1e-4
    assert 0.099 < clock.seconds(lambda: time.sleep(0.1)) < 0.3  # longer than its budget


def machine(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


TOTAL = int(psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, TOTAL),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{64 * MiB}\n"}, 64 * MiB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": f"{65 * MiB}\n"}, 65 * MiB),  # a parent's limit binds
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, TOTAL),
        ({"proc/self/cgroup": "0::/not/seen/here\n", "sys/fs/cgroup/memory.max": f"{66 * MiB}"}, 66 * MiB),
        ({"sys/fs/cgroup/memory.max": f"{67 * MiB}"}, 67 * MiB),  # no list of groups at all
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{68 * MiB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            68 * MiB,
        ),
        ({"proc/self/cgroup": "4:cpuset,memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{69 * MiB}"}, 69 * MiB),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": f"{2**20 * GiB}"}, TOTAL),
    ],
)
def test_host_memory_is_the_least_of_ram_and_every_control_group(tmp_path, files, expected):
    assert host_memory(root=machine(tmp_path, files)) == expected
