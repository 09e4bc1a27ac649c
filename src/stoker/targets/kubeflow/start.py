"""Starts runs of an uploaded pipeline, with parameters that its version has."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stoker.errors import UsageError
from stoker.parameters import parameters_of, parse
from stoker.records import Json, Workload, nearest
from stoker.settings import workload_from
from stoker.targets.base import Started
from stoker.targets.kubeflow.client import Kubeflow
from stoker.targets.kubeflow.deployed import (
    Version,
    equals,
    run_url,
    uploaded_pipeline,
    version_named,
)
from stoker.targets.kubeflow.spec import Input, inputs_of

# The parameter in which a pipeline holds its workload as JSON.
WORKLOAD = "workload"
_YES, _NO = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run or a schedule is asked for beside its parameters.

    Attributes:
        experiment: Absent: the workload's settings, else one named as the workload.
        service_account: Of the pods; absent: the workload's settings, else Kubeflow's own.
        run_name: Of a run, as the pages show it.
        version: Name or id of a version; absent: the latest (a schedule: at each start).
        catch_up: Whether a schedule makes up for starts that were missed.
        max_concurrency: Runs of a schedule at the same time.
    """

    experiment: str | None = None
    service_account: str | None = None
    run_name: str | None = None
    version: str | None = None
    catch_up: bool = False
    max_concurrency: int = 1

    def account(self, workload: Workload) -> str | None:
        """The service account that is asked for."""
        kubeflow = workload.kubernetes.kubeflow if workload.kubernetes else None
        return self.service_account or (kubeflow.service_account if kubeflow else None)


def start_run(
    kubeflow: Kubeflow, workload: Workload, *, parameters: Sequence[str], options: RunOptions
) -> Started:
    """Starts a run; `parameters` are NAME=VALUE.

    Raises:
        UsageError: If the pipeline is not uploaded, or a parameter is unknown or cannot be.
        PlatformError: If the service refuses.
    """
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    version = version_named(kubeflow, pipeline, options.version)
    values = checked_parameters(version, workload, parameters)
    account = options.account(workload)
    run: dict[str, Json] = {
        "experiment_id": experiment_id(kubeflow, workload, options),
        "display_name": options.run_name or f"{workload.name} {time.strftime('%Y-%m-%d %H:%M:%S')}",
        "pipeline_version_reference": {
            "pipeline_id": pipeline.id,
            "pipeline_version_id": version.id,
        },
        "runtime_config": {"parameters": values},
        **({"service_account": account} if account else {}),
    }
    made = kubeflow.call("run", "create_run", run=run)
    id = str(made.get("run_id", ""))
    return Started(
        run=id,
        id=id,
        url=run_url(kubeflow, id),
        parameters={name: in_text(value) for name, value in values.items()},
        warnings=out_of_date(version, workload),
    )


def experiment_id(kubeflow: Kubeflow, workload: Workload, options: RunOptions) -> str:
    """The id of the experiment that is asked for; it is made where it is not there."""
    settings = workload.kubernetes.kubeflow if workload.kubernetes else None
    name = options.experiment or (settings.experiment if settings else None) or workload.name
    namespace = kubeflow.namespace
    for item in kubeflow.pages(
        "experiment",
        "list_experiments",
        items="experiments",
        namespace=namespace,
        filter=equals("display_name", name),
    ):
        if item.get("display_name") == name:
            if item.get("storage_state") == "ARCHIVED":
                raise UsageError(
                    f"experiment {name} is archived: nothing runs in it",
                    where=kubeflow.connection.place,
                    fix="restore it on its page, or --experiment with another name",
                )
            return str(item.get("experiment_id", ""))
    experiment: dict[str, Json] = {"display_name": name}
    if namespace:
        experiment["namespace"] = namespace
    made = kubeflow.call("experiment", "create_experiment", experiment=experiment)
    return str(made.get("experiment_id", ""))


