"""What users write is read as nccl-tests reads it; what is printed reads back to what it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import units


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8", 8),
        ("64K", 65_536),
        ("64KiB", 65_536),
        ("64KB", 64_000),
        ("1M", 1_048_576),
        ("1.5 GiB", 1_610_612_736),
        ("2gb", 2_000_000_000),
        ("4G", 4_294_967_296),
        ("1T", 1_099_511_627_776),
        ("1e9", 1_000_000_000),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "time_s"),
    [
        ("60", 60),
        ("120s", 120),
        ("2m", 120),
        ("2min", 120),
        ("0.5h", 1800),
        ("250ms", 0.25),
        ("1.5 days", 129_600),
    ],
)
def test_times_are_read(text: str, time_s: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(time_s, rel=1e-12)


@pytest.mark.parametrize("text", ["", "-1", "1Q", "K", "1 2", "1,5K", "nan", "0x10", "1KiBs"])
@pytest.mark.parametrize("parse", [units.parse_bytes, units.parse_seconds])
def test_nonsense_is_one_line_with_an_example(parse, text: str) -> None:
    with pytest.raises(ValueError, match="write it like") as error:
        parse(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["1e400", "1e308d", "1e308TiB"])
@pytest.mark.parametrize("parse", [units.parse_bytes, units.parse_seconds])
def test_what_is_not_finite_is_refused(parse, text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse(text)


def test_the_option_is_named_where_it_has_a_name() -> None:
    with pytest.raises(ValueError, match=r"^cap = 'big': is not understood; write it like 8"):
        units.parse_bytes("big", "cap")
    with pytest.raises(ValueError, match=r"^timeout = '1e400s': is too large; write it like 60s"):
        units.parse_seconds("1e400s", "timeout")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3.1 * 2**30, "3.1 GiB"),
        (-3.1 * 2**30, "-3.1 GiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_are_printed(size_bytes: float, text: str) -> None:
    assert units.format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (18.2e-6, "18.2 us"),
        (0.298, "298 ms"),
        (2.45, "2.45 s"),
        (90, "90.0 s"),
        (1, "1.00 s"),
        (1e-3, "1.00 ms"),
        (999.9e-6, "1.00 ms"),
        (0.9999, "1.00 s"),
        (99.9, "99.9 s"),
        (99.96, "1.67 min"),
        (62 * 60, "62.0 min"),
        (7.6 * 3600, "7.60 h"),
        (93 * 86400, "93.0 days"),
    ],
)
def test_times_are_printed(time_s: float, text: str) -> None:
    assert units.format_seconds(time_s) == text


@pytest.mark.parametrize(
    ("per_s", "text"),
    [
        (794e12, "794 TFLOP/s"),
        (3.35e12, "3.35 TFLOP/s"),
        (1.9e15, "1.90 PFLOP/s"),
        (0, "0.00 FLOP/s"),
    ],
)
def test_rates_are_decimal(per_s: float, text: str) -> None:
    assert units.format_rate(per_s, "FLOP/s") == text


def test_counts() -> None:
    assert [units.format_count(n) for n in (8192, 124e6, 2.65e9, 1.2e12)] == [
        "8192",
        "124 M",
        "2.65 B",
        "1.20 T",
    ]


@given(st.integers(0, 2**50))
def test_a_size_survives_printing(size_bytes: int) -> None:
    read = units.parse_bytes(units.format_bytes(size_bytes))
    assert read == pytest.approx(size_bytes, rel=0.06)  # one decimal of 1.0 to 1024


@given(st.floats(1e-6, 1e9))
def test_a_time_survives_printing(time_s: float) -> None:
    read = units.parse_seconds(units.format_seconds(time_s))
    assert read == pytest.approx(time_s, rel=0.0051)


@given(st.floats(1e-6, 990), st.floats(1.0, 1000))
def test_printing_keeps_three_digits(time_s: float, scale: float) -> None:
    digits = units.format_seconds(time_s * scale).split()[0].replace(".", "").lstrip("0")
    assert len(digits) <= 3
