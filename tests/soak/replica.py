"""A replica of the soak with a torch model, a process of its own.

    python -m soak.replica FOLDER URL NAME [--mirror FILE]

It appends a line of JSON to `FOLDER/NAME.jsonl` for every version that goes live: its number, and a hash of the bits
that the model has then. `FOLDER/NAME.status` is replaced every second. SIGTERM ends it.
"""

import argparse
import json
import logging
import os
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from deltasync.replica.events import Advance
from deltasync.replica.follower import Follower
from deltasync.torch.module import ModuleTarget

from .training import append_line, state_hash, stop_on_sigterm

STATUS_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--mirror", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    stop, folder, name = stop_on_sigterm(), options.folder, options.name
    state = {key: torch.zeros_like(tensor) for key, tensor in load_file(folder / "base/model.safetensors").items()}

    def report(moved: Advance) -> None:
        append_line(folder / f"{name}.jsonl", {"version": moved.version, "hash": state_hash(state)})

    target = ModuleTarget(state, hold=threading.Lock())
    with Follower(
        options.url, target, mirror=options.mirror, replica=name, beat_s=5.0, scrub_s=20.0, observer=report
    ) as follower:
        follower.start()
        while not stop.wait(STATUS_S):
            status = follower.status()
            if not status.is_following and follower.error is not None:
                raise follower.error
            temporary = folder / f"{name}.status.tmp"
            temporary.write_text(json.dumps(asdict(status)))
            os.replace(temporary, folder / f"{name}.status")


if __name__ == "__main__":
    main()