def out_of_date(version: Version, workload: Workload) -> tuple[str, ...]:
    """A warning where the uploaded version holds another workload than this one."""
    held = inputs_of(version.spec).get(WORKLOAD) if version.spec else None
    if held is None or not isinstance(held.default, str):
        return ()
    try:
        document: Json = json.loads(held.default)
        there = workload_from(document) if isinstance(document, dict) else None
    except ValueError:
        # UsageError is one, too: a workload of another stoker.
        there = None
    is_same = there is not None and _carried(there) == _carried(workload)
    if is_same:
        return ()
    return (
        f"version {version.name} was uploaded with another workload than this file's; it runs as "
        "it was uploaded (stoker upload kubeflow WORKLOAD changes that)",
    )


def checked_parameters(
    version: Version, workload: Workload, texts: Sequence[str]
) -> dict[str, Json]:
    """NAME=VALUE texts as the version's own parameters, each of its kind.

    Raises:
        UsageError: For a name that the version has not (with the nearest one that it has), a value
            that cannot be, or a parameter that has no default and no value.
    """
    there = inputs_of(version.spec) if version.spec else {}
    known = {p.name: p for p in parameters_of(workload)}
    by_camel = {p.camel_name: p.name for p in known.values()}
    values: dict[str, Json] = {}
    for text in texts:
        typed, equals_sign, value = text.partition("=")
        if not equals_sign:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        name = typed.strip()
        name = name if name in there else by_camel.get(name, name)
        if name not in there:
            raise _unknown(name, version, known=known, there=there)
        if name in known:
            value = parse([f"{name}={value}"], workload=workload)[name]
        values[name] = _typed(there[name], value.strip())
    missing = [
        name for name, about in there.items() if not about.is_optional and name not in values
    ]
    if missing:
        raise UsageError(
            f"version {version.name} needs a value for {', '.join(missing)}",
            fix=f"--param {missing[0]}=...     {there[missing[0]].text}".rstrip(),
        )
    return values


def in_text(value: Json) -> str:
    """A parameter's value as people type it."""
    return value if isinstance(value, str) else json.dumps(value)


def _unknown(
    name: str, version: Version, *, known: Mapping[str, object], there: Mapping[str, Input]
) -> UsageError:
    if name in known:
        return UsageError(
            f"version {version.name} has no parameter {name}, the workload has",
            fix="an older stoker or workload uploaded it: stoker upload kubeflow WORKLOAD",
        )
    return UsageError(
        f"version {version.name} has no parameter {name}", fix=nearest(name, sorted(there))
    )


def _carried(workload: Workload) -> Workload:
    """The workload without what a pipeline does not carry."""
    kubernetes = workload.kubernetes
    return msgspec.structs.replace(
        workload,
        platform="local" if workload.platform == "local" else "kubernetes",
        sagemaker=None,
        kubernetes=msgspec.structs.replace(kubernetes, kubeflow=None) if kubernetes else None,
    )


def _typed(about: Input, text: str) -> Json:
    """A value of the kind that the version's parameter has."""
    found: Json
    try:
        match about.kind:
            case "NUMBER_INTEGER":
                found = int(text)
            case "NUMBER_DOUBLE":
                found = float(text)
                if found != found or found in (float("inf"), float("-inf")):
                    raise ValueError
            case "BOOLEAN":
                if text.lower() not in _YES + _NO:
                    raise ValueError
                found = text.lower() in _YES
            case "LIST" | "STRUCT":
                found = json.loads(text)
                if not isinstance(found, list if about.kind == "LIST" else dict):
                    raise ValueError
            case _:
                found = text
    except ValueError:
        raise UsageError(
            f"--param {about.name}={text}: expected {_KINDS.get(about.kind, about.kind)}",
            fix=f"{about.name}: {about.text}" if about.text else "",
        ) from None
    if about.choices and found not in about.choices:
        words = ", ".join(in_text(choice) for choice in about.choices)
        raise UsageError(f"--param {about.name}={text} is not possible", fix=f"use {words}")
    return found


_KINDS = {
    "NUMBER_INTEGER": "a whole number",
    "NUMBER_DOUBLE": "a number",
    "BOOLEAN": "true or false",
    "LIST": "a list in JSON",
    "STRUCT": "an object in JSON",
}

__all__ = [
    "RunOptions",
    "checked_parameters",
    "experiment_id",
    "in_text",
    "out_of_date",
    "start_run",
]
