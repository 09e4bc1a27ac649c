"""What a profile depends on: the keys of a workload by which a cached one is found again.

Each key of a workload either counts, or leaves a step's cost as it is. A test holds both lists
against the schema: a new key has to be in one of them.
"""

import csv
from collections.abc import Mapping

import msgspec

from stoker.records.base import Document, Json, sha256_of, to_document
from stoker.records.base import mapping as mapping_at
from stoker.records.hyperparameters import values_of
from stoker.records.platforms import PLATFORM_SECTIONS
from stoker.records.profile_origin import undated_value, undated_word
from stoker.records.step_cost import is_same_cost, split_command
from stoker.records.workload import Workload

PARTIAL_SCHEMA = "stoker.profiled/v1"
# By section; "" is the top level. Of a section that is in no list here, all keys are one.
COUNTS: Mapping[str, frozenset[str]] = {
    "": frozenset(
        (
            "name",
            "command",
            "image",
            "platform",
            "cluster",
            "channels",
            "hyperparameters",
            "environment",
            "feed",
            "strategy",
            "engine",
            "profile",
            "not_numbers",
            "options",
        )
    ),
    "sagemaker": frozenset(("source", "entrypoint", "request", "requirements")),
    "kubernetes": frozenset(
        (
            "entrypoint",
            "pools",
            "pools_file",
            "jobset",
            "dnn",
            "data",
            "cpu_limit",
            "shm",
            "gpu_resource",
            "zone",
            "scratch",
            "api",
            "runtime",
        )
    ),
}
# Bounds, gates, names of accounts, waits, reports, secrets' places: a step costs what it did.
SAME: Mapping[str, frozenset[str]] = {
    "": frozenset(
        (
            "schema",
            "constraints",
            "training",
            "gate",
            "tracking",
            "notify",
            "watchdog",
            "on_no_capacity",
            "secrets",
            "skip_unchanged",
        )
    ),
    "sagemaker": frozenset(
        (
            "role",
            "output_uri",
            "region",
            "max_run_seconds",
            "checkpoint_uri",
            "resume_from",
            "control",
            "model",
            "pipeline_role",
            "schedule_role",
            "overlap",
            "cache_days",
            "dead_letter_queue",
            "schedule",
            "elsewhere",
            "further_types",
            "queue",
        )
    ),
    "kubernetes": frozenset(
        (
            "namespace",
            "context",
            "strict_tls",
            "output",
            "champion",
            "image_pull_secrets",
            "run_as",
            "max_restarts",
            "max_fresh_starts",
            "max_run_seconds",
            "kubeflow",
            "follower_lease_minutes",
            "queue_wait_minutes",
            "dead_node",
            "dead_node_minutes",
            "control",
            "memory",
        )
    ),
}
# Of a table of node pools: what pods are made of. Prices and facts for plans are in other columns.
_OF_PODS = ("instance_type", "vcpus", "memory_gib", "gpus", "node_selector", "taints")
# Of a request's patch: who pays, is told and may read is nothing that a step waits for.
_SAME_IN_REQUEST = ("Tags", "StoppingCondition", "RetryStrategy", "OutputDataConfig")


def same_cost_names(workload: Workload) -> tuple[str, ...]:
    """Returns the hyperparameters of the workload that do not change what a step costs."""
    names = workload.profile.free_names
    return tuple(each for each in workload.hyperparameters if is_same_cost(each, names))


def profiled(workload: Workload) -> dict[str, Json]:
    """Returns the part of a workload's document that a profile depends on.

    Names of hyperparameters that do not count are kept, with null for their values: the script may
    need the option. Addresses have `*` for their dates.
    """
    document = to_document(workload)
    counted = _counting(document, "")
    for section in PLATFORM_SECTIONS:
        if section in document:
            counted[section] = _counting(mapping_at(document, section), section)
    request = mapping_at(counted, "sagemaker", "request")
    if request:
        of_cost = {key: each for key, each in request.items() if key not in _SAME_IN_REQUEST}
        counted["sagemaker"] = {**mapping_at(counted, "sagemaker"), "request": of_cost}
    if pools_file := mapping_at(counted, "kubernetes").get("pools_file"):
        rows = _rows_of_pods(str(pools_file))
        counted["kubernetes"] = {**mapping_at(counted, "kubernetes"), "pools_file": rows}
    command, options = split_command(workload.command, workload.profile.free_names)
    # No step can take it for the whole workload.
    counted["schema"] = PARTIAL_SCHEMA
    counted["command"] = [*map(undated_word, command), *sorted(options)]
    free = same_cost_names(workload)
    values = values_of(workload.hyperparameters).items()
    counted["hyperparameters"] = {
        name: None if name in free else undated_value(value) for name, value in values
    }
    for key in ("channels", "environment"):
        counted[key] = undated_value(mapping_at(document, key))
    counted["options"] = {name: option.type for name, option in workload.options.items()}
    return counted


def _rows_of_pods(table: str) -> list[Json]:
    """Returns the rows of a pools file without prices, in the order of their pools."""
    lines = [line for line in table.splitlines() if not line.lstrip().startswith("#")]
    return [*sorted(_cells_of_pods(row) for row in csv.DictReader(lines))]


def _cells_of_pods(row: Mapping[str, str]) -> list[str]:
    return [row.get(column) or "" for column in _OF_PODS]


def _counting(document: Document, section: str) -> dict[str, Json]:
    counted = COUNTS.get(section, document.keys())
    return {key: value for key, value in document.items() if key in counted}


def profile_key(workload: Workload, *, code: str = "") -> str:
    """Returns the digest by which a profile is found again: 16 hexadecimal digits.

    Args:
        code: Digest of the code that counts (`platforms.imported`), in place of the
            address in `sagemaker.source`.
    """
    settings = workload.sagemaker
    if settings is not None and code:
        placed = msgspec.structs.replace(settings, source=code)
        workload = msgspec.structs.replace(workload, sagemaker=placed)
    return sha256_of(profiled(workload))[:16]


def reuse_key(workload: Workload, *, code: str, span: str = "") -> str:
    """Returns the digest by which a run finds a kept profile: 16 hexadecimal digits.

    Args:
        workload: With the values of the run's parameters.
        code: Digest of the code that counts; empty: not known.
        span: Text of the time for which profiles are used; another text finds none.
    """
    depends_on: dict[str, Json] = {
        "profile": profile_key(workload, code=code),
        "code": code,
        "span": span,
    }
    return sha256_of(depends_on)[:16]
