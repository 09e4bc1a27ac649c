"""The parameters of a pipeline run, for all targets, with defaults and checks.

A pipeline passes each component `--param NAME=VALUE`; the component turns them into overrides of
its workload. Names are in snake case. Pipelines that earlier versions uploaded to SageMaker have
them in camel case (`MaxUsdPerHour`), which is understood wherever a name is read: `spelt_as`.
"""

import json
import keyword
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import yaml

from stoker.errors import UsageError
from stoker.records import Json, ModelSettings, Workload, nearest
from stoker.records.base import Document
from stoker.records.hyperparameters import OptionType, ScriptOption, argument, values_of

Kind = Literal["string", "integer", "number", "boolean"]

# Prefix of hyperparameters that are inputs of a step: components have inputs and outputs with other
# meanings, such as model.
HYPERPARAMETER_INPUT = "hyperparameter_"
# The input of compiled components with such values of any workload, as a JSON object.
HYPERPARAMETERS_INPUT = "hyperparameters"
# Inputs that name one of a run's training jobs: its branch, and the items of the loops around it.
BRANCH_INPUT = "branch"
BRANCH_ITEM_INPUT = "branch_item_"

_KINDS: Mapping[OptionType, Kind] = {
    "int": "integer",
    "float": "number",
    "flag": "boolean",
    "switch": "boolean",
    "bool": "boolean",
}

# Most that a run can change, and their length: a step of a pipeline on SageMaker takes 100
# arguments of 256 characters.
MAX_HYPERPARAMETERS = 60
_MAX_TEXT = 200
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_CHANGEABLE = re.compile(r"[A-Za-z0-9_-]+")
# Other inputs of a pipeline's steps have these names.
_TAKEN = re.compile(
    r"(?!hyperparameter_)(workload|run_id|platform|cache_days|champion|control_image"
    r"|job_image|input_data|pools_file|memory|channels|comparison)"
)


# Returns `key.path=value` of a value.
Overrides = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter that can be set when a run of a pipeline starts.

    Attributes:
        kind: What the target's console asks for.
        text: What it does, in a sentence, with the meaning of an empty value.
        overrides: Returns `key.path=value` of a value; () where other code reads it.
        hyperparameter: Name of the hyperparameter that it sets; empty: it sets another key.
        optional: Of a hyperparameter without a value: kind of the value that a run may give it.
            Empty leaves it out of the command.
    """

    name: str
    kind: Kind = "string"
    text: str
    default: Callable[[Workload], str | int | float]
    overrides: Overrides
    choices: tuple[str, ...] = ()
    hyperparameter: str = ""
    optional: Kind | None = None

    def check(self, value: str | int | float) -> str:
        """Returns the value as components get it; raises UsageError for a wrong one."""
        text = str(value)
        kind = self.optional or self.kind
        if kind != "string" or not self.hyperparameter:
            # Consoles of pipelines pass blanks on; in a hyperparameter they may be meant.
            text = text.strip()
        if self.optional and not text:
            return ""
        if "true" in self.choices:
            text = truth_value(text)
        if self.choices and not _is_one_of(text, self.choices):
            raise UsageError(
                f"{self.name}={text} is not possible", fix="use " + ", ".join(self.choices)
            )
        explained = f"{self.name}: {self.text}"
        if kind == "integer":
            text = self._whole(text, explained)
        if kind == "number" and not is_number(text):
            raise UsageError(f"{self.name}={text}: expected a number", fix=explained)
        if self.hyperparameter and not _is_one_line(text):
            raise UsageError(
                f"{self.name}: its value has several lines",
                fix="set it in the workload, and upload that",
            )
        return text

    def _whole(self, text: str, explained: str) -> str:
        """Returns a whole number as a component gets it, or raises UsageError."""
        number = whole_number(text)
        if number is None:
            if self.hyperparameter and is_number(text):
                explained = (
                    f"the workload has a whole number: write 0.0 there, for 0, or options: "
                    f"{{{self.hyperparameter}: {{type: float}}}}, and upload it"
                )
            raise UsageError(f"{self.name}={text}: expected a whole number", fix=explained)
        if text.startswith("-") and not self.hyperparameter:
            raise UsageError(
                f"{self.name}={text}: a negative number is not possible", fix=explained
            )
        return number


def spelt_as(name: str, names: Iterable[str]) -> str:
    """Returns the one of `names` that is this parameter's, in snake or camel case; else `name`."""
    listed = list(names)
    if name in listed:
        return name
    camel_name = _camel(name)
    return next((other for other in listed if _camel(other) == camel_name), name)


