"""A trainer to be killed: `python operations_trainer.py FEED PAUSE_S`. It resumes from the feed, and prunes it itself.

The weights of version v are `nth(step)` of its step, whoever published it: a test can compare every bit.
"""

import signal
import sys
import threading

from support.publishing import nth

from deltasync import AnchorPolicy, PublisherOptions, Retention, open_store
from deltasync.format.weights import Weights
from deltasync.trainer.publisher import FeedPublisher

RETENTION = Retention(anchors=2, versions=20, every_s=1.0)
ANCHOR_EVERY = 12


def main(feed: str, pause_s: float) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    anchors = AnchorPolicy(bytes_ratio=None, versions=ANCHOR_EVERY)
    options = PublisherOptions(anchors=anchors, retention=RETENTION, wait=True)
    publisher = FeedPublisher(open_store(feed), options)
    publisher.open()
    head = publisher.head
    step = 0 if head is None or head.step is None else head.step + 1
    while not stop.wait(pause_s):
        publisher.publish(Weights.of(nth(step)), step=step).wait(60.0)
        step += 1
    publisher.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
