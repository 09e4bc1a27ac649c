"""How evenly the ranks are loaded with and without `feed.balance`, or why it deals no samples.

`balance` counts it; rank 0 tells it in a line of the log, and in a file of the run's outputs, from
which `launch.finish` takes it for `training.json`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.logs import EventName, Log
from stoker.records.training import BalancedLoader

FILE = "balance.json"


@dataclass(slots=True, kw_only=True)
class DealtSteps:
    """Steps of a loader whose samples were dealt, and what the ranks had in them.

    Attributes:
        means: Sum over the steps: the mean of all ranks.
        drawn: Sum over the steps: the rank with the most, as the samples were drawn.
        dealt: That, as they were dealt.
        num_too_long: Steps in which one sample costs more than the mean of all ranks.
    """

    num_steps: int = 0
    means: float = 0.0
    drawn: int = 0
    dealt: int = 0
    num_too_long: int = 0

    def add(self, costs: Sequence[int], *, drawn: Sequence[int], dealt: Sequence[int]) -> None:
        """Adds a step.

        Args:
            costs: Of its samples.
            drawn: Sums of the ranks, as the samples were drawn.
            dealt: Sums of the ranks, as they were dealt.
        """
        mean = sum(dealt) / len(dealt)
        self.num_steps += 1
        self.means += mean
        self.drawn += max(drawn)
        self.dealt += max(dealt)
        self.num_too_long += max(costs) > mean

    @property
    def drawn_excess(self) -> float:
        """How much more than the mean the rank with the most had, as the samples were drawn."""
        return max(0.0, self.drawn / self.means - 1) if self.num_steps else 0.0

    @property
    def dealt_excess(self) -> float:
        """How much more than the mean the rank with the most has, as they were dealt."""
        return max(0.0, self.dealt / self.means - 1) if self.num_steps else 0.0

    @property
    def words(self) -> str:
        """What dealing has changed, as a sentence."""
        words = (
            f"in {self.num_steps} steps the rank with the most had {self.drawn_excess:.1%} more "
            f"than the mean of all ranks, by the bytes of its samples, and has "
            f"{self.dealt_excess:.1%} now"
        )
        if not self.num_too_long:
            return words
        return (
            f"{words}; in {self.num_too_long} of them one sample alone is more than that mean: cut "
            "such samples, or make batches larger"
        )


class BalanceFile:
    """The file of a run's outputs with what is told of each loader.

    Args:
        folder: Of the outputs; None: there is no file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder and folder / FILE
        # By number.
        self._loaders: dict[int, BalancedLoader] = {}

    def write(self, number: int, loader: BalancedLoader) -> None:
        """Writes what is told of a loader, and of the others; raises OSError if it cannot."""
        self._loaders[number] = loader
        if self._path is not None:
            temporary = self._path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode([*self._loaders.values()]))
            temporary.replace(self._path)


class BalanceNews:
    """What is told of one loader that `feed.balance` is asked for; each reason and gain once.

    Args:
        log: Of the rank; only rank 0 says something.
        rank: This one.
        number: Of the loader.
        where: The script's line that made it.
        file: Of all loaders.
    """

    def __init__(self, log: Log, *, rank: int, number: int, where: str, file: BalanceFile) -> None:
        self._log = log
        self._is_silent = rank > 0
        self._number = number
        self._file = file
        self._loader = BalancedLoader(loader=where)

    def say_not(self, why: str) -> None:
        """Says once why the loader's samples are not dealt, or are not in an epoch."""
        if self._is_silent or self._loader.why_not:
            return
        self._keep(msgspec.structs.replace(self._loader, why_not=why))
        where = self._loader.loader
        self._log.event(
            EventName.LOADER_NOT_BALANCED,
            text=f"feed.balance: samples of the loader of {where} are not dealt by cost: {why}",
        )

    def tell(self, steps: DealtSteps) -> None:
        """Tells what dealing has changed: in the log once, in the file each time.

        Args:
            steps: All of the run so far; one at least.
        """
        before = self._loader
        if self._is_silent or before.steps == steps.num_steps:
            return
        loader = msgspec.structs.replace(
            before,
            steps=steps.num_steps,
            drawn_excess=round(steps.drawn_excess, 6),
            dealt_excess=round(steps.dealt_excess, 6),
            too_long_steps=steps.num_too_long,
        )
        self._keep(loader)
        if not before.steps:
            text = f"feed.balance: of the loader of {before.loader}, {steps.words}"
            self._log.event(EventName.RANKS_BALANCED, text=text)

    def _keep(self, loader: BalancedLoader) -> None:
        self._loader = loader
        try:
            self._file.write(self._number, loader)
        except OSError as err:
            text = f"the figures of balanced ranks cannot be kept: {err}"
            self._log.event(EventName.FEED_WRITE_FAILED, text=text)


def read_balance(folder: Path) -> tuple[BalancedLoader, ...]:
    """Returns what rank 0 told in a run's outputs; empty: nothing, or a broken file."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((folder / FILE).read_bytes(), type=tuple[BalancedLoader, ...])
    return ()