def _camel(name: str) -> str:
    """Returns a parameter's name as earlier versions gave it to SageMaker, from either spelling."""
    if name[:1].isupper():
        return name
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def parameters_of(workload: Workload) -> tuple[Parameter, ...]:
    """Returns the parameters of `workload`'s runs; input data only with one channel or more."""
    parameters: list[Parameter] = []
    if channel := main_channel(workload):
        parameters.append(_input_data(channel))
    for parameter in _PARAMETERS:
        if parameter.name == "epochs":
            parameter = _epochs_of(workload)
        elif parameter.name == "gate":
            parameter = _gate_of(workload)
        parameters.append(parameter)
    if workload.skip_unchanged:
        parameters.append(_SKIP)
    if workload.platform_info.has_node_pools:
        parameters.append(_POOLS)
    return (*parameters, *_hyperparameters(workload))


def main_channel(workload: Workload) -> str | None:
    """Returns the channel that `input_data` replaces: `train`, `training`, else the first."""
    # The two names that AWS's examples use.
    for name in ("train", "training"):
        if name in workload.channels:
            return name
    return min(workload.channels, default=None)


def parse(texts: Sequence[str], *, workload: Workload) -> dict[str, str]:
    """Parses and checks `NAME=VALUE` texts, each parameter at most once.

    Names are in snake or camel case, or as the script spells a hyperparameter.
    """
    checked: dict[str, str] = {}
    spelt: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        parameter = parameter_named(name, workload=workload)
        if parameter is None:
            names = [declared.name for declared in parameters_of(workload)]
            raise UsageError(
                f"a run of {workload.name} has no parameter {name}", fix=nearest(name, names)
            )
        checked[parameter.name] = parameter.check(value)
        spelt.append((parameter.name, text))
    refuse_doubles(spelt)
    return checked


def parameter_named(name: str, *, workload: Workload) -> Parameter | None:
    """Returns a parameter by its name in snake or camel case, or by its hyperparameter's."""
    parameters = parameters_of(workload)
    typed = name.strip()
    by_name = {parameter.name: parameter for parameter in parameters}
    # As on the script's command line; of `gate` and a hyperparameter gate, the parameter counts.
    by_option = {p.hyperparameter: p for p in parameters if p.hyperparameter}
    option = typed.removeprefix("--")
    return (
        by_name.get(spelt_as(typed, by_name))
        or by_option.get(option)
        or by_name.get(spelt_as(option, by_name))
    )


def refuse_doubles(spelt: Sequence[tuple[str, str]]) -> None:
    """Raises UsageError if two NAME=VALUE texts set one parameter.

    Args:
        spelt: Each text after the name of its parameter.
    """
    earlier: dict[str, str] = {}
    for name, text in spelt:
        if name in earlier:
            raise UsageError(
                f"{name} is given twice: {earlier[name]} and {text}",
                where="--param",
                fix="leave one of them out",
            )
        earlier[name] = text


def overrides_of(texts: Sequence[str], *, workload: Workload) -> list[str]:
    """Returns the `key.path=value` overrides for `NAME=VALUE` texts; raises as `parse`."""
    values = parse(texts, workload=workload)
    parameters = {p.name: p for p in parameters_of(workload)}
    overrides: list[str] = []
    for name, value in values.items():
        overrides += parameters[name].overrides(value)
    return overrides


def whole_number(text: str) -> str | None:
    """Returns a whole number without leading zeros (YAML's octals); None for another text.

    Services that store all numbers as floats may write 3 as 3.0, and 20000000 as 2.0E7.
    """
    if _WHOLE.fullmatch(text):
        return str(int(text))
    value = float(text) if is_number(text) else 0.5
    # Larger floats are not exact.
    if value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return None


def truth_value(text: str) -> str:
    """Returns `true` or `false` for their spellings in JSON, in Python and as a number."""
    return {"1": "true", "0": "false"}.get(whole_number(text) or "", text.lower())


def is_number(text: str) -> bool:
    try:
        # float() also takes 1_000 and digits of other scripts.
        return text.isascii() and "_" not in text and math.isfinite(float(text))
    except ValueError:
        return False


