"""configs/sagemaker as IAM reads it: actions, resources and conditions, with an account's names."""

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "sagemaker"
POLICIES = sorted(p.name for p in FOLDER.glob("*.json") if not p.name.startswith("trust-"))
TRUSTS = sorted(p.name for p in FOLDER.glob("trust-*.json"))
ACCOUNT, REGION = "123456789012", "eu-central-1"


def statements(name: str) -> list[Mapping[str, object]]:
    """The statements of a policy, placeholders and all."""
    document = json.loads((FOLDER / name).read_text())
    assert document["Version"] == "2012-10-17"
    found: list[Mapping[str, object]] = document["Statement"]
    return found


def actions(name: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(Action, its statement) of a policy."""
    for statement in statements(name):
        named = statement["Action"]
        assert isinstance(named, list)
        for action in named:
            yield action, statement


def resources(statement: Mapping[str, object]) -> list[str]:
    """What a statement is about."""
    named = statement["Resource"]
    return [named] if isinstance(named, str) else list(named)  # type: ignore[call-overload]


def is_allowed(
    name: str, action: str, resource: str, *, context: Mapping[str, str] | None = None
) -> bool:
    """Whether a policy allows an action on a resource, as IAM matches both."""
    for allowed, statement in actions(name):
        patterns = [filled(pattern) for pattern in resources(statement)]
        if allowed != action or not any(fnmatch.fnmatchcase(resource, p) for p in patterns):
            continue
        tests = statement.get("Condition", {})
        assert isinstance(tests, dict)
        wanted = [pair for test in tests.values() for pair in test.items()]
        if all(_matches((context or {}).get(key), value) for key, value in wanted):
            return True
    return False


def _matches(given: str | None, wanted: str | list[str]) -> bool:
    patterns = [wanted] if isinstance(wanted, str) else wanted
    return given is not None and any(fnmatch.fnmatchcase(given, filled(p)) for p in patterns)


def filled(pattern: str) -> str:
    """A pattern with an account's own names in place of the placeholders."""
    values = {
        "ACCOUNT": ACCOUNT,
        "REGION": REGION,
        "DATA_BUCKET": "BUCKET",
        "DATA_PREFIX": "mnist",
        "PREFIX": "stoker",
        "NAME": "mnist",
        "REPOSITORY": "stoker",
    }
    names = "|".join(sorted(values, key=len, reverse=True))
    return re.sub(rf"\b({names})\b", lambda found: values[found.group()], pattern)


def s3_arn(uri: str) -> str:
    """The ARN of an s3:// address."""
    return "arn:aws:s3:::" + uri.removeprefix("s3://")
