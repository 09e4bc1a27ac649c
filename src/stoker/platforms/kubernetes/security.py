"""The restricted profile of the Pod Security Standards: what a hardened namespace lets in."""

from collections.abc import Iterator

from stoker.platforms.kubernetes.reading import Document, mapping, mappings, text, texts

_VOLUMES = frozenset(
    (
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    )
)


def problems(pods: Document) -> Iterator[str]:
    """What of a pod's spec the restricted profile refuses, one `path: what` each."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pods.get(key):
            yield f"{key}: shares the node's"
    for index, volume in enumerate(mappings(pods, "volumes")):
        for kind in sorted(set(volume) - {"name"} - _VOLUMES):
            yield f"volumes[{index}].{kind}: pods must not have volumes of this kind"
    whole = mapping(pods, "securityContext")
    containers = [
        (f"{key}[{index}]", container)
        for key in ("initContainers", "containers")
        for index, container in enumerate(mappings(pods, key))
    ]
    for path, container in containers:
        own = mapping(container, "securityContext")
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{path}: must not let its processes gain privileges"
        if own.get("privileged"):
            yield f"{path}: must not be privileged"
        capabilities = mapping(own, "capabilities")
        if "ALL" not in texts(capabilities, "drop"):
            yield f"{path}: must drop all capabilities"
        if set(texts(capabilities, "add")) - {"NET_BIND_SERVICE"}:
            yield f"{path}: must not add capabilities"
        if not own.get("runAsNonRoot", whole.get("runAsNonRoot")):
            yield f"{path}: must not run as root"
        if own.get("runAsUser", whole.get("runAsUser")) == 0:
            yield f"{path}: must not run as user 0"
        profile = mapping(own, "seccompProfile") or mapping(whole, "seccompProfile")
        if text(profile, "type") not in ("RuntimeDefault", "Localhost"):
            yield f"{path}: needs a seccomp profile"
        for port in mappings(container, "ports"):
            if port.get("hostPort"):
                yield f"{path}: must not use a port of the node"
