"""What a run says of a profile that was measured earlier."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stoker.records import Decision, Profile, Workload
    from stoker.records.profile_origin import ReusedProfile


def reused_words(
    profile: "Profile", workload: "Workload", *, code_digest: str = ""
) -> "ReusedProfile | None":
    """Returns what a run says of a profile; None: the profile does not say where it is from.

    Args:
        profile: Measured earlier, or by the step before.
        workload: As the run has it.
        code_digest: Digest of a package's code, which this process does not have.
    """
    from stoker.profile.profiled_job import origin_here
    from stoker.records.profile_origin import ProfileOrigin, compared

    then = profile.origin
    if then is None:
        when = profile.what.get("when")
        if not isinstance(when, str) or not when:
            return None
        # An early version wrote the time alone.
        then = ProfileOrigin(measured_at=when)
    today = msgspec.structs.replace(origin_here(workload), code_digest=code_digest)
    return compared(then, today=today, now=datetime.now(UTC))


def with_age(
    decision: "Decision", profile: "Profile", workload: "Workload", *, code_digest: str = ""
) -> "Decision":
    """Returns the decision with the age of its profile, and with what has changed since."""
    reused = reused_words(profile, workload, code_digest=code_digest)
    if reused is None:
        return decision
    warnings = (*decision.warnings, *reused.warnings)
    return msgspec.structs.replace(decision, measured=reused.words, warnings=warnings)
