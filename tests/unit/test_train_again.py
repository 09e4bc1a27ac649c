"""How a command that was stopped is typed again."""

import pytest

from stoker.cli.train import command_line


@pytest.mark.parametrize(
    ("arguments", "from_step", "expected"),
    [
        (["train", "--", "python", "my script.py"], None, "stoker train -- python 'my script.py'"),
        (["run", "w.yaml"], "train", "stoker run w.yaml --from train"),
        (["run", "w.yaml", "--from", "decide"], "train", "stoker run w.yaml --from train"),
        (["run", "--from=decide", "w.yaml"], "train", "stoker run w.yaml --from train"),
    ],
)
def test_the_command_that_goes_on_has_the_words_of_the_first(
    arguments: list[str], from_step: str | None, expected: str
) -> None:
    assert command_line(arguments, from_step=from_step) == expected
