"""Steps that make a job, and what tells the jobs of one run apart: the branch in their names.

A branch is a text (`run.branch("large")`), or a value that is known only when the pipeline runs:
the items of the loops around a step are such values. The driver resolves these only as the whole
value of an input, so each is a separate input, and the verb joins them.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from kfp.dsl.container_component_class import ContainerComponent
from kfp.dsl.for_loop import LoopArgumentVariable
from kfp.dsl.pipeline_channel import PipelineArtifactChannel, PipelineChannel
from kfp.dsl.pipeline_context import Pipeline
from kfp.dsl.pipeline_task import PipelineTask as Task
from kfp.dsl.structures import InputSpec
from kfp.dsl.tasks_group import TasksGroup, TasksGroupType

from stoker.errors import UsageError
from stoker.parameters import (
    BRANCH_INPUT,
    BRANCH_ITEM_INPUT,
    HYPERPARAMETER_INPUT,
    HYPERPARAMETERS_INPUT,
)

_BRANCH = re.compile(r"[a-zA-Z0-9](-?[a-zA-Z0-9])*")
_BODY = "the function that makes the steps"
# kfp's names for the types of inputs; of loops it has Python's names.
_INPUT_TYPES = {str: "String", int: "Integer", float: "Float", bool: "Boolean"}
_TYPE_NAMES = {kind.__name__: name for kind, name in _INPUT_TYPES.items()}


def checked_branch(name: object) -> object:
    """Returns a branch, a text in small letters; raises UsageError if no name can have it."""
    if isinstance(name, PipelineChannel):
        return name
    text = str(name)
    if not _BRANCH.fullmatch(text):
        raise UsageError(
            f"the name of a job cannot contain {text!r}",
            where="run.branch",
            fix="letters, digits and single dashes",
        )
    return text.lower()


class TrainingComponent(ContainerComponent):  # type: ignore[misc]
    """A component whose step makes a job with its own name.

    It has a typed input for each hyperparameter of a mapping, and one for each value in the branch.
    The verb reads them from the step's inputs; the command names none. The compiled component, the
    same for all workloads, has one input `hyperparameters`, a JSON object as text.
    """

    def __call__(
        self,
        *,
        hyperparameters: object = None,
        branch: object = (),
        **inputs: object,
    ) -> Task:
        """Makes the step.

        Args:
            hyperparameters: Values by the names of the workload's parameters; or one text, also of
                the pipeline, that is such a JSON object.
            branch: What tells its job from the run's others: a text, a value, or several.
            inputs: The component's inputs.

        Raises:
            UsageError: If another step of the pipeline makes a job of the same name.
        """
        parts = branch if isinstance(branch, tuple) else (branch,)
        texts = [str(part) for part in parts if part and not isinstance(part, PipelineChannel)]
        items = _values_of(parts)
        named = hyperparameters if isinstance(hyperparameters, Mapping) else {}
        if hyperparameters is not None and hyperparameters is not named:
            inputs[HYPERPARAMETERS_INPUT] = hyperparameters
        given = {f"{HYPERPARAMETER_INPUT}{n}": _typed(v) for n, v in named.items()}
        given |= {f"{BRANCH_ITEM_INPUT}{at}": item for at, item in enumerate(items)}
        further = {name: InputSpec(type=_type_of(value)) for name, value in given.items()}
        spec = dataclasses.replace(
            self.component_spec, inputs={**self.component_spec.inputs, **further}
        )
        if texts:
            given[BRANCH_INPUT] = "-".join(texts)
        task: Task = ContainerComponent(spec, self.pipeline_func)(**inputs, **given)
        _refuse_same_job(task)
        return task


def _values_of(parts: Sequence[object]) -> list[PipelineChannel]:
    """Returns the values in a branch: its own, and the items of the loops around the step."""
    # By name: `==` of two of kfp's values is a condition of a pipeline.
    channels = {part.full_name: part for part in parts if isinstance(part, PipelineChannel)}
    pipeline = Pipeline.get_default_pipeline()
    for group in pipeline.groups if pipeline else ():
        item = getattr(group, "loop_argument", None)
        if isinstance(item, PipelineArtifactChannel) and not channels:
            raise UsageError(
                "the jobs of a loop over artifacts would have one name",
                where=_BODY,
                fix="run.branch(VALUE), with a value of the item",
            )
        if isinstance(item, PipelineChannel) and not isinstance(item, PipelineArtifactChannel):
            channels[item.full_name] = item
    return list(channels.values())


def _typed(value: object) -> object:
    """Returns a value, with its own type where kfp takes another key's type for it."""
    if not isinstance(value, LoopArgumentVariable):
        return value
    items = value.items_or_pipeline_channel
    if not isinstance(items, list):
        return value
    kinds = {type(item[value.subvar_name]) for item in items}
    if kinds == {int, float}:
        kinds = {float}
    kind = kinds.pop() if len(kinds) == 1 else str
    variable = LoopArgumentVariable(value.loop_argument, value.subvar_name)
    variable.channel_type = _INPUT_TYPES.get(kind, "String")
    return variable


def _type_of(value: object) -> str:
    """Returns kfp's name for the type of an input."""
    if isinstance(value, PipelineChannel):
        plain = str(value.channel_type).partition("[")[0]
        return _TYPE_NAMES.get(plain, plain)
    return _INPUT_TYPES[type(value)]


def _refuse_same_job(task: Task) -> None:
    """Raises UsageError if an earlier step that may also run makes a job of the same name."""
    pipeline = Pipeline.get_default_pipeline()
    for name, other in pipeline.tasks.items() if pipeline else ():
        is_same = _job_of(other) == _job_of(task)
        if other is task or not is_same or _are_alternatives(other, task):
            continue
        raise UsageError(
            f"the steps {name} and {task.name} would make one job: both have its name",
            where=_BODY,
            fix="make one of them from run.branch('second'): its job, folder and model have other "
            "names",
        )


def _job_of(task: Task) -> tuple[str, ...]:
    """Returns what a step's job is named by, after the component's name."""
    inputs = task.inputs
    items = sorted(name for name in inputs if name.startswith(BRANCH_ITEM_INPUT))
    named = ("workload", BRANCH_INPUT, *items)
    return (task.component_spec.name, *(str(inputs.get(name, "")) for name in named))


def _are_alternatives(one: Task, other: Task) -> bool:
    """Returns whether a condition runs only one of two steps."""
    paths = zip(_groups_around(one), _groups_around(other), strict=False)
    shared: TasksGroup | None = None
    for left, right in paths:
        if left is not right:
            return shared is not None and shared.group_type == TasksGroupType.CONDITION_BRANCHES
        shared = left
    return False


def _groups_around(task: Task) -> list[TasksGroup]:
    """Returns the groups that a step is in, the outermost first."""

    def upwards() -> Iterator[TasksGroup]:
        group = task.parent_task_group
        while group is not None:
            yield group
            group = group.parent_task_group

    return [*upwards()][::-1]
