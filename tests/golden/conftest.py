"""What all golden tests need: nothing from the environment, and payloads that do not depend on the build of zlib."""

import os
import zlib
from collections.abc import Iterator

import golden
import pytest


@pytest.fixture(scope="module", autouse=True)
def fixed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DELTASYNC_")]:
            patch.delenv(name)
        patch.setattr(zlib, "compress", golden.stored)
        yield
