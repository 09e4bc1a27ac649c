"""Written rules on instance types: estimated prices, types that hold no speed, architectures.

| rule | which types | what follows |
| --- | --- | --- |
| estimated price | SageMaker has no listed price, EC2 has one | EC2's times the family's ratio |
| burst types | t2, t3, t3a, t4g and all `-flex` | in no plan, unless they train today |
| arm64 | a `g` after the generation; `-gb` | no other architecture in a job of one image |
"""

import re

from stoker.records.platforms import bare_type, is_arm_type

# SageMaker's price over EC2's. Checked on all 125 types that have both, to 0.4%, on 2026-11-26
# (tests/unit/test_prices.py checks it on the table); p2 and p3 by the prices of 2022.
_RATIOS = (
    (r"g\d\w*\.xlarge", 1.40),
    (r"g\d\w*\..+", 1.25),
    (r"p2\..+|p3\.2xlarge", 1.25),
    (r"p3\.8xlarge", 1.20),
    (r"(p\d|trn\d)[a-z0-9-]*\..+", 1.15),
    (r"[mcrt]\d[a-z0-9-]*\..+", 1.20),
)
# They have a full vCPU for a while: by CPU credits (t), or for most of a day (flex), and a share of
# it for as long as a training run's data hosts are busy. A CoreMark of some minutes does not see
# that.
_BURST = re.compile(r"t\d[a-z]*\.|[a-z]+\d+[a-z]*-flex\.")


def price_ratio(instance_type: str) -> float | None:
    """Returns SageMaker's price over EC2's for a type's family; None: not known."""
    name = bare_type(instance_type)
    ratios = (ratio for pattern, ratio in _RATIOS if re.fullmatch(pattern, name))
    return next(ratios, None)


def is_burst_type(instance_type: str) -> bool:
    """Whether a type's vCPUs hold their full speed for a limited time only."""
    return _BURST.match(bare_type(instance_type)) is not None


def why_barred(instance_type: str) -> str:
    """Returns why no plan proposes the type; empty: plans may."""
    if not is_burst_type(instance_type):
        return ""
    return f"{instance_type} is a burst type: it has its full speed for a limited time"


def architecture_of(instance_type: str) -> str:
    """Returns the architecture that an image for the type needs: `arm64` or `amd64`."""
    if is_arm_type(bare_type(instance_type)):
        return "arm64"
    return "amd64"
