"""GPUs by name: plausible numbers in the right units, and a host beside each of them."""

import pytest

from holdall.errors import InvalidInput
from holdall.machine.presets import DUPLEX, gpu, gpu_names, rate_of
from holdall.types import Hardware
from holdall.units import GiB


def test_at_least_twenty_gpus_have_names():
    assert len(gpu_names()) >= 20
    assert {"rtx-4090", "a100-80gb", "h100-sxm", "h200", "b200", "t4"} <= set(gpu_names())


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_is_in_bytes_and_flops_per_second(name):
    card = gpu(name)
    assert (card.name, card.device) == (name, "cuda")
    assert [tier.name for tier in card.tiers] == ["gpu", "cpu"]
    assert 8 * GiB <= card.home.capacity <= 256 * GiB and card.home.capacity % GiB == 0
    assert 200e9 < card.bandwidth < 10e12
    assert set(card.flops) - {"float8"} == {"float32", "float16", "bfloat16"}
    assert 4e12 < card.flops["float32"] <= card.flops["float16"] < 5e15
    assert card.source


@pytest.mark.parametrize("name", gpu_names())
def test_tensor_cores_multiply_halves_twice_as_fast_as_tfloat32(name):
    card = gpu(name)
    if card.about.tfloat32 is not None:
        assert card.flops["float16"] == pytest.approx(2 * card.about.tfloat32, rel=0.02)
        assert card.flops["bfloat16"] == card.flops["float16"]


def test_cards_since_ada_multiply_eight_bits_twice_as_fast_as_sixteen():
    for name in gpu_names():
        card = gpu(name)
        assert ("float8" in card.flops) == name.startswith(("rtx-4", "rtx-5", "rtx-6", "rtx-pro", "l4", "h", "gh", "b")), name
        assert card.flops.get("float8", 2 * card.flops["float16"]) == pytest.approx(2 * card.flops["float16"], rel=0.02)


def test_memory_in_a_name_is_the_memory_of_the_card():
    for name in gpu_names():
        if name.endswith("gb"):
            assert gpu(name).home.capacity == int(name.rsplit("-", 1)[1].removesuffix("gb")) * GiB


def test_cards_without_bfloat16_units_compute_it_as_float32():
    assert gpu("t4").flops["bfloat16"] == gpu("t4").flops["float32"]


def test_the_link_of_an_h200_is_near_what_was_measured_on_one():
    card = gpu("h200")
    assert rate_of(card.about.link) == pytest.approx(63e9, rel=0.001)
    assert card.far.read == card.far.write == pytest.approx(55.3e9, rel=0.02)
    assert card.far.read * card.duplex == pytest.approx(47.3e9, rel=0.02)
    assert card.duplex == DUPLEX


def test_fewer_lanes_and_older_links_are_slower_in_proportion():
    assert gpu("rtx-4060-ti-16gb").far.read == gpu("rtx-4090").far.read / 2
    assert gpu("t4").far.read == pytest.approx(gpu("h100-sxm").far.read / 4)
    assert gpu("gh200").far.read > 5 * gpu("h200").far.read


def test_the_host_has_the_memory_it_is_given():
    assert gpu("l4").far.capacity == 64 * GiB
    assert gpu("l4", host_bytes=16 * GiB).far.capacity == 16 * GiB
    with pytest.raises(InvalidInput, match="`host_bytes` is 0"):
        gpu("l4", host_bytes=0)


def test_a_preset_survives_save_and_load(tmp_path):
    gpu("gh200").save(tmp_path / "gpu.json")
    assert Hardware.load(tmp_path / "gpu.json") == gpu("gh200")


def test_an_unknown_gpu_answers_with_the_nearest():
    with pytest.raises(InvalidInput, match=r"unknown GPU `rtx4090`\n.*did you mean `rtx-4090`"):
        gpu("rtx4090")
