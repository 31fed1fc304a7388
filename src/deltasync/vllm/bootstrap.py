"""Beside the server: the private folder of a server that starts from a feed, without a checkpoint on the disk.

The folder holds the model as vLLM looks at it before it loads weights, and the mirror. A process of its own keeps it:
it fetches the version while vLLM starts, and removes the folder when the server has ended, however it ended.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deltasync.checkpoint import WHOLE_NAME, open_checkpoint, write_companion
from deltasync.errors import DeltasyncError, InvalidInputError
from deltasync.feed.files import find_files
from deltasync.feed.log import Log
from deltasync.feed.route import Blocked, Route
from deltasync.files import locked
from deltasync.format.layout import Layout
from deltasync.format.safetensors import header_bytes
from deltasync.replica.mirror import fill_mirror, memory_folder
from deltasync.store import opened
from deltasync.vllm.settings import Settings

logger = logging.getLogger(__name__)

MODEL = "model"
MIRROR = "mirror.safetensors"

_CONFIGS = ("config.json", "params.json")
_TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
"""How the names of the files of tokenizers begin."""
_NO_CONFIG = "publish with PublisherOptions(files=model_files(model, tokenizer)), or name a model: -- --model MODEL"
_NO_TOKENIZER = "publish with PublisherOptions(processing_class=tokenizer), or pass -- --tokenizer NAME"


@dataclass(frozen=True, slots=True)
class BareModel:
    """A model without its weights: a version of a feed, the files beside it, and the names, types and shapes of the
    weights."""

    version: int
    files: Mapping[str, bytes]
    layout: Layout

    @classmethod
    def of_feed(cls, feed: str, *, base: Path | None, trust_code: bool, needs_tokenizer: bool) -> "BareModel":
        """The newest version. InvalidInputError if the feed lacks what a server needs; it names what is missing."""
        with opened(feed) as store:
            log = Log(store)
            head = log.require_head()
            files = find_files(log, head, trust_code=trust_code)
            where = f"version {head.version} of {store.url}"
            if not any(name in files for name in _CONFIGS):
                hint = _NO_CONFIG
                if "adapter_config.json" in files:
                    hint = "it is an adapter: pass --adapter NAME=URL instead of --feed, and -- --model with its base"
                raise InvalidInputError(f"{where} has no config.json beside its weights", hint=hint)
            if needs_tokenizer and not any(name.startswith(_TOKENIZERS) for name in files):
                raise InvalidInputError(f"{where} has no tokenizer beside its weights", hint=_NO_TOKENIZER)

            route = Route(log, head)
            while True:
                first = route.plan().edges[0]
                ref = first.manifest.base
                try:
                    if ref is None:
                        return cls(head.version, files, route.open(first).layout)
                    if base is None and not os.path.exists(ref.checkpoint):
                        raise InvalidInputError(
                            f"{where} starts from the checkpoint {ref.checkpoint!r:.200}, which is not in the feed",
                            hint="pass a copy of it with --base DIR, or serve it: -- --model MODEL",
                        )
                    checkpoint = open_checkpoint(ref.checkpoint if base is None else base)
                    return cls(head.version, files, checkpoint.weights.layout)
                except Blocked:
                    continue

    def write(self, folder: Path) -> None:
        """Write a folder that vLLM can configure itself from.

        vLLM looks for some tensors in the headers of weights. The file has a header, and holes in place of weights,
        which take no memory.
        """
        folder.mkdir()
        for name, data in self.files.items():
            write_companion(folder, name, data)
        with (folder / WHOLE_NAME).open("xb") as file:
            size = file.write(header_bytes(self.layout.tensors, {"format": "pt"}))
            file.truncate(size + self.layout.nbytes)


def bootstrap(environment: Mapping[str, str], model: BareModel) -> Path:
    """A new private folder for this process, in memory, with the model. Its version is fetched in the background.

    The folder is there until this process and all that have inherited its descriptors have ended, also after `exec`.
    `environment` has the settings of the server. If they name no mirror, it is `MIRROR` in the folder.
    """
    mirror = Settings.from_environment(environment).mirror
    if mirror is not None:
        # A server that uses the same mirror would keep this one waiting.
        with locked(mirror):
            pass
    ours, server = os.pipe()
    # In a session of its own: a signal for the terminal or the group of the server must not end it.
    with os.fdopen(ours) as stdin:
        keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, str(model.version)],
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        assert keeper.stdout is not None
        with keeper.stdout as printed:
            folder = Path(os.fsdecode(printed.readline()).rstrip("\n"))
            if not folder.name:
                raise InvalidInputError("there is no private folder for the server", hint="see the error above")
            model.write(folder / MODEL)
            free = shutil.disk_usage(folder).free
            if mirror is None and model.layout.nbytes > free:
                raise InvalidInputError(
                    f"the mirror needs {model.layout.nbytes} bytes of shared memory, and {free} are free",
                    hint="raise the limit of a container (--shm-size, --ipc=host), or keep it on a disk: --mirror FILE",
                )
            os.write(server, b"\n")
            # Until the mirror is locked: otherwise it could be written to while the workers already load from it.
            printed.readline()
    except BaseException:
        os.close(server)
        keeper.wait()
        raise
    # This end stays open until the server has ended, which is how the keeper learns of that.
    os.set_inheritable(server, True)
    return folder


def _keep_folder(settings: Settings, version: int) -> None:
    """Make the folder, print its path, fetch the version at a sign, and wait for the end of stdin.

    A second line is printed when the mirror is locked. Without it, stdout ends if the version cannot be fetched.
    """
    with memory_folder() as folder:
        print(folder, flush=True)
        if sys.stdin.buffer.read(1):
            mirror = folder / MIRROR if settings.mirror is None else settings.mirror
            # A process that can be ended at any time, so that nothing is written to a folder that is being removed.
            fetching = multiprocessing.get_context("fork").Process(
                target=_fetch, args=(settings, mirror, version), daemon=True
            )
            fetching.start()
            sys.stdout.close()
            sys.stdin.buffer.read()
            fetching.kill()
            fetching.join()


def _fetch(settings: Settings, mirror: Path, version: int) -> None:
    assert settings.feed is not None
    try:
        fill_mirror(
            settings.feed, mirror, base=settings.base, version=version, on_locked=lambda: print("locked", flush=True)
        )
    except DeltasyncError as error:
        # The workers of the server try again, and report what is wrong then.
        logger.warning("version %d could not be fetched while the server starts: %s", version, error)


if __name__ == "__main__":
    # A supervisor may send signals to all processes of a service. This one ends after the server, to clean up.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _keep_folder(Settings.from_environment(), int(sys.argv[1]))
