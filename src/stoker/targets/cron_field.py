"""One field of a cron expression, in any of its dialects."""

from dataclasses import dataclass
from typing import NoReturn

from stoker.errors import UsageError

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
# A year of days and a leap day: a schedule that is not met in four of them has no next run.
HORIZON_DAYS = 4 * 366


@dataclass(frozen=True, slots=True)
class CronField:
    """What a field may hold.

    Attributes:
        name: As errors call it.
        low: The least number.
        high: The greatest.
        words: Names of the numbers from `low` on.
        special: Letters with a meaning that only the service checks.
        may_ask: Whether `?` is the same as `*`.
        example: Of a whole expression, for errors.
    """

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()
    special: str = ""
    may_ask: bool = False
    example: str = ""

    def values(self, text: str, *, expression: str) -> frozenset[int]:
        """All numbers that the field's text stands for.

        Raises:
            UsageError: Naming the part that cannot be.
        """
        found: set[int] = set()
        for part in text.split(","):
            span, slash, step = part.partition("/")
            if slash and not (step.isascii() and step.isdigit() and int(step) > 0):
                refuse(expression, f"{self.name} {part}: / needs a number behind it", self.example)
            first, dash, last = span.partition("-")
            if span == "*" or (span == "?" and self.may_ask):
                low, high = self.low, self.high
            else:
                low = self._number(first, expression=expression)
                high = self._number(last, expression=expression) if dash else low
                high = self.high if slash and not dash else high
            if low > high:
                refuse(expression, f"{self.name} {part} runs backwards", "as 1,2,5")
            found.update(range(low, high + 1, int(step) if slash else 1))
        return frozenset(found)

    def is_special(self, text: str) -> bool:
        """Whether the text has one of the letters that the service alone checks."""
        return any(letter in text for letter in self.special) and text not in self.words

    def _number(self, text: str, *, expression: str) -> int:
        if text.upper() in self.words:
            return self.low + self.words.index(text.upper())
        if not (text.isascii() and text.isdigit()) or not self.low <= int(text) <= self.high:
            why = f"{self.name} {text} is not from {self.low} to {self.high}"
            refuse(expression, why, self.example)
        return int(text)


def refuse(expression: str, why: str, fix: str) -> NoReturn:
    """Raises the UsageError of an expression that cannot be."""
    raise UsageError(f"--cron '{expression}': {why}", fix=fix)
