"""Records: typed, versioned documents, the only thing that components pass to each other.

To add a field: a line in the record's class (`records/NAME.py`) with a default, and its text under
Attributes of the class's docstring, where schema and reference read it; then `make docs`. A field
without a default, or with another meaning, is a new version of the record's `schema`.
"""

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from stoker.records.base import Json as Json
from stoker.records.base import Place as Place
from stoker.records.base import Record
from stoker.records.base import close_match as close_match
from stoker.records.base import convert as convert
from stoker.records.base import nearest as nearest
from stoker.records.base import read_json as read_json
from stoker.records.base import read_text as read_text
from stoker.records.base import sha256_of as sha256_of
from stoker.records.base import to_document as to_document
from stoker.records.base import to_json as to_json
from stoker.records.base import write_json as write_json
from stoker.records.base import write_text as write_text
from stoker.records.decision import Action as Action
from stoker.records.decision import Advice as Advice
from stoker.records.decision import Answer as Answer
from stoker.records.decision import Bottleneck as Bottleneck
from stoker.records.decision import Decision as Decision
from stoker.records.decision import Group as Group
from stoker.records.decision import Limit as Limit
from stoker.records.decision import Plan as Plan
from stoker.records.decision import Predicted as Predicted
from stoker.records.decision import Prices as Prices
from stoker.records.decision import Role as Role
from stoker.records.decision import TakenElsewhere as TakenElsewhere
from stoker.records.decision import groups_in_words as groups_in_words
from stoker.records.decision import plan_in_words as plan_in_words
from stoker.records.engine import EngineCommand as EngineCommand
from stoker.records.engine import EngineSettings as EngineSettings
from stoker.records.platforms import PLATFORM_INFOS as PLATFORM_INFOS
from stoker.records.platforms import ControlSettings as ControlSettings
from stoker.records.platforms import KubeflowSettings as KubeflowSettings
from stoker.records.platforms import KubernetesSettings as KubernetesSettings
from stoker.records.platforms import ModelSettings as ModelSettings
from stoker.records.platforms import NodePool as NodePool
from stoker.records.platforms import OnNoCapacity as OnNoCapacity
from stoker.records.platforms import PlatformInfo as PlatformInfo
from stoker.records.platforms import PlatformName as PlatformName
from stoker.records.platforms import PlatformSettings as PlatformSettings
from stoker.records.platforms import PodSettings as PodSettings
from stoker.records.platforms import SageMakerSettings as SageMakerSettings
from stoker.records.platforms import bare_type as bare_type
from stoker.records.profile import Check as Check
from stoker.records.profile import EpochPause as EpochPause
from stoker.records.profile import EpochTimes as EpochTimes
from stoker.records.profile import Fix as Fix
from stoker.records.profile import GpuLoad as GpuLoad
from stoker.records.profile import LoaderRate as LoaderRate
from stoker.records.profile import Observed as Observed
from stoker.records.profile import Profile as Profile
from stoker.records.profile import ProfiledHost as ProfiledHost
from stoker.records.profile import ProfiledLoader as ProfiledLoader
from stoker.records.profile import ProfileState as ProfileState
from stoker.records.profile import Spread as Spread
from stoker.records.profile import StepTerms as StepTerms
from stoker.records.profile import TransformCost as TransformCost
from stoker.records.secrets import SecretSource as SecretSource
from stoker.records.training import Band as Band
from stoker.records.training import Evaluation as Evaluation
from stoker.records.training import Event as Event
from stoker.records.training import GateResult as GateResult
from stoker.records.training import GroupSpending as GroupSpending
from stoker.records.training import Host as Host
from stoker.records.training import HostMemory as HostMemory
from stoker.records.training import Job as Job
from stoker.records.training import Measured as Measured
from stoker.records.training import Performance as Performance
from stoker.records.training import StepCost as StepCost
from stoker.records.training import Training as Training
from stoker.records.workload import Channel as Channel
from stoker.records.workload import Cluster as Cluster
from stoker.records.workload import Constraints as Constraints
from stoker.records.workload import FeedSettings as FeedSettings
from stoker.records.workload import Gate as Gate
from stoker.records.workload import NotifySettings as NotifySettings
from stoker.records.workload import ProfileSettings as ProfileSettings
from stoker.records.workload import Storage as Storage
from stoker.records.workload import TodaysGroup as TodaysGroup
from stoker.records.workload import TrackingSettings as TrackingSettings
from stoker.records.workload import TrainingSize as TrainingSize
from stoker.records.workload import Workload as Workload

# By the names that people type: `stoker schema profile`.
RECORDS: Mapping[str, type[Record]] = MappingProxyType(
    {
        "workload": Workload,
        "profile": Profile,
        "decision": Decision,
        "training": Training,
        "evaluation": Evaluation,
    }
)

_FIELD = re.compile(r"^    (\w+): (.*(?:\n     .*)*)", re.MULTILINE)


def schema_of(kind: type[Record]) -> dict[str, Json]:
    """Returns the JSON Schema of a record, with descriptions from the records' docstrings."""
    schema = msgspec.json.schema(kind)
    for definition in schema["$defs"].values():
        properties = definition["properties"]
        texts = field_texts(definition["description"])
        definition["properties"] = {
            key: {**properties[key], "description": text} for key, text in texts.items()
        }
        purpose = inspect.cleandoc(definition["description"])
        definition["description"] = purpose.partition("\n\nAttributes:")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def field_texts(docstring: str) -> dict[str, str]:
    """Returns the text of each field, in the order of the docstring."""
    fields = _FIELD.findall(inspect.cleandoc(docstring))
    return {name: " ".join(text.split()) for name, text in fields}
