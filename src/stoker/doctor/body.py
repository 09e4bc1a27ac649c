"""All checks in order."""

from collections.abc import Iterator, Mapping

from stoker.doctor import host, part
from stoker.doctor.check import Check
from stoker.doctor.cloud import aws_check
from stoker.doctor.peer import peer_check
from stoker.errors import UsageError
from stoker.launch.topology import Topology, from_resourceconfig
from stoker.settings import from_environment


def examine(environ: Mapping[str, str], *, peer: str | None, aws: bool) -> Iterator[Check]:
    """Looks at this host; gives each finding as soon as it is made.

    Args:
        environ: Of this process.
        peer: Another host to reach, as `HOST` or `HOST:PORT`.
        aws: Whether AWS is asked who we are, too.
    """
    yield host.python_check()
    try:
        settings = from_environment(environ)
    except UsageError as err:
        yield Check(name="settings", state="fail", text=f"{err.what} ({err.where})", fix=err.fix)
        settings = from_environment({})
    topology: Topology | None
    role: Check
    try:
        topology = from_resourceconfig(settings.base_dir, environ)
        role = part.role_check(topology)
    except UsageError as err:
        topology = None
        role = Check(name="role", state="fail", text=f"{err.what} ({err.where})", fix=err.fix)
    has_part = topology is not None and len(topology.hosts) > 1
    yield host.torch_check(trains=has_part)
    yield host.vcpus_check()
    yield host.memory_check()
    yield host.shared_memory_check()
    yield host.accelerators_check(environ)
    yield host.clock_check()
    yield role
    yield part.folder_check(settings.base_dir)
    yield part.port_check(part.port_of(settings), settings.token_file)
    if topology is not None:
        yield part.names_check(topology)
        yield part.token_check(topology, settings.token_file)
    if peer:
        yield peer_check(peer, port=settings.feed.port, token_file=settings.token_file)
    if aws:
        yield aws_check()
