"""Figures become words, as a terminal shows them."""

import pytest

from stoker.text import apart, duration, ms, percentage, size, wrapped


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 ms"),
        (0.000061, "0.0610 ms"),
        (0.005, "5.00 ms"),
        (0.0618, "61.8 ms"),
        (0.25, "250 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (1.24, "1.24 s"),
        (123.4, "123 s"),
    ],
)
def test_a_time_has_three_digits_and_its_unit(seconds, words):
    assert ms(seconds) == words


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (4.0, 3.0, ("4.00", "3.00")),
        (3.004, 3.0, ("3.004", "3.000")),
        (3.00000004, 3.0, ("3.00000004", "3.00000000")),
        (3.0, 3.0, ("3.00", "3.00")),
    ],
)
def test_two_figures_that_differ_are_told_apart(one, other, words):
    assert apart(one, other) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (900_000, "900 kB"),
        (999_900, "1.00 MB"),
        (4_050_000, "4.05 MB"),
        (2.5e9, "2.50 GB"),
        (7e12, "7.00 TB"),
    ],
)
def test_bytes_have_three_digits_and_the_largest_unit_that_fits(num_bytes, words):
    assert size(num_bytes) == words


def test_lines_of_a_text_are_narrow_and_later_ones_are_indented():
    lines = wrapped("word " * 40, width=40, indent="  ")
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("  word")
    assert all(line.startswith("    word") for line in lines[1:])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (192, "3 min 12 s"),
        (3599.6, "1 h 00 min"),
        (3790, "1 h 03 min"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, words):
    assert duration(seconds) == words


def test_a_percentage_has_no_blank_on_a_terminal_and_a_sign_only_for_a_change():
    assert (percentage(0.635), percentage(0.022, places=1)) == ("64%", "2.2%")
    assert (percentage(0.2, signed=True), percentage(-0.08, signed=True)) == ("+20%", "-8%")
