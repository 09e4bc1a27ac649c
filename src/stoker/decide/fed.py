"""Whether data hosts can make a training's batches, by the loader that was profiled. Pure."""

from stoker.errors import UsageError
from stoker.records import FeedSettings, Profile, Workload


def unfed_words(profile: Profile, feed: FeedSettings) -> str:
    """Says why data hosts cannot make the batches; empty: they can, or it is not known."""
    loader = profile.loader
    if loader is None:
        return ""
    if loader.reach == "own":
        return f"{loader.class_name} makes batches in its own way, so that data hosts cannot help"
    if loader.reach == "torch" and feed.replace_dataloader is False:
        return (
            "feed.replace_dataloader is false, so that data hosts make no batches for "
            f"{loader.class_name}"
        )
    return ""


def refuse_unfed(profile: Profile, workload: Workload) -> None:
    """Refuses to go on to a training whose loader the feed cannot reach.

    Raises:
        UsageError: If it is so, and the workload does not say that the feed is not to take it over.
    """
    loader, feed = profile.loader, workload.feed
    if loader is None or loader.reach != "own" or feed.replace_dataloader is False:
        return
    if workload.engine_settings.name != "feed":
        return
    raise UsageError(
        unfed_words(profile, feed),
        where=f"workload {workload.name}, the loader that was profiled",
        fix="give the training a loader of torch's or stoker's; or set feed.replace_dataloader: "
        "false, to train without data hosts",
    )
