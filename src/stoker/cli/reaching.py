"""The verbs of pipelines reach their target: flags in, the target out, and flags for words."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import UsageError
from stoker.orchestrators.base import Target
from stoker.orchestrators.named import target_named
from stoker.records import Workload
from stoker.settings import read_workload

if TYPE_CHECKING:
    from stoker.orchestrators.kubeflow.runs import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The place of the target, as far as the command line names it.

    Attributes:
        host, namespace, token_file, ca_file: Of Kubeflow; absent: as the workload says.
        workload_file: Of the verbs that name a run: a workload with the connection's settings.
        overrides: Of that workload.
    """

    host: str | None = None
    namespace: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    workload_file: str | None = None
    overrides: Sequence[str] = ()

    def target(
        self,
        name: str,
        *,
        workload: Workload | None = None,
        run: str = "",
        options: "RunOptions | None" = None,
    ) -> Target:
        """Returns the target of that name.

        Raises:
            UsageError: If there is none, or a flag is not for it.
        """
        if name != "kubeflow":
            typed = [*self._typed(), *(["--workload"] if self.workload_file else [])]
            if typed or options is not None:
                flag = typed[0] if typed else "one of the flags"
                raise UsageError(f"{flag} is for kubeflow", fix=f"leave it out for {name}")
            return target_named(name, workload=workload, run=run)
        from stoker.orchestrators.kubeflow.client import Flags

        if workload is None and self.workload_file:
            workload = read_workload(self.workload_file, overrides=self.overrides)
        flags = Flags(
            host=self.host,
            namespace=self.namespace,
            token_file=self.token_file,
            ca_file=self.ca_file,
        )
        return target_named(name, workload=workload, run=run, flags=flags, options=options)

    def words(self, target: str, *, file: str = "", overrides: Sequence[str] = ()) -> str:
        """Returns the flags that a next command needs to reach the same place, after a blank.

        Args:
            target: Only kubeflow's commands need anything.
            file: Workload whose settings name the place, for commands that name a run.
            overrides: Of that workload.
        """
        if target != "kubeflow":
            return ""
        named = file or self.workload_file
        words = ["--workload", named] if named else []
        for override in (*overrides, *self.overrides):
            words += ["--set", override] if override.startswith("kubernetes.") else []
        return "".join(f" {shlex.quote(word)}" for word in (*words, *self._typed()))

    def _typed(self) -> list[str]:
        pairs = (
            ("--host", self.host),
            ("--namespace", self.namespace),
            ("--token-file", self.token_file),
            ("--ca-file", self.ca_file),
        )
        return [word for flag, value in pairs if value is not None for word in (flag, str(value))]


__all__ = ["Reach"]
