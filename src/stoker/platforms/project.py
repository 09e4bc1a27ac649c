"""What `stoker init` writes for a platform, beside what it knows of the script."""

from dataclasses import dataclass

_KEYS = """\
platform: {platform}
# Where it trains today.
cluster:
  dnn: {{{{instance_type: TYPE, count: {{hosts}}{{processes}}}}}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The files of a project whose jobs run on a platform.

    Attributes:
        workload: Its keys of a workload, for `str.format` with name, cores, hosts and processes;
            words in capital letters are the user's to replace.
        target: Pipeline service that starts its jobs; empty: none.
        compiled: File that a pipeline is compiled into.
        example_files: Files and folders that an example needs with its workload and its script.
        script_files: Those that a project of a script gets: what roles and messages name.
        stokerignore: Text of that file; empty: none is written.
    """

    workload: str
    target: str = ""
    compiled: str = ""
    example_files: tuple[str, ...] = ()
    script_files: tuple[str, ...] = ()
    stokerignore: str = ""


def plain_project(platform: str) -> Project:
    """Returns the project of a platform of which nothing else is known."""
    return Project(workload=_KEYS.format(platform=platform))
