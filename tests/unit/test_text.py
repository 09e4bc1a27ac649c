import pytest

from stoker.units import (
    MILLISECONDS,
    apart,
    count,
    digits,
    duration,
    ms,
    percent,
    percentage,
    signed_percent,
    size,
    time_unit,
    usd,
    wrapped,
)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (ms(0.0), "0 ms"),
        (ms(0.000061), "0.0610 ms"),
        (ms(0.99949), "999 ms"),
        (ms(0.9996), "1.00 s"),
        (size(999), "999 B"),
        (size(999_900), "1.00 MB"),
        (size(7e12), "7.00 TB"),
        (duration(59.4), "59 s"),
        (duration(192), "3 min 12 s"),
        (duration(3599.6), "1 h 00 min"),
        (percentage(0.022, places=1), "2.2%"),
        (percentage(-0.08, signed=True), "-8%"),
        (percent(0.645), "64%"),
        (signed_percent(0.0588), "+5.9%"),
        (signed_percent(0.0001), "0%"),
        (digits(9.996, 3), "10.0"),
        (digits(123456.0, 3), "123,456"),
        (digits(0.000812345, 3), "0.000812"),
        (digits(1e-130, 3), "0"),
        (digits(-2.5, 2), "\N{MINUS SIGN}2.5"),
        (usd(12345.678), "$12,345.68"),
        (usd(None), "not known"),
        (MILLISECONDS.tick(1.4, last=True), "1,400 ms"),
        (MILLISECONDS.tick(0.2, last=False), "200"),
        (count(1, "data host"), "one data host"),
        (count(12, "data host"), "12 data hosts"),
        (time_unit([0.062, None]).symbol, "ms"),
        (time_unit([62.0]).symbol, "s"),
    ],
)
def test_figures_keep_what_is_significant_and_are_never_in_powers_of_ten(written, text):
    plain = written.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert plain == text


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (4.0, 3.0, ("4.00", "3.00")),
        (3.00000004, 3.0, ("3.00000004", "3.00000000")),
        (3.0, 3.0, ("3.00", "3.00")),
    ],
)
def test_two_figures_that_differ_are_told_apart(one, other, words):
    assert apart(one, other) == words


def test_lines_of_a_text_are_narrow_and_later_ones_are_indented():
    lines = wrapped("word " * 40, width=40, indent="  ")
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("  word")
    assert all(line.startswith("    word") for line in lines[1:])
