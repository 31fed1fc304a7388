"""The files beside the weights (configuration, tokenizer), so that a restored folder loads like the published one.

They travel as one safetensors file in which every file is a U8 tensor named by its path.
"""

from collections.abc import Mapping

from deltasync.errors import CorruptError, FormatError, InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes, parse_header
from deltasync.format.sealed import FORMAT

KIND = "files"


def write_files(files: Mapping[str, bytes]) -> bytes:
    """Files by their relative path, as one object; equal files give equal bytes."""
    for path in files:
        if not is_safe_path(path):
            raise InvalidInputError(
                f"{path!r:.200} must be a relative path inside the folder, and not name weights", rule="files.path"
            )
    nbytes = sum(map(len, files.values()))
    if nbytes > limits.FILES_BYTES_MAX:
        raise InvalidInputError(
            f"the files beside the weights have {nbytes} bytes; at most {limits.FILES_BYTES_MAX} are allowed",
            rule="files.size",
            hint="move what is not needed to load the model out of the folder",
        )
    ordered = sorted(files.items())
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
    for entry in header.entries:
        if not is_safe_path(entry.name) or entry.dtype.name != "U8" or len(entry.shape) != 1:
            raise CorruptError(f"{entry.spec!s:.200} cannot be a file beside the weights", rule="files.path")
    return {entry.name: bytes(data[entry.begin : entry.end]) for entry in header.entries}


def is_safe_path(path: str) -> bool:
    """Whether a path stays inside its folder on every system, is not hidden, and is not a file of weights."""
    parts = path.split("/")
    plain = path.isprintable() and not any(c in path for c in '\\:*?"<>|')
    return plain and all(part and not part.startswith(".") for part in parts) and not path.endswith(".safetensors")
