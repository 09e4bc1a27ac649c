"""What all samples of a process share: a bad one may leave it changed, which later ones would see.

A script's own way to begin (`np.seterr` in the first sample) is no harm: it is the same in each
worker. What a sample did not take back as it failed is: it makes later samples other ones, on that
worker alone. Its folder, timers and limit of recursion are taken back instead: see `left_behind`.
"""

import locale
import os
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What samples share in a process.

    Attributes:
        settings: By what they are called; none may change.
        variables: Of the environment: modules that are imported may add some.
    """

    settings: Mapping[str, object]
    variables: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> Self:
        """Reads it; takes about 20 us: it is for each batch, not for each sample."""
        usual = torch.empty(0)
        streams = sys.stdout, sys.stderr
        settings: dict[str, object] = {
            "the default dtype": usual.dtype,
            "the default device": usual.device,
            "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "numpy.seterr": np.geterr(),
            # Others are added as modules are imported.
            "warnings as errors": [entry for entry in warnings.filters if entry[0] == "error"],
            "socket.setdefaulttimeout": socket.getdefaulttimeout(),
            "the locale": locale.setlocale(locale.LC_ALL),
            "SIGCHLD": signal.getsignal(signal.SIGCHLD),
            "stdout or stderr": [getattr(stream, "closed", None) for stream in streams],
            "sys.settrace": sys.gettrace(),
            "the user": os.geteuid(),
        }
        return cls(settings, os.environ.copy())

    def changes(self) -> list[str]:
        """Returns what is another one by now, in words."""
        now = type(self).of_this_process()
        changed = [name for name, value in self.settings.items() if now.settings[name] != value]
        if any(now.variables.get(name) != value for name, value in self.variables.items()):
            changed.append("the environment")
        return changed
