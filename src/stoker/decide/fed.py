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
    if loader.reach == "left" and feed.replace_dataloader == "auto":
        return (
            f"the script imports stoker's DataLoader and reads {loader.class_name}, for which data "
            "hosts make no batches (read stoker's class, or use --replace-dataloader true)"
        )
    if loader.reach != "stoker" and feed.replace_dataloader is False:
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
    words = unfed_words(profile, feed)
    if loader is None or not words or feed.replace_dataloader is False:
        return
    if workload.engine_settings.name != "feed":
        return
    fix = "give the training a loader of torch's or stoker's"
    if loader.reach == "left":
        fix = "read stoker's class, or train with --replace-dataloader true"
    raise UsageError(
        words,
        where=f"workload {workload.name}, the loader that was profiled",
        fix=f"{fix}; or set feed.replace_dataloader: false, to train without data hosts",
    )
