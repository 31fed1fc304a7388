"""One of several writers that race for the versions of a feed: `python racer.py URL NUMBER TOTAL POLICY`."""

import json
import sys
from dataclasses import asdict, dataclass, field

from known import Author, nth
from support.helpers import State, changed

from deltasync.errors import ConflictError
from deltasync.store import open_store
from deltasync.store.protocol import Store


@dataclass
class Tally:
    """What a racer believes: the versions that it committed, and how often another one was faster."""

    number: int
    writer: str = ""
    won: list[int] = field(default_factory=list)
    conflicts: int = 0


def content(version: int, number: int) -> State:
    """What racer `number` commits as that version: other weights than any other racer's."""
    return changed(nth(0), seed=1000 * version + number)


def race(store: Store, number: int, *, total: int, stops: bool) -> Tally:
    """Commit until the feed has `total` versions; after a conflict stop, or go on from the new head."""
    author = Author(store)
    tally = Tally(number, author.upload.id)
    while author.head.version < total - 1:
        version = author.head.version + 1
        try:
            author.commit(content(version, number))
            tally.won.append(version)
        except ConflictError:
            tally.conflicts += 1
            if stops:
                break
            author.catch_up()
    return tally


if __name__ == "__main__":
    url, number, total, policy = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asdict(race(open_store(url), int(number), total=int(total), stops=policy == "stop"))))
