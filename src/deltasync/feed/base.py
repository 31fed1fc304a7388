"""Find the checkpoint that a base names: a local folder, or the weights of a model on the Hub and nothing else."""

import os
from pathlib import Path

from deltasync.checkpoint import INDEX_NAME, WHOLE_NAME, weight_files
from deltasync.errors import InvalidInputError, MismatchError, NotFoundError
from deltasync.format import limits
from deltasync.format.manifest import BaseRef, Manifest

_HINT = "pass a local copy of it: `--base DIR`"
_ELEMENT_BYTES_MAX = 8


def locate_base(manifest: Manifest) -> Path:
    """The folder of the checkpoint that the manifest of a base names.

    From the Hub, only the safetensors files that hold the weights are downloaded, and only if the size of all of them
    fits the number of elements. NotFoundError if the checkpoint is not available, MismatchError if it does not fit.
    """
    base = manifest.base
    if base is None:
        raise InvalidInputError(f"version {manifest.version} is not a base")
    # Path.exists raises for a name that no file can have.
    if os.path.exists(base.checkpoint):
        return Path(base.checkpoint)
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        hint = f"{_HINT}, or install deltasync[hf] to download it from the Hub"
        raise NotFoundError(f"the base {_name(base)} is not a local folder", hint=hint) from error
    return _download(base, manifest)


def _download(base: BaseRef, manifest: Manifest) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import DryRunError, HFValidationError

    try:
        try:
            listed = snapshot_download(base.checkpoint, revision=base.revision, dry_run=True)
        except DryRunError:
            # The Hub cannot be reached: what was downloaded before may be enough.
            patterns = ["*.safetensors", INDEX_NAME]
            return Path(
                snapshot_download(
                    base.checkpoint, revision=base.revision, local_files_only=True, allow_patterns=patterns
                )
            )
        sizes = {file.filename: file.file_size or 0 for file in listed}
        # All requests are about the same commit, even if a branch moves on.
        commit = listed[0].commit_hash if listed else base.revision
        names = [name for name in sizes if name.endswith(".safetensors") and "/" not in name]
        if WHOLE_NAME in names:
            names = [WHOLE_NAME]
        elif INDEX_NAME in sizes:
            _require_size(base, manifest, sizes, [INDEX_NAME], most=limits.SAFETENSORS_HEADER_BYTES_MAX)
            index = Path(hf_hub_download(base.checkpoint, INDEX_NAME, revision=commit))
            names = weight_files(index)
        _require_size(base, manifest, sizes, names, least=manifest.elements, most=_bytes_max(manifest, names))
        for name in names:
            folder = Path(hf_hub_download(base.checkpoint, name, revision=commit)).parent
    except (OSError, ValueError, HFValidationError) as error:
        # The client raises OSErrors for network failures, missing permissions and missing repositories alike.
        raise NotFoundError(f"the base {_name(base)} is not available: {error!s:.300}", hint=_HINT) from error
    return folder


def _bytes_max(manifest: Manifest, names: list[str]) -> int:
    return _ELEMENT_BYTES_MAX * manifest.elements + len(names) * (limits.SAFETENSORS_HEADER_BYTES_MAX + 8)


def _require_size(
    base: BaseRef, manifest: Manifest, sizes: dict[str, int], names: list[str], *, most: int, least: int = 0
) -> None:
    """MismatchError unless the Hub has all of these files, in a size that the base can have."""
    missing = [name for name in names if name not in sizes]
    nbytes = sum(sizes.get(name, 0) for name in names)
    if missing or not names:
        problem = f"has no file {missing[0]!r:.200}" if missing else "has no safetensors files"
    elif not least <= nbytes <= most:
        problem = f"has {nbytes} bytes in {len(names)} files, which does not fit {manifest.elements} elements"
    else:
        return
    raise MismatchError(
        f"{_name(base)} cannot be the base of version {manifest.version}: it {problem}",
        version=manifest.version,
        rule="base.layout",
        hint=_HINT,
    )


def _name(base: BaseRef) -> str:
    return f"{base.checkpoint!r:.200}" + ("" if base.revision is None else f" at revision {base.revision!r:.80}")
