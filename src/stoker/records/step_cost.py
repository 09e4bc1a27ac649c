"""Which words of a training command change what a step costs, and which do not."""

import re
from collections.abc import Iterable, Sequence

# Names of hyperparameters that leave a step as it is; `_` and `-` are one, as are capitals.
SAME_COST = (
    "lr",
    "learning_rate",
    "base_lr",
    "init_lr",
    "max_lr",
    "min_lr",
    "lr_decay",
    "lr_gamma",
    "weight_decay",
    "wd",
    "warmup_steps",
    "warmup_epochs",
    "warmup_ratio",
    "epochs",
    "num_epochs",
    "n_epochs",
    "max_epochs",
    "num_train_epochs",
    "train_epochs",
    "seed",
    "random_seed",
    "run_name",
    "run_id",
    "experiment_name",
)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def is_same_cost(name: str, names: Iterable[str]) -> bool:
    """Whether a hyperparameter is among `names`."""
    return _plain(name) in {_plain(each) for each in names}


def split_command(
    command: Sequence[str], names: Iterable[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns a command without options that do not change a step's cost, and these by name.

    Only options with one value that follow the program, as --lr 0.1 or --lr=0.1, are taken out;
    none where `--` separates words for another program.

    Args:
        names: Options' names, without dashes.
    """
    taken = tuple(names)
    if "--" in command:
        return tuple(command), {}
    kept: list[str] = list(command[:1])
    values: dict[str, str] = {}
    index = 1
    while index < len(command):
        match = _OPTION.fullmatch(command[index])
        index += 1
        name = match[1] if match else ""
        is_long = command[index - 1].startswith("--")
        if match is None or not is_long or not is_same_cost(name, taken) or name in values:
            kept.append(command[index - 1])
        elif match[2] is not None:
            values[name] = match[2]
        elif index < len(command) and _is_value(command[index]):
            values[name] = command[index]
            index += 1
        else:
            kept.append(command[index - 1])
    return tuple(kept), values


def _is_value(word: str) -> bool:
    return not word.startswith("-") or bool(_NUMBER.fullmatch(word))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").lstrip("_")
