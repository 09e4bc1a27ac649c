from stoker.cli.progress import step_line


def test_the_time_stands_at_the_right_and_nothing_is_wider_than_88_columns() -> None:
    text = "keep 1 x local.c1: no plan costs less by more than its own error band, far from it"
    first, second = step_line("decide", text, 1.24).splitlines()
    assert first.startswith("decide     keep 1 x")
    assert first.endswith("    1.2 s")
    assert len(first) == 87
    assert second.startswith(" " * 11)
    assert " ".join(f"{first[:78]} {second}".split()) == f"decide {text}"


def test_without_a_time_the_line_ends_with_its_words() -> None:
    assert step_line("report", "runs/a/report.html", None) == "report     runs/a/report.html"
