"""One host has a part in a run: here is what all roles need to know of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.feed.wire.crypto import Keys, read_token
from stoker.feed.wire.protocol import PROTOCOL_VERSION, Join
from stoker.launch.membership import new_incarnation
from stoker.launch.supervise import Inbox
from stoker.launch.topology import Topology
from stoker.logs import Log
from stoker.settings import ProcessSettings


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """This host's part of a run.

    Attributes:
        output: Folder for timelines, failures and the record; only dnn hosts have it.
        folder: Where the command runs, with modules that data hosts may need, too; None: here.
        inbox: Where signals and decisions come in.
        keys: Of the run; None where it has one host, or no token.
    """

    settings: ProcessSettings
    topology: Topology
    environ: Mapping[str, str]
    output: Path
    log: Log
    inbox: Inbox
    keys: Keys | None
    folder: Path | None = None

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """Returns where the coordinator listens: name and port."""
        named = self.settings.coordinator
        if not named:
            return self.topology.leader, self.settings.feed.port
        host, colon, port = named.rpartition(":")
        if not colon or not port.isdigit():
            raise UsageError(
                f"expected host:port, found {named}", where="variable STOKER_COORDINATOR"
            )
        return host.strip("[]"), int(port)

    @property
    def listen_address(self) -> str:
        """Returns the interface to listen on: all, or loopback where others are told that."""
        advertised = self.settings.advertise or ""
        return advertised if advertised.startswith("127.") else "*"

    def join(self, *, port: int = 0, batch_port: int = 0, workers: int = 0) -> Join:
        """Returns the message with which this host joins the coordinator."""
        return Join(
            protocol=PROTOCOL_VERSION,
            run_id=self.settings.run_id,
            kind="agent" if self.topology.role == "data" else "follower",
            host=self.topology.host,
            group=self.topology.group.name,
            address=self.settings.advertise or self.topology.host,
            port=port,
            batch_port=batch_port,
            workers=workers,
            incarnation=new_incarnation(),
        )


def keys_of(settings: ProcessSettings, topology: Topology, log: Log) -> Keys | None:
    """Returns the run's keys, where more than one host takes part.

    Raises:
        UsageError: If there is a data group and no token.
    """
    if len(topology.hosts) == 1:
        return None
    if settings.token_file:
        return Keys.from_token(read_token(settings.token_file))
    if topology.data_hosts:
        raise UsageError(
            "a run with a data group needs a token, so that nobody else is let in",
            where="variable STOKER_TOKEN_FILE",
            fix="give all hosts the same file of 64 hexadecimal digits",
        )
    log.event("run_has_no_token", note="a lost host is only noticed by the collective's time-out")
    return None
