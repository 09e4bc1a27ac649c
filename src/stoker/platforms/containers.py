"""What a job's containers run, checked before anything is billed: an image, and a command in it."""

from collections.abc import Sequence

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec


def check_container(job: JobSpec, entrypoint: Sequence[str], *, platform: str, key: str) -> None:
    """Refuses a job of which no container can run.

    Args:
        entrypoint: In front of the job's command.
        platform: Its name, in errors.
        key: Of its settings in the workload, in errors.

    Raises:
        UsageError: Naming the key of the workload and the reason.
    """
    if not job.image:
        raise UsageError(
            f"the job names no image, and {platform} runs nothing else",
            where=f"job {job.name}, key image",
            fix="build one with make image, push it, and set image to its address",
        )
    if not job.command:
        raise UsageError("no command to run", where=f"job {job.name}, key command")
    if entrypoint[-1] != "--":
        raise UsageError(
            "the command follows the entry point behind --: " + " ".join(entrypoint),
            where=f"key {key}.entrypoint",
            fix="let its last word be --",
        )
