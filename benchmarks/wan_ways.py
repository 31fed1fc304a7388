"""What others do between a step and weights that are live: each layout of a change, with its own order of the steps.

A step goes through capture, encode and put on the trainer's side, and fetch, decode and apply on the replica's. A way
says until when the trainer is held and from where on serving pauses. Where a project's order is not known, or has
several forms, it is the one in its favour. All get the same store, client and number of threads, and none of them pays
for keeping the old weights up to date. Folders are in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import safetensors.torch
import torch
import zstandard
from safetensors.numpy import load as load_bytes
from safetensors.numpy import save as save_bytes

from benchmarks import baselines
from benchmarks.bits import Bits
from benchmarks.data.files import WEIGHTS_NAME, read_checkpoint, write_checkpoint
from deltasync.parallel import each

OURS = "deltasync"
DTYPE = "BF16"
THREADS = 2

State = Mapping[str, Bits]
Files = dict[str, bytes]


class Layout(Protocol):
    """How a change travels. One object serves a trainer, another one a replica; both begin with the same weights."""

    def capture(self, old: State, new: State) -> object:
        """On the trainer: what must happen before the weights may change again."""

    def encode(self, captured: Any) -> Files:
        """On the trainer: the objects to put, by name."""

    def decode(self, files: Files, live: State) -> object:
        """On the replica: all that can be done beside the live weights."""

    def apply(self, decoded: Any, live: State) -> None:
        """On the replica: overwrite the live weights."""


@dataclass(frozen=True, slots=True)
class Way:
    """A layout, until when the trainer is held, and from which step on serving pauses.

    `open` makes the layout for weights to begin with, and a folder that it may use.
    """

    name: str
    held: Literal["captured", "put", "live"]
    paused: Literal["fetch", "decode", "apply"]
    open: Callable[[State, Path], Layout]


class Full:
    """All weights, compressed or not; the replica copies all of them."""

    def __init__(self, *, compressed: bool) -> None:
        self._compressed = compressed

    def capture(self, old: State, new: State) -> State:
        return new

    def encode(self, captured: State) -> Files:
        data = safetensors.torch.save(as_torch(captured))
        if self._compressed:
            data = zstandard.ZstdCompressor(level=1, threads=THREADS).compress(data)
        return {WEIGHTS_NAME: data}

    def decode(self, files: Files, live: State) -> State:
        (data,) = files.values()
        if self._compressed:
            data = zstandard.ZstdDecompressor().decompress(data)
        return as_bits(safetensors.torch.load(data))

    def apply(self, decoded: State, live: State) -> None:
        copy_all(decoded, live)


@dataclass(frozen=True, slots=True)
class Sparse:
    """Positions and values of what changed, tensor by tensor in one safetensors file, scattered by the replica."""

    find: baselines.Encode
    read: Callable[[Sequence[bytes], np.dtype[Any]], baselines.Changes]
    is_xor: bool = False

    def capture(self, old: State, new: State) -> tuple[State, State]:
        return old, new

    def encode(self, captured: tuple[State, State]) -> Files:
        return encode_tensors(self.find, *captured)

    def decode(self, files: Files, live: State) -> list[tuple[str, baselines.Changes]]:
        messages = read_tensors(files)
        changes = each(lambda name: self.read(messages[name], live[name].dtype), messages)
        return list(zip(messages, changes, strict=True))

    def apply(self, decoded: list[tuple[str, baselines.Changes]], live: State) -> None:
        for name, (changed, values) in decoded:
            bits = live[name].reshape(-1)
            new = bits[changed] ^ values if self.is_xor else values
            torch.from_numpy(bits.view(np.int16)).scatter_(
                0, torch.from_numpy(changed), torch.from_numpy(new.view(np.int16))
            )


class Pulse:
    """The trainer saves a checkpoint, and what changed is found behind it; the replica loads a whole new state dict."""

    def __init__(self, state: State, home: Path) -> None:
        self._home = home

    def capture(self, old: State, new: State) -> tuple[State, Path]:
        path = self._home / "captured" / WEIGHTS_NAME
        write_checkpoint(path, new, dtype=DTYPE)
        return old, path

    def encode(self, captured: tuple[State, Path]) -> Files:
        old, path = captured
        return encode_tensors(baselines.encode_narrow_gaps_zstd, old, read_checkpoint(path)[1])

    def decode(self, files: Files, live: State) -> State:
        messages = read_tensors(files)
        changed = each(lambda name: baselines.decode_gaps_zstd(live[name].reshape(-1), messages[name]), messages)
        return dict(zip(messages, changed, strict=True))

    def apply(self, decoded: State, live: State) -> None:
        copy_all(decoded, live)


class XorFolder:
    """Folders of XOR deltas, made and applied by cwtrain; the replica then loads its whole checkpoint again."""

    def __init__(self, state: State, home: Path) -> None:
        from cwtrain.hotload import WeightMirror

        self._home = home
        self._version = 0
        self._write(state)
        self._mirror = WeightMirror.create(self._folder(0), home / "mirror", version=_version(0), workers=THREADS)

    def capture(self, old: State, new: State) -> None:
        self._version += 1
        self._write(new)

    def encode(self, captured: None) -> Files:
        import shutil

        from cwtrain.hotload.delta import write_delta

        before, after, out = self._folder(self._version - 1), self._folder(self._version), self._home / "delta"
        names = {"version": _version(self._version), "base_version": _version(self._version - 1)}
        write_delta(before, after, out, workers=THREADS, **names)
        shutil.rmtree(before)
        return {path.name: path.read_bytes() for path in sorted(out.iterdir())}

    def decode(self, files: Files, live: State) -> None:
        folder = self._home / "fetched"
        folder.mkdir(exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        self._mirror.apply_delta(folder)

    def apply(self, decoded: None, live: State) -> None:
        copy_all(read_checkpoint(self._home / "mirror" / WEIGHTS_NAME)[1], live)

    def _folder(self, version: int) -> Path:
        return self._home / _version(version)

    def _write(self, state: State) -> None:
        folder = self._folder(self._version)
        write_checkpoint(folder / WEIGHTS_NAME, state, dtype=DTYPE)
        (folder / "config.json").write_text("{}")


class Fireworks:
    """The delta files of `fireworks_delta_compression`. It unpickles them: they must be made by this program."""

    def __init__(self, compression: str, home: Path) -> None:
        self._compression = compression
        self._path = home / "delta.safetensors"
        self._pool = ThreadPoolExecutor(THREADS)

    def capture(self, old: State, new: State) -> tuple[State, State]:
        return old, new

    def encode(self, captured: tuple[State, State]) -> Files:
        from fireworks_delta_compression import delta_compress_dicts_to_file

        old, new = (as_torch(state) for state in captured)
        delta_compress_dicts_to_file(
            src=old, dst=new, diff_file=str(self._path), compression_format=self._compression, executor=self._pool
        )
        return {self._path.name: self._path.read_bytes()}

    def decode(self, files: Files, live: State) -> State:
        from fireworks_delta_compression import delta_decompress_dict_from_file

        self._path.write_bytes(files[self._path.name])
        found = delta_decompress_dict_from_file(
            src=as_torch(live), diff_file=str(self._path), compression_format=self._compression, executor=self._pool
        )
        return as_bits(found)

    def apply(self, decoded: State, live: State) -> None:
        copy_all(decoded, live)


GAPS = "u16 gaps + bf16 (announced for TRL)"
XOR = "XOR + zstd-1 folder (cwtrain 1.0.2)"
ARC_V3 = "arc_v3 (Fireworks)"

# Where the order of the steps is from:
# - the announced design encodes and uploads before training goes on, and downloads inside the pause;
# - verl aborts requests around an update, and all ranks are in `send_weights` until it is over;
# - NeMo RL pauses generation until every payload is applied, and its refit is a step of the training loop;
# - grail (PULSE) hands a saved checkpoint to an upload process, and its miners update between two windows of work;
# - cwtrain is called in the training loop with a saved checkpoint; the engine prepares a folder, then loads it;
# - Fireworks' trainer saves a delta, and the deployment prepares it before it swaps.
WAYS = (
    Way("full file", "put", "apply", lambda state, home: Full(compressed=False)),
    Way("full + zstd-1", "put", "apply", lambda state, home: Full(compressed=True)),
    Way(
        "int32 + bf16 (SparseRL-Sync, verl)",
        "live",
        "fetch",
        lambda state, home: Sparse(baselines.encode_index_value, baselines.read_index_value),
    ),
    Way(GAPS, "put", "fetch", lambda state, home: Sparse(baselines.encode_gaps_u16, baselines.read_gaps)),
    Way("gaps + bf16, zstd-1 (PULSE)", "captured", "fetch", Pulse),
    Way(XOR, "put", "apply", XorFolder),
    Way(
        "u16 gaps + XOR, zstd-1 (NeMo RL)",
        "live",
        "fetch",
        lambda state, home: Sparse(baselines.encode_gaps_xor_zstd, baselines.read_gaps_zstd, is_xor=True),
    ),
    Way("arc_v2 (Fireworks)", "put", "apply", lambda state, home: Fireworks("arc_v2", home)),
    Way(ARC_V3, "put", "apply", lambda state, home: Fireworks("arc_v3", home)),
)


def encode_tensors(find: baselines.Encode, old: State, new: State) -> Files:
    """One safetensors file with the sections of every tensor that changed."""
    sections: dict[str, Bits] = {}
    messages = each(lambda name: find(old[name].reshape(-1), new[name].reshape(-1)), old)
    for name, message in zip(old, messages, strict=True):
        if any(message):
            sections |= {f"{name}:{n}": np.frombuffer(data, np.uint8) for n, data in enumerate(message)}
    return {"delta.safetensors": save_bytes(sections)}


def read_tensors(files: Files) -> dict[str, list[bytes]]:
    """Invert `encode_tensors`."""
    messages: dict[str, list[bytes]] = {}
    sections = load_bytes(files["delta.safetensors"])
    for key in sorted(sections, key=lambda key: (key.rpartition(":")[0], int(key.rpartition(":")[2]))):
        messages.setdefault(key.rpartition(":")[0], []).append(sections[key].tobytes())
    return messages


def as_torch(state: State) -> dict[str, torch.Tensor]:
    """See bits as bfloat16, without a copy."""
    return {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in state.items()}


def as_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    """See bfloat16 as bits, without a copy."""
    return {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in tensors.items()}


def copy_all(source: State, live: State) -> None:
    """Overwrite all weights."""
    for name, bits in live.items():
        torch.from_numpy(bits.view(np.int16)).copy_(torch.from_numpy(source[name].reshape(bits.shape).view(np.int16)))


def _version(number: int) -> str:
    return f"{number:06d}"
