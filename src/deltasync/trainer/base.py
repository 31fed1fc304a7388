"""What the publishers of torch models share: the store that they may own, and where they compare."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Literal, Self

import torch

from deltasync.store.opening import open_store
from deltasync.store.protocol import Store
from deltasync.trainer.device import DeviceCapture

CaptureOn = Literal["host", "device", "device_with_host_shadow"]


class TorchPublisher(ABC):
    """A context manager that closes at its end; a store given by its URL is closed with it."""

    def __init__(self, store: Store | str, *, dtype: torch.dtype | None, capture_on: CaptureOn) -> None:
        self._store = open_store(store) if isinstance(store, str) else store
        self._owns_store = isinstance(store, str)
        self._dtype = dtype
        self._on_device = (
            None if capture_on == "host" else DeviceCapture("device" if capture_on == "device" else "host")
        )

    @abstractmethod
    def _finish(self) -> None:
        """Finish what is in flight and give back the feed."""

    def close(self) -> None:
        """Finish what is in flight, anchors included, and give back the feed."""
        self._finish()
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
