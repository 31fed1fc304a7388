"""The files beside the weights (configuration, tokenizer), so that a restored folder loads like the published one.

They travel as one safetensors file in which every file is a U8 tensor named by its path.
"""

from collections.abc import Collection, Mapping

from deltasync.arguments import described
from deltasync.errors import CorruptError, FormatError, InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes, parse_header
from deltasync.format.sealed import FORMAT

KIND = "files"

_CODE = (".bin", ".ckpt", ".h5", ".index.json", ".joblib", ".keras", ".pickle", ".pkl", ".pt", ".pth", ".py", ".so")
"""Pickles, programs, and indexes, which name the files that weights are loaded from."""

_CONFIGS = frozenset({"config.json", "adapter_config.json", "model_index.json", "params.json"})

_DEPTH_MAX = 16
_NAME_BYTES_MAX = 255
"""The length of a name that file systems allow."""


def require_files(files: Mapping[str, bytes]) -> None:
    """InvalidInputError, naming the file, unless these can be the files beside the weights."""
    if not isinstance(files, Mapping):
        raise InvalidInputError(f"files must map relative paths to bytes, not be {described(files)}")
    for path, data in files.items():
        if not isinstance(path, str):
            raise InvalidInputError(f"the paths of files must be strings, not {described(path)}")
        if not isinstance(data, bytes | bytearray | memoryview):
            hint = "encode it: text.encode()" if isinstance(data, str) else "read it: path.read_bytes()"
            raise InvalidInputError(f"files[{path!r:.200}] must be bytes, not {described(data)}", hint=hint)
    refused = _refused_path(files)
    if refused is not None:
        raise InvalidInputError(
            f"{refused!r:.200} must be a relative path inside the folder, and not name weights", rule="files.path"
        )
    nbytes = sum(memoryview(data).nbytes for data in files.values())
    if nbytes > limits.FILES_BYTES_MAX:
        raise InvalidInputError(
            f"the files beside the weights have {nbytes} bytes; at most {limits.FILES_BYTES_MAX} are allowed",
            rule="files.size",
            hint="move what is not needed to load the model out of the folder",
        )


def write_files(files: Mapping[str, bytes]) -> bytes:
    """Files by their relative path, as one object; equal files give equal bytes."""
    require_files(files)
    ordered = sorted((path, bytes(data)) for path, data in files.items())
    specs = [TensorSpec(path, DTYPES["U8"], (len(data),)) for path, data in ordered]
    return header_bytes(specs, {"format": FORMAT, "kind": KIND}) + b"".join(data for _, data in ordered)


def read_files(data: bytes | memoryview) -> dict[str, bytes]:
    """The inverse of `write_files`. No path leads out of the folder, and none names weights."""
    if len(data) > limits.FILES_BYTES_MAX + limits.SAFETENSORS_HEADER_BYTES_MAX:
        raise CorruptError(
            f"the files beside the weights have {len(data)} bytes, which are too many", rule="files.size"
        )
    header = parse_header(data)
    if header.metadata.get("format") != FORMAT or header.metadata.get("kind") != KIND:
        raise FormatError(f"the object must have the format {FORMAT} and the kind {KIND}", rule="files.format")
    refused = _refused_path([entry.name for entry in header.entries])
    for entry in header.entries:
        if entry.name == refused or entry.dtype.name != "U8" or len(entry.shape) != 1:
            raise CorruptError(f"{entry.spec!s:.200} cannot be a file beside the weights", rule="files.path")
    return {entry.name: bytes(data[entry.begin : entry.end]) for entry in header.entries}


def is_safe_path(path: str) -> bool:
    """Whether a path stays inside its folder on every system, is not hidden, and is not a file of weights."""
    if len(path) > _DEPTH_MAX * (_NAME_BYTES_MAX + 1):
        return False
    parts = path.split("/")
    if not path.isprintable() or any(c in path for c in '\\:*?"<>|') or path.lower().endswith(".safetensors"):
        return False
    names = all(part and not part.startswith(".") and len(part.encode()) <= _NAME_BYTES_MAX for part in parts)
    return names and len(parts) <= _DEPTH_MAX


def has_config(files: Collection[str]) -> bool:
    """Whether a folder with these files beside its weights has a configuration, without which no engine loads it."""
    return not _CONFIGS.isdisjoint(files)


def can_run_code(path: str) -> bool:
    """Whether what loads the folder may unpickle or run the file, or be led by it to files that it may unpickle."""
    return path.lower().endswith(_CODE)


def _refused_path(paths: Collection[str]) -> str | None:
    """A path that is not safe, or that other paths use as a folder."""
    unsafe = next((path for path in paths if not is_safe_path(path)), None)
    if unsafe is not None:
        return unsafe
    # Safe paths are short and have few parts: one of many slashes would have as many prefixes, each as long.
    folders = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    return next((path for path in paths if path in folders), None)
