"""What a training's states ask for before money is spent, and beside it."""

from stoker.records import Advice, Profile

# A state that is less of a step than this leaves enough for a plan to gain.
_MIN_SHARE = 0.15
# What no host that is bought mends, in a few words for the reason.
_MEND_FIRST = {
    "throttled": "the container's CPU quota stops the training",
    "straggler": "one rank keeps all others waiting",
    "network": "the loaders share a network that gives no more, to whatever number of workers",
    "storage": "the loaders share a storage that gives no more, to whatever number of workers",
}
_ADVICE = {
    "throttled": "Raise the CPU limit of the container, then profile again: with it, hosts are "
    "judged by what they are not allowed to use.",
    "straggler": "Look at the late rank's host and data, then profile again: more hosts do not "
    "make it faster.",
    "latency": "Loader workers wait for reads, not for CPUs: more of them cost nothing, larger "
    "CPUs do not help.",
    "network": "Read less or nearer: smaller or compressed samples, a copy on local disks. A data "
    "group helps only if the source gives its hosts more than it gives this one "
    "(constraints.storage: per_host).",
    "storage": "Read less or faster: larger files, local disks, a cache. A data group helps only "
    "if its hosts have storage of their own (constraints.storage: per_host).",
    "gil": "No data host takes over what the trainer's main process does in Python: move it into "
    "the dataset or collate function first.",
    "other-programs": "Profile again when the machine is quiet: other programs took a part of the "
    "vCPUs, and all figures are as sure as that part is small.",
    "first-epoch": "Profile a later epoch: the first one fills a cache, and a training is nearer "
    "to the others.",
}
_WHEN = {
    "first-epoch": "the training has many epochs",
    "other-programs": "before any money is spent",
}


def mend_first(profile: Profile, *, has_own_storage: bool = False) -> str:
    """Why nothing that costs is advised yet; empty: it may be.

    `has_own_storage` says that data hosts bring storage bandwidth of their own.
    """
    named = {state.id for state in profile.states if (state.share or 0.0) >= _MIN_SHARE}
    if profile.timed_step.storage_bytes_per_second is not None:
        # The storage's rate is a term of the model: plans are judged by it.
        named.discard("storage")
    if has_own_storage:
        named -= {"storage", "network"}
    for name, words in _MEND_FIRST.items():
        if name in named:
            return words
    if "latency" in named and any(fix.id == "num_workers" for fix in profile.fixes):
        return "loader workers wait for reads, and more of them are free"
    return ""


def advice_of_states(profile: Profile) -> tuple[Advice, ...]:
    """A line for each state that a plan does not answer."""
    return tuple(
        Advice(
            id=state.id,
            text=_ADVICE[state.id],
            when=_WHEN.get(state.id)
            or ("before any money is spent" if state.id in _MEND_FIRST else None),
        )
        for state in profile.states
        if state.id in _ADVICE
    )
