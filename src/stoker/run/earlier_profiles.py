"""Profiles that were measured earlier: found again by `records.profile_key`, and shown."""

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stoker.errors import UsageError
from stoker.parameters import parse
from stoker.pipelines.sagemaker.kept_profiles import find_profile, found_document
from stoker.platforms.aws import Aws
from stoker.platforms.base import Platform
from stoker.platforms.imported import CODE_DIGITS, code_digest, files_of, named_code
from stoker.profile.profiled_job import code_here, origin_here
from stoker.records import Decision, Profile, Workload, read_json, to_json, write_text
from stoker.records.base import sha256_of
from stoker.records.profile_key import reuse_key
from stoker.records.profile_origin import ProfileOrigin, ReusedProfile, compared, digests_of
from stoker.records.workload import refuse_foreign
from stoker.run.outputs import Outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePackage:
    """The code that a pipeline's step on SageMaker has as a package.

    Attributes:
        files: Digest of each file that a step may depend on, by path; {}: too many to name.
        digest: Of all of them; empty: not known.
    """

    files: dict[str, str] = field(default_factory=dict)
    digest: str = ""


def code_package(file: Path | None, workload: Workload) -> CodePackage:
    """Returns what is known of a package's code; raises UsageError for what is no package."""
    if file is None:
        return CodePackage()
    try:
        package = file.read_bytes()
        digest = code_digest(files_of(package), workload.command)
    except (OSError, tarfile.TarError) as err:
        raise UsageError(f"cannot read the code's package: {err}", where=str(file)) from None
    named = digests_of(named_code(package, workload.command))
    return CodePackage(files=named, digest=digest[:CODE_DIGITS])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProfiles:
    """Where a pipeline's runs keep profiles for later runs whose step costs the same.

    Attributes:
        platform: None: nothing is kept.
        key: Key of the profile that this run would measure.
    """

    workload: Workload
    platform: Platform[object] | None = None
    key: str = ""

    def find(self) -> Profile | None:
        """Returns the profile of an earlier run; None without one that can be read."""
        if self.platform is None:
            return None
        record = self.platform.kept_profile(self.workload, self.key)
        try:
            if record:
                return read_json(record, Profile)
            return None
        except UsageError:
            # Of another version.
            return None

    def keep(self, profile: Profile) -> None:
        if self.platform is not None:
            self.platform.keep_profile(self.workload, self.key, to_json(profile))


def kept_profiles(
    workload: Workload, *, platform: Platform[object], span: str | None
) -> KeptProfiles:
    """Returns where the profile of a pipeline's step may be found again.

    Args:
        workload: With the values of the run's parameters.
        platform: Where the profile's job would run.
        span: Text of the time for which a profile may be used again; empty: it never is.
    """
    if not span:
        return KeptProfiles(workload=workload)
    key = reuse_key(workload, code=sha256_of({**code_here(workload)}), span=span)
    return KeptProfiles(workload=workload, platform=platform, key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierProfile:
    """What is used in place of a measurement.

    Attributes:
        profile: None: there is none.
        words: Where it is from, or why there is none.
        is_answer: Whether nothing else is to be done.
        package: The code, where it is not in this folder.
    """

    profile: Profile | None = None
    words: str = ""
    is_answer: bool = False
    package: CodePackage | None = None


def reused_profile(workload: Workload, params: Sequence[str]) -> Profile | None:
    """Returns the profile of the parameter reuse_profile, a text or a file, if it is set."""
    given = parse(params, workload=workload).get("reuse_profile", "")
    if not given:
        return None
    profile = read_json(given, Profile)
    refuse_foreign(
        "profile",
        keys=profile.workload_keys,
        digest=profile.workload_sha256,
        workload=workload,
        where="--param reuse_profile",
        fix="leave it out, or name a profile of this one",
    )
    return profile


def earlier_profile(
    workload: Workload,
    *,
    params: Sequence[str],
    kept: KeptProfiles,
    run: str,
    package: Path | None,
    outputs: Outputs,
) -> EarlierProfile:
    """Returns the profile that is given or kept.

    Args:
        workload: With the values of the run's parameters.
        params: Of them `reuse_profile` gives one.
        kept: Where Kubeflow's steps keep them.
        run: Id of a run on SageMaker that only asks for one; found.json says the answer. Empty: the
            step measures if there is none.
        package: The code's package.
        outputs: Where the answer is written.
    """

    if run:
        return _found_for(workload, run=run, package=package, outputs=outputs)
    if reused := reused_profile(workload, params):
        return EarlierProfile(profile=reused, words="the given one", is_answer=True)
    if reused := kept.find():
        words = "measured before, nothing is run"
        return EarlierProfile(profile=reused, words=words, is_answer=True)
    return EarlierProfile()


def _found_for(
    workload: Workload, *, run: str, package: Path | None, outputs: Outputs
) -> EarlierProfile:
    packed = code_package(package, workload)
    key = reuse_key(workload, code=packed.digest)
    aws = Aws(region=workload.sagemaker_region)
    answer = find_profile(workload, aws=aws, key=key, run=run)
    out = outputs.out or Path("profile.json")
    # The pipeline's condition on SageMaker reads it.
    write_text(out.parent / "found.json", found_document(answer))
    return EarlierProfile(
        profile=answer.profile, words=answer.words, is_answer=True, package=packed
    )


def reused_words(
    profile: Profile, workload: Workload, *, package: CodePackage | None = None
) -> ReusedProfile | None:
    """Returns what a run says of a profile; None: the profile does not say where it is from.

    Args:
        profile: Measured earlier, or by the step before.
        workload: As the run has it.
        package: The code, where it is not in this folder.
    """
    then = profile.origin
    if then is None:
        when = profile.what.get("when")
        if not isinstance(when, str) or not when:
            return None
        # An early version wrote the time alone.
        then = ProfileOrigin(measured_at=when)
    today = origin_here(workload)
    if package is not None:
        today = msgspec.structs.replace(today, code=package.files, code_digest=package.digest)
    return compared(then, today=today, now=datetime.now(UTC))


def with_age(
    decision: Decision,
    profile: Profile,
    workload: Workload,
    *,
    package: CodePackage | None = None,
) -> Decision:
    """Returns the decision with the age of its profile, and with what has changed since.

    Args:
        decision: Made of the profile.
        profile: Measured earlier, or by the step before.
        workload: As the run has it.
        package: The code, where it is not in this folder.
    """
    reused = reused_words(profile, workload, package=package)
    if reused is None:
        return decision
    warnings = (*decision.warnings, *reused.warnings)
    return msgspec.structs.replace(decision, measured=reused.words, warnings=warnings)