def _hyperparameters(workload: Workload) -> list[Parameter]:
    """Returns a parameter for each hyperparameter that a run can change, typed by its value.

    They have the workload's order.

    A run cannot change hyperparameters without a value, with a long text, a list, a mapping, NaN,
    an infinity, a whole number beyond 18 digits, or with characters other than letters, digits, -
    and _ in the name. `epochs` is among the fixed parameters.
    """
    # In camel case, in which a name may be given too, beta_1 and beta1 are one.
    names = {_camel(fixed.name) for fixed in (*_PARAMETERS, _SKIP)}
    values = {
        name: value
        for name, value in values_of(workload.hyperparameters).items()
        if _is_changeable(name) and _can_change(value, workload.options.get(name))
    }
    parameters = {}
    # Of lr and LR, lr gets the name.
    declared = sorted(
        [*values][:MAX_HYPERPARAMETERS],
        key=lambda spelling: (_snake(spelling) != spelling, spelling),
    )
    for hyperparameter in declared:
        name = _snake(hyperparameter)
        # The name of another parameter, or no identifier of Python and the services.
        while (
            _camel(name) in names
            or _TAKEN.fullmatch(name)
            or not name.isidentifier()
            or keyword.iskeyword(name)
        ):
            name = f"hyperparameter_{name}"
        names.add(_camel(name))
        parameters[hyperparameter] = _hyperparameter(
            name,
            hyperparameter,
            values[hyperparameter],
            option=workload.options.get(hyperparameter),
        )
    return [parameters[name] for name in values if name in parameters]


def _is_changeable(name: str) -> bool:
    return name != "epochs" and bool(_CHANGEABLE.fullmatch(name))


def _fits(value: str | float) -> bool:
    """Whether a parameter of a pipeline can have the value."""
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT and _is_one_line(value)
    # Pipelines are JSON, which has no NaN; services store whole numbers in 64 bits.
    if isinstance(value, int):
        return abs(value) < 10**18
    return math.isfinite(value)


def _is_one_line(text: str) -> bool:
    return text.splitlines() in ([], [text])


def _snake(name: str) -> str:
    # As Kubeflow spells names.
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _can_change(value: Json, option: ScriptOption | None) -> bool:
    """Whether a run can change a hyperparameter with this value."""
    if option is not None and (value is None or option.type == "words"):
        return _fits(_words_in(value))
    return isinstance(value, str | int | float) and _fits(value)


def _words_in(value: Json) -> str:
    """Returns the value of an option of several words as a text."""
    if isinstance(value, list | tuple):
        return shlex.join(argument(word) for word in value)
    return argument(value)


def _hyperparameter(
    name: str, hyperparameter: str, value: Json, *, option: ScriptOption | None
) -> Parameter:
    """Returns the parameter of a hyperparameter.

    Args:
        name: Name of the parameter.
        hyperparameter: As the script spells it.
        value: The workload's, of which `_can_change` is true.
        option: What the script says about it.
    """
    kinds: dict[type, Kind] = {bool: "boolean", int: "integer", float: "number", str: "string"}
    is_words = option is not None and option.type == "words"
    default: str | int | float = ""
    if isinstance(value, str | int | float) and not is_words:
        default = value
    elif is_words:
        default = _words_in(value)
    kind = kinds[type(default)]
    if option and option.type == "float" and kind == "integer":
        default = float(default)
        kind = "number"
    meant = _KINDS.get(option.type, "string") if option and value is None else None
    choices: tuple[str, ...] = ("true", "false") if "boolean" in (kind, meant) else ()
    if option and option.choices is not None:
        choices = tuple(argument(choice) for choice in option.choices)
    text = f"Hyperparameter {hyperparameter}, passed to the command."
    if option and (words := option.help.split()):
        text = " ".join(words)
    if meant:
        text = f"{text.rstrip('.;')}; empty: not passed."
    return Parameter(
        name=name,
        kind=kind,
        text=text,
        default=lambda workload: default,
        overrides=lambda told: _override_of(hyperparameter, meant or kind, told, meant is not None),
        choices=choices,
        hyperparameter=hyperparameter,
        optional=meant,
    )


def _override_of(name: str, kind: Kind, text: str, may_be_left_out: bool) -> tuple[str, ...]:
    if may_be_left_out and not text:
        return ()
    return (f"hyperparameters.{name}={_in_yaml(kind, text)}",)


def _is_one_of(text: str, choices: Sequence[str]) -> bool:
    """Whether a text is a choice, also spelt as another number: 0.10 for 0.1."""
    if text in choices:
        return True
    return is_number(text) and any(
        is_number(choice) and float(choice) == float(text) for choice in choices
    )


