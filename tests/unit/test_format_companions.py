import tracemalloc

import numpy as np
import pytest
from support.helpers import safetensors_bytes

from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError
from deltasync.format import limits
from deltasync.format.companions import can_run_code, read_files, write_files
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes

FILES = {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nb", "empty": b"", "naïve name.txt": b"x"}
BAD_PATHS = [
    *(
        "../x",
        "/etc/passwd",
        "a//b",
        ".hidden",
        "a/.b",
        "c:\\x",
        "x\n",
        "model.safetensors",
        "MODEL.SAFETENSORS",
        "a/",
        "",
    ),
    *("a/" * 500 + "b", "a/" * 16 + "b", "x" * 256, "é" * 128),
]


def test_round_trip() -> None:
    data = write_files(FILES)
    assert read_files(data) == FILES
    assert write_files(dict(reversed(FILES.items()))) == data
    assert read_files(write_files({})) == {}


@pytest.mark.parametrize("path", BAD_PATHS)
def test_paths_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(InvalidInputError):
        write_files({path: b""})
    spec = TensorSpec(path, DTYPES["U8"], (0,))
    with pytest.raises(CorruptError) as caught:
        read_files(header_bytes([spec], {"format": "deltasync/1", "kind": "files"}))
    assert caught.value.rule == "files.path"


def test_a_path_of_slashes_takes_little_memory() -> None:
    """It has as many prefixes as characters."""
    spec = TensorSpec("/" * 20_000, DTYPES["U8"], (0,))
    data = header_bytes([spec], {"format": "deltasync/1", "kind": "files"})
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError) as caught:
            read_files(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.rule == "files.path"
    assert peak < 50 * len(data)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (safetensors_bytes({"a": np.zeros(3, np.uint8)}), FormatError),
        (write_files(FILES)[:-1], CorruptError),
        (b"", CorruptError),
        (
            header_bytes([TensorSpec("a", DTYPES["BF16"], (0,))], {"format": "deltasync/1", "kind": "files"}),
            CorruptError,
        ),
    ],
    ids=["another file", "truncated", "empty", "another type"],
)
def test_refused(data: bytes, error: type[DeltasyncError]) -> None:
    with pytest.raises(error):
        read_files(data)


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILES_BYTES_MAX", 3)
    with pytest.raises(InvalidInputError) as caught:
        write_files(FILES)
    assert caught.value.rule == "files.size"


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b/c", "a/b"), ("x", "a", "a/b/c")])
def test_a_path_cannot_be_a_file_and_a_folder(paths: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError):
        write_files(dict.fromkeys(paths, b""))
    specs = [TensorSpec(path, DTYPES["U8"], (0,)) for path in paths]
    with pytest.raises(CorruptError) as caught:
        read_files(header_bytes(specs, {"format": "deltasync/1", "kind": "files"}))
    assert caught.value.rule == "files.path"


@pytest.mark.parametrize(
    ("path", "can_run"),
    [
        ("modeling_x.py", True),
        ("a/b/tool.PY", True),
        ("pytorch_model.bin", True),
        ("training_args.bin", True),
        ("x.pt", True),
        ("x.pth", True),
        ("x.pkl", True),
        ("pytorch_model.bin.index.json", True),
        ("model.safetensors.index.json", True),
        ("config.json", False),
        ("tokenizer.model", False),
        ("index.json", False),
        ("merges.txt", False),
        ("py", False),
    ],
)
def test_what_can_run_code(path: str, can_run: bool) -> None:
    assert can_run_code(path) == can_run
