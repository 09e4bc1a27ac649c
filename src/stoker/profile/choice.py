"""Which of a script's loaders is the one that it trains on."""

from weakref import ref

import torch
from torch.utils.data import DataLoader

from stoker.profile.facts import facts_of
from stoker.profile.raw import LoaderFacts
from stoker.profile.steps import AsIsSteps

# A loader that is read where no gradients are wanted is for validation, unless nothing else comes.
MAX_BATCHES_WITHOUT_GRADIENTS = 50


class Choice:
    """The main loader: the first that is read with gradients on; the next one when it is gone.

    Attributes:
        has_changed: A second loader took the place of one that the script only looked at.
    """

    def __init__(self) -> None:
        self.has_changed = False
        self._main: ref[DataLoader[object]] | None = None
        self._facts: LoaderFacts | None = None

    @property
    def loader(self) -> DataLoader[object] | None:
        """The main loader, if there is one and the script still has it."""
        return self._main() if self._main else None

    def is_main(
        self, loader: DataLoader[object], *, delivered: int, steps: AsIsSteps | None
    ) -> bool:
        """Whether `loader` is the main one, or becomes it now.

        Args:
            delivered: Its batches in this pass.
            steps: The main loader's so far.
        """
        main = self.loader
        if main is loader:
            return True
        # A script may look at a batch of any loader before it trains: who delivers more counts.
        was_looked_at = steps is not None and steps.count == 0 and delivered > steps.batches
        trains = torch.is_grad_enabled() or delivered >= MAX_BATCHES_WITHOUT_GRADIENTS
        if not trains or not (main is None or was_looked_at):
            return False
        # Scripts that make a new loader for each epoch go on; another loader begins anew.
        facts = facts_of(loader)
        is_other = self._facts not in (None, facts) and steps is not None and steps.count == 0
        self.has_changed = was_looked_at or is_other
        self._facts = facts
        self._main = ref(loader)
        return True
