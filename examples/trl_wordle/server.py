"""The server's host: vLLM, which follows the feed.

    python server.py --feed URL [--model NAME] [--host ADDRESS] [--port PORT] [-- MORE ARGUMENTS OF vLLM]

The model comes from the feed as well: as soon as the trainer has published its first version, it is restored into a
folder on this host. All that the server needs to know is the URL of the store.
"""

import argparse
import os
import shutil
import sys
import time

import on_cpu
from checks import require_free

from deltasync import DeltasyncError, InvalidInputError, NotFoundError, Store, open_store, restore

_POLL_S = 0.5
_MAX_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the model of a feed with vLLM, and follow the feed.")
    parser.add_argument("--feed", required=True, metavar="URL")
    parser.add_argument("--model", default="wordle-policy", metavar="FOLDER", help="as the trainer calls it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--mirror", metavar="FILE", help="keep the mirror in this file")
    parser.add_argument("--wait-s", type=float, default=300.0, help="how long the first version may take")
    parser.add_argument("arguments", nargs="*", metavar="VLLM-ARGUMENT")
    options = parser.parse_args()
    try:
        become_server(options)
    except DeltasyncError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def become_server(options: argparse.Namespace) -> None:
    """Get the model, then replace this process by `deltasync serve`. Does not return."""
    # Beside the interpreter in an environment of its own; elsewhere on the path in an image with the system's Python.
    deltasync = shutil.which("deltasync", path=os.path.dirname(sys.executable)) or shutil.which("deltasync")
    if deltasync is None:
        raise InvalidInputError("the command deltasync is not installed here", hint="pip install 'deltasync[vllm]'")
    require_free(options.host, options.port)
    with_model = ["--model", options.model, "--served-model-name", options.model]
    listening = ["--host", options.host, "--port", str(options.port), "--max-model-len", str(_MAX_TOKENS)]
    command = [deltasync, "serve", "--feed", options.feed]
    command += ["--mirror", options.mirror] if options.mirror is not None else []
    if on_cpu.is_needed():
        on_cpu.adjust_server()
        listening += on_cpu.SERVER_ARGUMENTS
    if not os.path.isdir(options.model):
        with open_store(options.feed) as store:
            restore_first(store, options.model, wait_s=options.wait_s)
    if not options.feed.startswith("hf://"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.execv(command[0], [*command, "--", *with_model, *listening, *options.arguments])


def restore_first(store: Store, folder: str, *, wait_s: float) -> None:
    """Restore the newest version of a feed to a folder, as soon as there is one."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            restore(store, folder)
            return
        except NotFoundError as error:
            if time.monotonic() >= deadline_s:
                raise NotFoundError(
                    f"the feed has no version after {wait_s:g} s", hint="start trainer.py with the same --feed"
                ) from error
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
