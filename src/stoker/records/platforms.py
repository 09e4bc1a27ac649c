"""The facts about platforms that rooms other than `platforms` need, one value for each platform."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

PlatformName = Literal["local", "sagemaker", "kubernetes"]

# SageMaker's prefix of EC2's instance types: wherever a type is named, it may be there or not.
_PREFIX = "ml."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformInfo:
    """The facts about one platform.

    Attributes:
        type_prefix: In front of the names of its instance types.
        is_this_machine: Its hosts are processes of this machine: nothing is billed, prices are
            nominal, a type is made as it is named, and today's cluster need not be named.
        has_node_pools: Its types may be the node pools of a cluster.
        needs_training_enum: Its jobs take only types that its API lists for training.
        max_groups: Instance groups that a job may have; None: no bound.
        payer: Whose prices of AWS's it has: `sagemaker` or `ec2`; empty: none.
        price_list: The words for these prices.
    """

    type_prefix: str = ""
    is_this_machine: bool = False
    has_node_pools: bool = False
    needs_training_enum: bool = False
    max_groups: int | None = None
    payer: str = ""
    price_list: str = ""


PLATFORM_INFOS: Mapping[PlatformName, PlatformInfo] = MappingProxyType(
    {
        "local": PlatformInfo(is_this_machine=True),
        "sagemaker": PlatformInfo(
            type_prefix=_PREFIX,
            needs_training_enum=True,
            max_groups=5,
            payer="sagemaker",
            price_list="AWS price list, SageMaker training",
        ),
        "kubernetes": PlatformInfo(
            has_node_pools=True, payer="ec2", price_list="AWS price list, EC2 Linux"
        ),
    }
)


def bare_type(name: str) -> str:
    """Returns an instance type without the prefix `ml.` that SageMaker puts in front of it."""
    return name.removeprefix(_PREFIX)
