"""A publisher to be killed: `python publisher.py URL [--no-sync]`.

For each line on its input it starts one process more (a fork, so that the imports are paid for once), which publishes
version after version until it is killed. The output is "pid N", then the number of each version whose
publication has returned, then "killed" or "failed". Weights number n are version n; every fifth has an anchor.
"""

import os
import sys
import tempfile
from pathlib import Path

from known import nth
from support.helpers import write_sharded

from deltasync.feed.log import Log
from deltasync.store import open_store
from deltasync.trainer.checkpoint import publish as publish_checkpoint


def publish_until_killed(url: str) -> None:
    store = open_store(url)
    head = Log(store).head()
    version = 0 if head is None else head.version + 1
    while True:
        with tempfile.TemporaryDirectory() as folder:
            write_sharded(Path(folder), nth(version))
            found = publish_checkpoint(store, folder, step=version, anchor=version % 5 == 4)
        assert found.version == version
        write_line(str(version))
        version += 1


def write_line(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    if "--no-sync" in sys.argv:
        os.fsync = lambda fd: None
    while sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            publish_until_killed(sys.argv[1])
        write_line(f"pid {pid}")
        write_line("killed" if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else "failed")
