"""Names of a run's objects and hosts, within Kubernetes' limits, and the labels they carry."""

import hashlib
import re

# A pod is called NAME-JOB-0-INDEX-xxxxx, in 63 characters: with room for a job's name of 9
# characters and 100000 hosts this is what is left.
MAX_NAME = 40
_DIGEST = 8

DNS_LABEL = re.compile(r"^[a-z]([a-z0-9-]*[a-z0-9])?$")
MAX_LABEL = 63

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
ISTIO_INJECT = "sidecar.istio.io/inject"

# On each pod of a run: dnn or data.
ROLE_LABEL = "stoker/role"

RUN_ANNOTATION = "stoker/run"
REQUEST_ANNOTATION = "stoker/request-sha256"
WORKLOAD_ANNOTATION = "stoker/workload-sha256"


def object_name(run: str) -> str:
    """What the objects of a run are called: the same for the same run, and no other's.

    A run's name that is none for Kubernetes (capitals, a digit in front, too long) is changed, and
    then ends with a digest of it.
    """
    plain = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".rstrip("-")
    if plain == run and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: MAX_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


def token_secret(name: str) -> str:
    """The Secret with the run's token."""
    return f"{name}-token"


def config_map(name: str) -> str:
    """The ConfigMap with what the launchers read: hyperparameters and channels."""
    return f"{name}-config"


def host_pattern(name: str, job: str) -> str:
    """The names of a job's hosts in the cluster's DNS, with `{index}` for their number.

    The JobSet's controller calls pods so: JOBSET-JOB-JOBINDEX-PODINDEX, under the subdomain, which
    is the JobSet's name.
    """
    return f"{name}-{job}-0-{{index}}.{name}"


def is_dns_label(text: str) -> bool:
    """Whether `text` is a label by RFC 1035: small letters, digits and dashes, a letter first."""
    return len(text) <= MAX_LABEL and bool(DNS_LABEL.match(text))
