"""Sizes as people write them."""

import pytest

from holdall.errors import InvalidInput
from holdall.units import GiB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GiB),
        ("24 GiB", 24 * GiB),
        ("24GB", 24 * 10**9),
        ("1.5MiB", 1572864),
        (1024, 1024),
        ("1024", 1024),
        ("7b", 7),
        ("1e3", 1000),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


def test_a_fraction_is_of_the_device():
    assert parse_bytes(0.5, total=1000) == 500
    assert parse_bytes("50%", total=1000) == 500
    assert parse_bytes("0.25", total=1000) == 250


@pytest.mark.parametrize(
    "text",
    ["1.5", "24 florps", "-1GiB", 0, "0", -5, "nan", "", "1e30GiB", True, float("inf"), float("nan"), "1 2GiB", "150%"],
)
def test_what_is_not_a_size_is_refused_with_a_hint(text):
    with pytest.raises(InvalidInput) as refused:
        parse_bytes(text)
    assert refused.value.hint
    assert "\n" not in refused.value.fact


def test_sizes_are_shown_in_gibibytes_with_one_decimal():
    assert format_bytes(23.64 * GiB) == "23.6 GiB"
    assert format_bytes(5 * 2**20) == "5.0 MiB"
    assert format_bytes(12) == "12 B"
    assert format_seconds(0.412) == "412 ms"
    assert format_seconds(2.5) == "2.50 s"
