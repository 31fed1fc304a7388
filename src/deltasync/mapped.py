"""Weights in a mapped file that is overwritten in place: a safetensors file that outlives the process."""

from pathlib import Path

from deltasync.checkpoint import map_files, open_checkpoint
from deltasync.checkpoint_output import create_file, require_space
from deltasync.errors import CorruptError, FormatError, NotFoundError
from deltasync.files import temporary_beside
from deltasync.format.layout import Layout
from deltasync.format.weights import Weights


def mapped_weights(layout: Layout, path: Path) -> Weights:
    """What the file at `path` holds; one that is missing or has another layout is replaced by zeros.

    Whether its bits are those of a version is for the caller to prove.
    """
    if mapped_layout(path) != layout:
        require_space(path, layout.nbytes)
        with temporary_beside(path) as temporary:
            # The widest first: then all are aligned, and every one is mapped.
            create_file(temporary, sorted(layout.tensors, key=lambda spec: -spec.dtype.width))
            temporary.replace(path)
    return map_files(open_checkpoint(path).files, writable=True).weights


def mapped_layout(path: Path) -> Layout | None:
    """The layout of such a file; None if there is none that can be read."""
    try:
        return open_checkpoint(path).weights.layout
    except (CorruptError, FormatError, NotFoundError):
        return None
