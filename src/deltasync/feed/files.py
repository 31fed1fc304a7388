"""The files beside the weights of a version: configuration, tokenizer, and what else a folder needs to be loaded."""

import logging
from contextlib import suppress
from functools import partial

from deltasync.errors import CorruptError, FormatError, NotFoundError
from deltasync.feed.fetch import fetch
from deltasync.feed.log import READ_THREADS, Log
from deltasync.format import keys, limits
from deltasync.format.companions import can_run_code, read_files
from deltasync.format.manifest import Manifest
from deltasync.parallel import each
from deltasync.store.protocol import Store

logger = logging.getLogger(__name__)

_DAMAGE = (CorruptError, FormatError, NotFoundError)


def fetch_files(store: Store, manifest: Manifest, *, trust_code: bool = False) -> dict[str, bytes]:
    """The files beside the weights, by their relative path; those that can run code only with `trust_code`."""
    ref = manifest.files
    if ref is None:
        return {}
    if ref.nbytes > limits.FILES_BYTES_MAX + limits.SAFETENSORS_HEADER_BYTES_MAX:
        raise CorruptError(
            f"the files beside the weights have {ref.nbytes} bytes, which are too many",
            rule="files.size",
            key=keys.payload_key(ref.sha256),
        )
    files = read_files(fetch(store, ref))
    code = [] if trust_code else [path for path in files if can_run_code(path)]
    if code:
        more = f" and {len(code) - 3} others" if len(code) > 3 else ""
        named = ", ".join(f"{path!r:.80}" for path in code[:3])
        logger.warning("version %d: leaving out files that can run code: %s%s", manifest.version, named, more)
    return {path: data for path, data in files.items() if path not in code}


def find_files(log: Log, target: Manifest, *, trust_code: bool = False) -> dict[str, bytes]:
    """The files beside the weights of a version.

    If they are damaged or missing, those of the nearest version that has others are used, with a warning; the error if
    there are none.
    """
    try:
        return fetch_files(log.store, target, trust_code=trust_code)
    except _DAMAGE as error:
        damage = error
    tried = {target.files}
    nearest = sorted(log.versions(), key=lambda version: (abs(version - target.version), version))
    for manifest in each(partial(_readable, log), nearest, waiting=READ_THREADS):
        if manifest is None or manifest.files is None or manifest.files in tried:
            continue
        tried.add(manifest.files)
        with suppress(*_DAMAGE):
            files = fetch_files(log.store, manifest, trust_code=trust_code)
            logger.warning(
                "the files beside the weights of version %d cannot be read, those of version %d are used: %s",
                target.version,
                manifest.version,
                damage,
            )
            return files
    damage.hint = (
        "without these files (`files=False`, `--no-files`) the weights can be restored; publish again to repair"
    )
    raise damage


def _readable(log: Log, version: int) -> Manifest | None:
    try:
        return log.read(version)
    except _DAMAGE:
        return None
