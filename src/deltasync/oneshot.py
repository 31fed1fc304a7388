"""One-shot use, without any feed or store: the change between two states, and a state plus a change.

A state is a dict of NumPy arrays (ml_dtypes for bfloat16 and float8), or the path of a checkpoint: a folder or a
single safetensors file.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.checkpoint_output import write_checkpoint_like
from deltasync.errors import InvalidInputError, MismatchError, NotFoundError
from deltasync.files import reader
from deltasync.format.digest import StateDigest
from deltasync.format.layout import TensorSpec
from deltasync.format.payload import Payload, PayloadHeader, payload_chunks
from deltasync.format.weights import Weights
from deltasync.progress import Progress, counting

PathLike = str | os.PathLike[str]
State = Mapping[str, np.ndarray] | PathLike
Delta = bytes | bytearray | memoryview | PathLike


def diff(
    old: State, new: State, *, codec: str = "exp/1", threads: int | None = None, progress: Progress | None = None
) -> bytes:
    """The delta that turns `old` into `new`: a payload, to be stored or sent as a file.

    `codec` is "exp/1" (smallest) or "coo/1" (plain indices and values). MismatchError names the first tensor whose
    name, type or shape differs.
    """
    return b"".join(diff_chunks(old, new, codec=codec, threads=threads, progress=progress))


def diff_chunks(
    old: State, new: State, *, codec: str = "exp/1", threads: int | None = None, progress: Progress | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of `diff` in pieces, for a file."""
    before, after = _weights_of(old, "old"), _weights_of(new, "new")
    before.layout.require_equal(after.layout, ours=_called(old, "old"), theirs=_called(new, "new"))
    total = before.layout.elements
    parent = blocks.digest(before, threads=threads, on_progress=counting(progress, "digest", total))
    found = blocks.encode_delta(
        before, after, codec=codec, threads=threads, on_progress=counting(progress, "encode", total)
    )
    digest = sum((block.digest for block in found), parent)
    return payload_chunks(PayloadHeader("delta", before.layout, parent, digest), found)


def apply(
    old: State,
    delta: Delta,
    *,
    out: PathLike | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """The state that `delta` (the bytes of a payload, or its path) makes of `old`, which stays as it is.

    Without `out`: a dict of new arrays of the types and shapes of `old`. For a checkpoint path, types that NumPy does
    not have come as raw bits (BF16 as uint16, the 8-bit floats as uint8): see them with `.view(ml_dtypes.bfloat16)`.

    With `out`: `old` must be a checkpoint path; a checkpoint of the same structure appears at `out`, whole or not at
    all, and the dict is empty.

    MismatchError if `old` is not the very state that the delta was made against. An anchor needs the layout only.
    """
    with open_payload(delta) as payload:
        if out is None:
            before = _weights_of(old, "old")
            _require_parent(before, payload.header, old, threads, progress)
            after = Weights(before.layout, tuple(array.copy() for array in before.arrays))
            _decode_into(after, before, payload, threads, progress)
            return _arrays(after, old)
        if isinstance(old, Mapping):
            raise InvalidInputError("only a checkpoint can be written to a path", hint="leave out `out`")
        checkpoint = open_checkpoint(old)
        _require_parent(checkpoint.weights, payload.header, old, threads, progress)
        write_checkpoint_like(
            checkpoint, out, lambda target: _decode_into(target, checkpoint.weights, payload, threads, progress)
        )
        return {}


def state_digest(state: State, *, threads: int | None = None, progress: Progress | None = None) -> StateDigest:
    """The state digest: equal digests mean equal names, types, shapes and bits (by accident, not by malice)."""
    weights = _weights_of(state, "")
    return blocks.digest(weights, threads=threads, on_progress=counting(progress, "digest", weights.layout.elements))


@contextmanager
def open_payload(source: Delta) -> Iterator[Payload]:
    """A payload from its bytes, or from a file whose blocks are read as they are needed."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        yield Payload.parse(source)
        return
    path = Path(source)
    if not path.exists():
        raise NotFoundError(f"{path} does not exist", hint="give the file that `deltasync diff` wrote")
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder, not a payload", hint="give the file that `deltasync diff` wrote")
    with path.open("rb") as file:
        yield Payload.open(reader(file.fileno()), os.fstat(file.fileno()).st_size)


def _require_parent(
    before: Weights, header: PayloadHeader, old: State, threads: int | None, progress: Progress | None
) -> None:
    if header.kind == "shard":
        raise InvalidInputError(
            "this is one shard of an anchor", hint="`deltasync restore` puts a feed's anchors together"
        )
    before.layout.require_equal(header.layout, ours=_called(old, "old"), theirs="the delta")
    if header.parent_digest is None:
        return
    found = blocks.digest(before, threads=threads, on_progress=counting(progress, "digest", before.layout.elements))
    if found != header.parent_digest:
        raise MismatchError(
            f"{_called(old, 'old')} has the digest {found}, but the delta was made against {header.parent_digest}",
            rule="payload.parent",
            hint="apply it to the state that it was made against",
        )


def _decode_into(
    target: Weights, before: Weights, payload: Payload, threads: int | None, progress: Progress | None
) -> None:
    blocks.decode_into(
        target,
        before,
        payload.blocks(),
        relative=payload.header.kind == "delta",
        threads=threads,
        on_progress=counting(progress, "apply", sum(info.elements for info in payload.block_infos)),
    )


def _weights_of(state: State, role: str) -> Weights:
    if not isinstance(state, Mapping):
        return open_checkpoint(state).weights
    for name, array in state.items():
        _check_array(name, array, role)
    return Weights.of(state)


def _check_array(name: Any, array: Any, role: str) -> None:
    where = f"tensor {name!r:.200} of the {role} state" if role else f"tensor {name!r:.200}"
    if not isinstance(name, str) or any("\ud800" <= c <= "\udfff" for c in name):
        raise InvalidInputError(f"{where}: a name is a text that UTF-8 can hold")
    if not isinstance(array, np.ndarray):
        raise InvalidInputError(f"{where} is a {type(array).__qualname__}", hint="give NumPy arrays")
    if array.dtype.byteorder == ">":
        raise InvalidInputError(f"{where} is big-endian", hint="convert it with astype")


def _called(state: State, role: str) -> str:
    return f"the {role} state" if isinstance(state, Mapping) else f"{os.fspath(state)}"


def _arrays(weights: Weights, old: State) -> dict[str, np.ndarray]:
    """Shaped arrays: typed like those of the dict `old` and in its order, or as NumPy can type them."""
    ordinals = weights.layout.ordinals
    if isinstance(old, Mapping):
        return {
            name: weights.arrays[ordinals[name]].view(array.dtype).reshape(array.shape) for name, array in old.items()
        }
    return {
        spec.name: bits.view(_numpy_dtype(spec)).reshape(spec.shape)
        for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True)
    }


def _numpy_dtype(spec: TensorSpec) -> np.dtype[Any]:
    name = spec.dtype.name
    if name == "BOOL":
        return np.dtype(np.bool_)
    if name in ("BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"):
        return np.dtype(spec.dtype.bits_dtype)
    return np.dtype(f"<{name[0].lower()}{spec.dtype.width}")