def _in_yaml(kind: Kind, text: str) -> str:
    """Returns a checked value, spelt so that YAML reads it as its kind."""
    if kind == "number":
        literal = repr(float(text))
        # In YAML a number with an exponent has a point.
        if "." in literal:
            return literal
        return literal.replace("e", ".0e")
    if kind in ("boolean", "integer"):
        return text
    return _quoted(text)


def _input_data(channel: str) -> Parameter:
    return Parameter(
        name="input_data",
        text=f"Address of the training data: the uri of the channel {channel}.",
        default=lambda workload: workload.channels[channel].uri,
        overrides=_set(f"channels.{channel}.uri"),
    )


def _set(key: str, *, empty: Json = None) -> Overrides:
    """Sets `key` to the value, quoted; for an empty value, to `empty`."""
    return lambda value: (f"{key}={_quoted(value) if value else json.dumps(empty)}",)


def _set_unless(empty: str, key: str) -> Overrides:
    """Sets `key` to the value, quoted, unless it is `empty`, a shared component's default."""
    return lambda value: () if value == empty else (f"{key}={_quoted(value)}",)


def _quoted(text: str) -> str:
    """Quotes any text for YAML, with 8-digit escapes: YAML has no surrogate pairs."""
    words = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08X}" for c in text)
    return '"' + "".join(words) + '"'


def _number(key: str) -> Overrides:
    # Not quoted, so that YAML reads a number.
    return lambda value: (f"{key}={value or 'null'}",)


def _types(value: str) -> tuple[str, ...]:
    names = ", ".join(map(_quoted, value.replace(",", " ").split()))
    if names:
        return (f"constraints.allowed_instance_types=[{names}]",)
    return ("constraints.allowed_instance_types=null",)


def _epochs(value: str) -> tuple[str, ...]:
    if value == "0":
        return ()
    # Steps take precedence over epochs (`TrainingSize.total_steps`).
    return (f"training.epochs={value}", "training.steps=null", f"hyperparameters.epochs={value}")


def _epochs_of(workload: Workload) -> Parameter:
    """Returns the parameter with the workload's epochs, which as they are change nothing."""
    default_epochs = str(_own_epochs(workload))
    (epochs,) = (each for each in _PARAMETERS if each.name == "epochs")
    return replace(
        epochs,
        default=_own_epochs,
        overrides=lambda value: () if value == default_epochs else _epochs(value),
    )


def _own_epochs(workload: Workload) -> int:
    """Returns the epochs that the workload names; 0: it names none."""
    epochs = workload.hyperparameters.get("epochs")
    is_whole = isinstance(epochs, int) and not isinstance(epochs, bool) and 0 < epochs < 10**18
    if is_whole:
        return int(str(epochs))
    if "epochs" in workload.hyperparameters:
        return 0
    return workload.training.epochs or 0


def _gate_of(workload: Workload) -> Parameter:
    """Returns the parameter of the gates, whose metrics keep the workload's patterns."""
    (gate,) = (each for each in _PARAMETERS if each.name == "gate")
    return replace(gate, overrides=lambda value: _gate(value, patterns=workload.metric_patterns))


def _gate(value: str, *, patterns: Mapping[str, str] = MappingProxyType({})) -> tuple[str, ...]:
    """Returns the override for `accuracy>=0.94, loss<=0.2`."""
    gates: list[Document] = []
    for text in filter(None, (part.strip() for part in value.split(","))):
        sign = next((sign for sign in (">=", "<=") if sign in text), None)
        metric, _, bound = text.partition(sign or ">=")
        bound = bound.replace(" ", "")
        key = "min" if sign == ">=" else "max"
        if bound.startswith("champion"):
            key = f"{key}_champion"
            bound = bound.removeprefix("champion") or "0"
        try:
            number = float(bound)
        except ValueError:
            sign = None
        if sign is None or not metric.strip():
            raise UsageError(
                f"gate {text} is not METRIC>=BOUND or METRIC<=BOUND",
                fix="for example accuracy>=0.94, or accuracy>=champion-0.005",
            )
        gate: dict[str, Json] = {"metric": metric.strip(), key: number}
        if metric.strip() in patterns:
            gate["regex"] = patterns[metric.strip()]
        gates.append(gate)
    # One line: an override is one word of a command line.
    return (f"gate={yaml.safe_dump(gates, default_flow_style=True, width=4096).strip()}",)


def gate_text(workload: Workload) -> str:
    """Returns the workload's gate as the parameter `gate` spells it."""
    parts = []
    for gate in workload.gate:
        if gate.min is not None:
            parts.append(f"{gate.metric}>={gate.min:g}")
        if gate.max is not None:
            parts.append(f"{gate.metric}<={gate.max:g}")
        for sign, change in ((">=", gate.min_champion), ("<=", gate.max_champion)):
            if change is not None:
                parts.append(f"{gate.metric}{sign}champion{change:+g}")
    return ", ".join(parts)


