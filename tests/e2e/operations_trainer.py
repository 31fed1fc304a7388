"""A trainer to be killed: `python operations_trainer.py FEED PAUSE_S PORT`. It resumes from the feed, and prunes it.

The weights of version v are `nth(step)` of its step, whichever process published it: a test can compare every bit.
"""

import signal
import sys
import threading

from prometheus_client import start_http_server
from support.feeds import nth

from deltasync import AnchorPolicy, PublisherMetrics, PublisherOptions, Retention, open_store
from deltasync.format.weights import Weights
from deltasync.trainer.capture import WeightsSource
from deltasync.trainer.publisher import FeedPublisher

RETENTION = Retention(anchors=2, versions=20, every_s=1.0)
ANCHOR_EVERY = 12


def main(feed: str, pause_s: float, port: int) -> None:
    stop = threading.Event()
    start_http_server(port, "127.0.0.1")
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    anchors = AnchorPolicy(bytes_ratio=None, versions=ANCHOR_EVERY)
    options = PublisherOptions(anchors=anchors, retention=RETENTION, wait=True, observer=PublisherMetrics())
    publisher = FeedPublisher(open_store(feed), options)
    publisher.open()
    head = publisher.head
    step = 0 if head is None or head.step is None else head.step + 1
    while not stop.wait(pause_s):
        publisher.publish(WeightsSource(Weights.of(nth(step))), step=step).wait(300)
        step += 1
    publisher.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
