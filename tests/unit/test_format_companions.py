import numpy as np
import pytest
from support.helpers import safetensors_bytes

from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError
from deltasync.format import limits
from deltasync.format.companions import read_files, write_files
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes

FILES = {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nb", "empty": b"", "naïve name.txt": b"x"}
BAD_PATHS = ["../x", "/etc/passwd", "a//b", ".hidden", "a/.b", "c:\\x", "x\n", "model.safetensors", "a/", ""]


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
