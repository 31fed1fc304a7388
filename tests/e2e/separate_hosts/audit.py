"""Looks at the end of a run, from where both the replica and the store can be reached.

Run as `python audit.py REPLICA FEED SAMPLES`: three URLs, with `DELTASYNC_TOKEN` in the environment. Sends `audited`.
"""

import os
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from client import Client
from demo.child import Orders, run_child, send
from numpy.typing import NDArray
from samples import taken
from wordle.game import Array
from wordle.training import loaded_policy

from deltasync.errors import EngineError
from deltasync.feed.log import Log
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.upkeep.restore import restore
from deltasync.upkeep.verify import verify

_TEXTS = 8
_WITHIN_S = 300.0
_LOOK_S = 0.1


def main(replica: str, feed: str, samples: str, orders: Orders) -> None:
    """Compare what the replica says with what the store has; nothing comes from the trainer."""
    client = Client(replica, token=os.environ["DELTASYNC_TOKEN"])
    with closing(open_store(feed)) as store, closing(open_store(samples)) as of_samples:
        head = Log(store).require_head()
        status = _status_at(client, head.version)
        made = [sample for _, sample in taken(of_samples)]
        texts = made[-1].played.texts[:_TEXTS]
        said = client.text_log_probs(texts)
        apart = [np.abs(said - log_probs_of(store, version, texts)) for version in (head.version, head.version - 1)]
        send(
            "audited",
            head=head.version,
            digest=head.digest.hex,
            is_clean=verify(store, deep=True).is_clean,
            status={name: status[name] for name in ("version", "head", "lag", "error")},
            scrub=client.control("scrub", {}),
            apart=float(apart[0].mean()),
            apart_before=float(apart[1].mean()),
            samples=[{"versions": sample.versions, "head": sample.head} for sample in made],
        )


def _status_at(client: Client, version: int) -> dict[str, object]:
    """The status of the replica once it has a version and no error; EngineError if it does not come to that."""
    deadline = time.monotonic() + _WITHIN_S
    while True:
        status: dict[str, object] = client.control("status")
        if status["version"] == version and status["error"] is None:
            return status
        if time.monotonic() > deadline:
            raise EngineError(
                f"after {_WITHIN_S:g} s the replica has version {status['version']}, the store {version}",
                hint=f"the replica says: {status['error']}",
            )
        time.sleep(_LOOK_S)


@torch.inference_mode()
def log_probs_of(store: Store, version: int, texts: Array) -> NDArray[np.float64]:
    """The log-probability of each token but the first, by transformers with the weights of a version."""
    folder = Path(f"version-{version}")
    restore(store, folder, version=version)
    ids = torch.from_numpy(texts)
    found = loaded_policy(folder)(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
    log_probs: NDArray[np.float64] = found.gather(2, ids[:, 1:, None])[..., 0].numpy()
    return log_probs


if __name__ == "__main__":
    sys.exit(run_child(lambda orders: main(*sys.argv[1:4], orders)))
