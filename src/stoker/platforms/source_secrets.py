"""Secrets in a folder of code, by the names and the contents of its files.

What is packed lies in S3 and on all hosts for as long as the package is kept. The rule finds what
has a special form; a password in a line of code has none.
"""

import re
from collections.abc import Mapping
from fnmatch import translate
from functools import cache
from types import MappingProxyType

# A larger file is data: only its name is looked at.
MAX_SCANNED_BYTES = 1 << 20
# Names of files, in small letters, that hold secrets and nothing else.
_NAMES = (
    ".env",
    ".env.*",
    "*.env",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "*.ppk",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    ".netrc",
    "_netrc",
    ".git-credentials",
    ".pgpass",
    ".htpasswd",
    ".dockercfg",
    "kaggle.json",
    "credentials.json",
    "client_secret*.json",
    "service-account*.json",
    "secrets.yaml",
    "secrets.yml",
    "secrets.json",
    "secrets.toml",
    "*.tfstate",
    "kubeconfig",
)
_PATHS = (".aws/credentials", ".docker/config.json", ".kube/config", ".ssh/*")
# .env.example and such: variables without their values.
_EXAMPLES = ("*.example", "*.sample", "*.template", "*.dist", "*.pub", "known_hosts")
# What a secret is called, and how its text looks.
_CONTENTS: Mapping[str, re.Pattern[bytes]] = MappingProxyType(
    {
        "a private key": re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"),
        "a private key of PuTTY": re.compile(rb"^PuTTY-User-Key-File-\d", re.MULTILINE),
        "a private key of age": re.compile(rb"AGE-SECRET-KEY-1[0-9A-Z]{50}"),
        "a secret key of AWS": re.compile(
            rb"aws_?(?:secret)_?(?:access)?_?key[\"']?\s*[=:]\s*[\"']?"
            rb"(?![A-Za-z0-9/+]*EXAMPLE)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
            re.IGNORECASE,
        ),
        "an access key of AWS": re.compile(rb"\b(?:AKIA|ASIA)(?![0-9A-Z]*EXAMPLE)[0-9A-Z]{16}\b"),
        "a token of GitHub": re.compile(
            rb"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{60}"
        ),
        "a token of GitLab": re.compile(rb"\bglpat-[A-Za-z0-9_-]{20}"),
        "a token of Hugging Face": re.compile(rb"\bhf_[A-Za-z0-9]{34}"),
        "a token of Slack": re.compile(rb"\bxox[abeprs]-[0-9A-Za-z-]{20}"),
        "a webhook of Slack": re.compile(rb"hooks\.slack\.com/services/T\w+/B\w+/\w{20}"),
        "a key of Google": re.compile(rb"\bAIza[0-9A-Za-z_-]{35}\b"),
        "a key of an API": re.compile(rb"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{40}"),
        "a key of Stripe": re.compile(rb"\b[rs]k_live_[0-9A-Za-z]{24}"),
        "a token of PyPI": re.compile(rb"\bpypi-AgE[A-Za-z0-9_-]{50}"),
        "a token of npm": re.compile(rb"\bnpm_[A-Za-z0-9]{36}\b"),
        "a key of Azure": re.compile(rb"AccountKey=[A-Za-z0-9+/]{80}"),
        "a key of Weights & Biases": re.compile(
            rb"WANDB_API_KEY[\"']?\s*[=:]\s*[\"']?[0-9a-f]{40}\b"
        ),
    }
)


def secret_in(name: str, content: bytes) -> str:
    """Returns what a file seems to hold: "by its name", "line 3: a private key"; empty: nothing.

    The secret itself is in no text that this returns.

    Args:
        name: Its path in the folder, with slashes.
        content: All of it.
    """
    if _is_named_secret(name):
        return "by its name"
    if len(content) > MAX_SCANNED_BYTES:
        return ""
    for what, pattern in _CONTENTS.items():
        match = pattern.search(content)
        if match is not None:
            line = content.count(b"\n", 0, match.start()) + 1
            return f"line {line}: {what}"
    return ""


def _is_named_secret(name: str) -> bool:
    parts = name.lower().split("/")
    file_name = parts[-1]
    if _any_of(_EXAMPLES).match(file_name):
        return False
    tail = "/".join(parts[-2:])
    return bool(_any_of(_NAMES).match(file_name) or _any_of(_PATHS).match(tail))


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Returns what matches a name that one of the patterns matches: a folder has many names."""
    return re.compile("|".join(map(translate, patterns)))
