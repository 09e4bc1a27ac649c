"""The parameters of a pipeline run, for all targets, with defaults and checks.

A pipeline passes each component `--param NAME=VALUE`; the component turns them into overrides of
its workload. A run can change a few keys, and each hyperparameter that is a scalar, under its name
in snake case.
"""

import json
import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from stoker.errors import UsageError
from stoker.records import Json, Workload, nearest
from stoker.records.base import Document
from stoker.records.hyperparameters import values_of

Kind = Literal["string", "integer", "number", "boolean"]
Value = str | int | float | bool

# Prefix of a run's parameters as inputs of the component profile: one for each.
PARAMETER_INPUT = "param_"
# Its input with such values of any workload, as a JSON object.
PARAMETERS_INPUT = "params"

# Most that a run can change, and their length: a step of a pipeline on SageMaker takes 100
# arguments of 256 characters.
_MAX_HYPERPARAMETERS = 60
_MAX_TEXT = 200
_KINDS: dict[type, Kind] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_EXPECTED = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
# Other inputs of a pipeline's steps have these names.
_TAKEN = ("workload", "run_id", "platform", "cache_days", "champion", "control_image", "job_image")
_BOUND = re.compile(
    r"(.*?[^<>\s])\s*(>=|<=)\s*(champion|(?=[-+.\d]))\s*([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter that can be set when a run of a pipeline starts.

    Attributes:
        kind: What the target's console asks for.
        text: What it does, in a sentence, with the meaning of an empty value.
        default: The workload's own value.
        key: Key of the workload that it sets; empty: other code reads it.
        hyperparameter: Name of the hyperparameter that it sets; empty: it sets another key.
    """

    name: str
    kind: Kind = "string"
    text: str
    default: Value = ""
    key: str = ""
    hyperparameter: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        return ("true", "false") if self.kind == "boolean" else ()

    def typed(self, text: str) -> Value:
        """Returns a text as a value of this kind; raises UsageError for another one."""
        word = text.strip()
        try:
            if self.kind == "boolean":
                return {"true": True, "false": False}[word.lower()]
            if self.kind != "string":
                return _number(word, is_whole=self.kind == "integer")
        except (KeyError, ValueError):
            what = f"{self.name}={text}: expected {_EXPECTED[self.kind]}"
            raise UsageError(what, fix=f"{self.name}: {self.text}") from None
        # Consoles of pipelines pass blanks on; in a hyperparameter they may be meant.
        return text if self.hyperparameter else word


def main_channel(workload: Workload) -> str | None:
    """Returns the channel that `input_data` replaces: `train`, `training`, else the first."""
    # The two names that AWS's examples use.
    for name in ("train", "training"):
        if name in workload.channels:
            return name
    return min(workload.channels, default=None)


def parameters_of(workload: Workload) -> tuple[Parameter, ...]:
    """Returns the parameters of `workload`'s runs; input data only with one channel or more."""
    constraints = workload.constraints
    most = constraints.max_usd_per_hour
    fixed = [
        Parameter(
            name="instance_type",
            text="Instance type that trains today; the profile runs on it.",
            default=workload.todays_type,
            key="cluster.dnn.instance_type",
        ),
        Parameter(
            name="max_usd_per_hour",
            text="Limit for the cost of all hosts together, in dollars an hour; empty: no limit.",
            default="" if most is None else f"{most:g}",
            key="constraints.max_usd_per_hour",
        ),
        Parameter(
            name="max_data_hosts",
            kind="integer",
            text="Maximum number of data hosts in a plan; 0: no data group.",
            default=constraints.max_data_hosts,
            key="constraints.max_data_hosts",
        ),
        Parameter(
            name="gate",
            text="What the model must reach, such as accuracy>=0.94, loss<=0.2; empty: no gate.",
            default=_gate_text(workload),
            key="gate",
        ),
        Parameter(
            name="image",
            text="Image that all hosts run.",
            default=workload.image or "",
            key="image",
        ),
        Parameter(
            name="reuse_profile",
            text="Folder with a profile.json to reuse instead of a new profile; empty: profile.",
        ),
    ]
    if channel := main_channel(workload):
        data = Parameter(
            name="input_data",
            text=f"Address of the training data: the uri of the channel {channel}.",
            default=workload.channels[channel].uri,
            key=f"channels.{channel}.uri",
        )
        fixed.insert(0, data)
    if "epochs" not in workload.hyperparameters:
        fixed.append(_hyperparameter("epochs", "epochs", workload.training.epochs or 0))
    names = {*_TAKEN, "input_data", *(each.name for each in fixed)}
    hyperparameters: list[Parameter] = []
    for option, value in values_of(workload.hyperparameters).items():
        # As Kubeflow spells names.
        name = re.sub(r"[^a-z0-9]+", "_", option.lower()).strip("_")
        if name in names or keyword.iskeyword(name) or not name.isidentifier():
            name = f"hyperparameter_{name}"
        # No override reaches a name with a dot.
        is_fit = type(value) in _KINDS and len(str(value)) <= _MAX_TEXT and "." not in option
        if name not in names and is_fit:
            names.add(name)
            hyperparameters.append(_hyperparameter(name, option, cast(Value, value)))
    return (*fixed, *hyperparameters[:_MAX_HYPERPARAMETERS])


def _hyperparameter(name: str, option: str, value: Value) -> Parameter:
    return Parameter(
        name=name,
        kind=_KINDS[type(value)],
        text=f"Hyperparameter {option}, passed to the command.",
        default=value,
        key=f"hyperparameters.{option}",
        hyperparameter=option,
    )


def parameter_named(name: str, *, workload: Workload) -> Parameter | None:
    """Returns a parameter by its name, or by its hyperparameter's as the script spells it."""
    option = name.strip().removeprefix("--")
    parameters = parameters_of(workload)
    spelled = {each.hyperparameter: each for each in parameters}
    return {**spelled, **{each.name: each for each in parameters}}.get(option)


def overrides_of(texts: Sequence[str], *, workload: Workload) -> list[str]:
    """Returns the `key.path=value` overrides for `NAME=VALUE` texts; raises as `run_values`."""
    parameters = {each.name: each for each in parameters_of(workload)}
    overrides: list[str] = []
    for name, value in run_values(texts, workload=workload).items():
        parameter = parameters[name]
        if not parameter.key or value == parameter.default:
            continue
        if parameter.hyperparameter:
            literal = json.dumps(value, ensure_ascii=False)
        elif name == "gate":
            literal = _gates(str(value), workload)
        else:
            literal = str(value) or "null"
        overrides.append(f"{parameter.key}={literal}")
        if parameter.hyperparameter == "epochs":
            # Steps take precedence over epochs (`TrainingSize.total_steps`).
            overrides += [f"training.epochs={value}", "training.steps=null"]
    return overrides


def run_values(
    texts: Sequence[str], *, workload: Workload, declared: Mapping[str, Kind] | None = None
) -> dict[str, Value]:
    """Returns the values of NAME=VALUE texts, of the kinds that a pipeline declares.

    Args:
        texts: With the parameters' names, or as the script spells a hyperparameter.
        workload: The workload whose pipeline it is.
        declared: Names and kinds of an uploaded pipeline's parameters. None: the workload's.

    Raises:
        UsageError: For an unknown name, or a value of another kind.
    """
    if declared is None:
        declared = {each.name: each.kind for each in parameters_of(workload)}
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        parameter = parameter_named(name, workload=workload)
        name = parameter.name if parameter else name.strip()
        if name not in declared:
            fix = f"{nearest(name, sorted(declared))}; a new one: stoker upload"
            raise UsageError(f"the pipeline of {workload.name} has no parameter {name}", fix=fix)
        # Own pipelines have further ones.
        parameter = parameter or Parameter(name=name, kind=declared[name], text="see its pipeline")
        values[name] = parameter.typed(value)
    return values


def _number(word: str, *, is_whole: bool = False) -> float:
    """Returns the number that a word is; raises ValueError if it is none, or not finite."""
    number = float(word)
    if not math.isfinite(number) or (is_whole and not number.is_integer()):
        raise ValueError(word)
    # Services that store all numbers as floats may write 3 as 3.0, and 20000000 as 2.0E7.
    return int(number) if is_whole else number


def _gates(value: str, workload: Workload) -> str:
    """Returns `accuracy>=0.94, loss<=champion+0.1` as YAML; metrics keep their patterns."""
    gates: list[Document] = []
    for text in filter(None, map(str.strip, value.split(","))):
        match = _BOUND.fullmatch(text)
        if match is None:
            raise UsageError(
                f"gate {text} is not METRIC>=BOUND or METRIC<=BOUND",
                fix="for example accuracy>=0.94, or accuracy>=champion-0.005",
            )
        metric, sign, champion, bound = match.groups()
        key = "min" if sign == ">=" else "max"
        gate: dict[str, Json] = {"metric": metric}
        gate[f"{key}_champion" if champion else key] = float(bound or "0")
        if pattern := workload.metric_patterns.get(metric):
            gate["regex"] = pattern
        gates.append(gate)
    # One line: an override is one word of a command line.
    return json.dumps(gates, ensure_ascii=False)


def _gate_text(workload: Workload) -> str:
    """Returns the workload's gate as the parameter `gate` spells it."""
    parts = []
    for gate in workload.gate:
        bounds = [(">=", gate.min, "g"), ("<=", gate.max, "g")]
        bounds += [(">=champion", gate.min_champion, "+g"), ("<=champion", gate.max_champion, "+g")]
        for sign, bound, form in bounds:
            if bound is not None:
                parts.append(f"{gate.metric}{sign}{bound:{form}}")
    return ", ".join(parts)