def _replaced(workload: Workload) -> str:
    replaced = workload.feed.replace_dataloader
    if isinstance(replaced, str):
        return replaced
    if replaced:
        return "true"
    return "false"


def _limit_text(usd: float | None) -> str:
    if usd is None:
        return ""
    return f"{usd:g}"


_PARAMETERS = (
    Parameter(
        name="instance_type",
        text="Instance type that trains today; the profile runs on it.",
        default=lambda workload: workload.todays_type,
        overrides=_set_unless("", "cluster.dnn.instance_type"),
    ),
    Parameter(
        name="instance_count",
        kind="integer",
        text="Hosts that train today.",
        default=lambda workload: workload.num_todays_hosts,
        overrides=lambda value: () if value in ("", "0") else (f"cluster.dnn.count={value}",),
    ),
    Parameter(
        name="objective",
        text="What ranks the plans: cost or time.",
        default=lambda workload: workload.constraints.objective,
        overrides=_set("constraints.objective"),
        choices=("cost", "time"),
    ),
    Parameter(
        name="max_usd_per_hour",
        text="Limit for the cost of all hosts together, in dollars an hour; empty: no limit.",
        default=lambda workload: _limit_text(workload.constraints.max_usd_per_hour),
        overrides=_number("constraints.max_usd_per_hour"),
    ),
    Parameter(
        name="max_usd",
        text="Limit for the cost of the run, in dollars, at which it is ended; empty: no limit.",
        default=lambda workload: _limit_text(workload.constraints.max_usd),
        overrides=_number("constraints.max_usd"),
    ),
    Parameter(
        name="max_data_hosts",
        kind="integer",
        text="Maximum number of data hosts in a plan; 0: no data group.",
        default=lambda workload: workload.constraints.max_data_hosts,
        overrides=_number("constraints.max_data_hosts"),
    ),
    Parameter(
        name="allowed_types",
        text="Comma-separated instance types that a plan may have; empty: the catalog's.",
        default=lambda w: ", ".join(w.constraints.allowed_instance_types or ()),
        overrides=_types,
    ),
    Parameter(
        name="replace_dataloader",
        text="Whether plain torch.utils.data.DataLoader objects are served too; auto: unless the "
        "script imports stoker's.",
        default=_replaced,
        overrides=lambda value: (f"feed.replace_dataloader={value}",),
        choices=("auto", "true", "false"),
    ),
    Parameter(
        name="epochs",
        kind="integer",
        text="Epochs of the training, passed to the command as --epochs; 0 or the workload's: as "
        "the workload says.",
        default=lambda workload: 0,
        overrides=_epochs,
    ),
    Parameter(
        name="gate",
        text="What the model must reach, such as accuracy>=0.94, loss<=0.2; empty: no gate.",
        default=gate_text,
        overrides=_gate,
    ),
    Parameter(
        name="image",
        text="Image that all hosts run.",
        default=lambda workload: workload.image or "",
        overrides=_set("image"),
    ),
    Parameter(
        name="model_group",
        text="Model package group in which a model that passed is registered.",
        default=lambda w: (w.sagemaker and w.sagemaker.model.group) or w.name,
        # The registration reads it from the pipeline's parameters.
        overrides=lambda value: (),
    ),
    Parameter(
        name="approval",
        text="Approval status with which it is registered.",
        default=lambda w: (w.sagemaker.model if w.sagemaker else ModelSettings()).approval,
        overrides=lambda value: (),
        choices=get_args(ModelSettings.__annotations__["approval"]),
    ),
    Parameter(
        name="reuse_profile",
        text="Folder with a profile.json to reuse instead of a new profile; empty: profile.",
        default=lambda workload: "",
        overrides=lambda value: (),
    ),
)

# Of a workload that asks for it.
_SKIP = Parameter(
    name="skip_unchanged",
    text="Whether a run ends at once if nothing has changed since the last one that passed.",
    default=lambda workload: "true",
    overrides=lambda value: (f"skip_unchanged={value}",),
    choices=("true", "false"),
)
_POOLS = Parameter(
    name="pools_file",
    text="Text of the CSV file of node pools with prices; empty: the pools in the workload.",
    default=lambda workload: "",
    overrides=_set_unless("", "kubernetes.pools_file"),
)
