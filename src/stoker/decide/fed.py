"""Whether data hosts can make a training's batches, by the loader that was profiled."""

from stoker.errors import UsageError
from stoker.records import Profile, Workload
from stoker.words import unfed_words


def refuse_unfed(profile: Profile, workload: Workload) -> None:
    """Refuses a training whose loader the feed cannot reach.

    Raises:
        UsageError: If it is so, and `feed.replace_dataloader` is not false.
    """
    loader, feed = profile.loader, workload.feed
    words = unfed_words(loader, feed)
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
