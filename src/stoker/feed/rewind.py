"""How the generators of a sampler are put back when a pass is left that drew ahead of the script.

The feed asks a sampler further ahead than torch's loader does. A generator that the script made
would be left elsewhere than with torch, and the next epoch would have another order.
"""

import threading
from collections import deque

import torch

from stoker.feed.snapshots import Parts, Snapshot


class Rewind:
    """The states of a loader's generators after each of the last draws of one pass; 5 kB a draw.

    Args:
        generators: All that the sampler may draw from.
        num_ahead: Batches that torch's loader has drawn ahead of those that the script took.
    """

    def __init__(self, generators: list[torch.Generator], *, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        self._generators = generators
        self._states: deque[tuple[int, list[torch.Tensor]]] = deque()
        self._last = b""
        self._thread = 0
        self._drawn: list[torch.Tensor] = []
        self._put_back = b""

    def __len__(self) -> int:
        return len(self._states)

    def before(self, num_drawn: int) -> None:
        """The sampler is about to be asked, after `num_drawn` draws."""
        states = self._read()
        if _bytes_of(states) != self._last:
            # Others drew: what was before them cannot be put back without undoing theirs.
            self._states.clear()
            self._states.append((num_drawn, states))

    def after(self, num_drawn: int, *, num_taken: int) -> None:
        """The sampler was asked.

        Args:
            num_drawn: How often in this pass; once more than there are batches: it is exhausted.
            num_taken: Batches of the pass that the script took.
        """
        states = self._read()
        self._last = _bytes_of(states)
        self._thread = threading.get_ident()
        self._states.append((num_drawn, states))
        while len(self._states) > 1 and self._states[0][0] < num_taken + self.num_ahead:
            self._states.popleft()

    def forget(self) -> None:
        """Nothing is put back of what was drawn so far."""
        self._states.clear()
        self._last = b""

    def leave(self, num_taken: int) -> None:
        """The pass was left: the generators are as torch's loader leaves them.

        Nothing is changed if somebody else drew since. Takes no lock; may be called twice.
        """
        known = dict(self._states)
        if known and _bytes_of(self._read()) == self._last:
            num_drawn, drawn = self._states[-1]
            states = known.get(min(num_taken + self.num_ahead, num_drawn), drawn)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            self._drawn, self._put_back = drawn, _bytes_of(states)
        self.forget()

    def is_of_this_thread(self) -> bool:
        """Whether it is this thread that draws: then nobody draws now."""
        return self._thread == threading.get_ident()

    def show_drawn(self, parts: Parts, now: Snapshot) -> None:
        """Has `now` say of the generators what they were before they were put back.

        For a state of a pass that was left: it holds how far the sampler was drawn.
        """
        if self._drawn and _bytes_of(self._read()) == self._put_back:
            for name, generator in parts.generators.items():
                for own, state in zip(self._generators, self._drawn, strict=True):
                    if generator is own:
                        now["generators"][name] = state

    def _read(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def generators_of(parts: Parts) -> list[torch.Generator]:
    """Those of the script's that the samplers of a loader may draw from; empty: there is none."""
    found = {
        name: value
        for name, value in parts.generators.items()
        if isinstance(value, torch.Generator) and value.device.type == "cpu"
    }
    of_loader = found.pop("generator", None)
    if not found and of_loader is not None:
        # A sampler of the script's own may have it where it is not seen.
        return [of_loader]
    return list({id(value): value for value in found.values()}.values())


def _bytes_of(states: list[torch.Tensor]) -> bytes:
    # Half of the time of torch.equal, and nothing that a profiler would show.
    return b"".join([state.numpy().tobytes() for state in states])
