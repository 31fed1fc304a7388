"""A replica in a process of its own, to be killed: it keeps a folder at the head of a feed."""

from multiprocessing.synchronize import Event
from pathlib import Path

from deltasync.replica.folder import FolderTarget
from deltasync.replica.follower import Follower


def run(folder: str, url: str, *, is_mapped: bool, stop_at: int | None, has_begun: Event) -> None:
    """Follow until it is ended, or only to version `stop_at`."""
    target = FolderTarget(Path(folder) / "model")
    mirror = Path(folder) / "mirror" if is_mapped else None
    has_begun.set()
    with Follower(url, target, mirror=mirror, replica="one", beat_s=0.05) as replica:
        if stop_at is None:
            replica.follow()
        else:
            replica.advance(to=stop_at)
            assert replica.scrub() == []
