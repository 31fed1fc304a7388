"""How a model is cut into windows, without vLLM: what vLLM builds of them, the tests of the plugin and the zoo show."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.vllm import worker
from deltasync.vllm.worker import Twins, Window

LAYERS = 28


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Twins:
    """Twins of a model with 28 layers, each of which can be built without the others. A window is 1,000 bytes."""
    monkeypatch.setattr(worker, "_WINDOW_BYTES", 1000)
    monkeypatch.setattr(Twins, "_has", lambda self, window, layers: True)
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: LAYERS)
    parallel = SimpleNamespace(enable_eplb=False)
    return Twins(SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=None))


def layout(*, embeddings: int, layer: int) -> Layout:
    """Sizes in bytes."""
    names = {"model.embed_tokens.weight": embeddings, "model.norm.weight": 2}
    names |= {f"model.layers.{n}.mlp.weight": layer for n in range(LAYERS)}
    return Layout.of(TensorSpec(name, DTYPES["BF16"], (size // 2,)) for name, size in names.items())


def nbytes(window: Window) -> int:
    return sum(spec.nbytes for spec in window.tensors)


@pytest.mark.parametrize(
    ("embeddings", "layer", "first"),
    [(100, 100, 8), (998, 100, 1), (5000, 100, 1), (100, 3000, 1), (0, 60, 16)],
)
def test_a_window_has_a_bounded_size(built: Twins, embeddings: int, layer: int, first: int) -> None:
    given = layout(embeddings=embeddings, layer=layer)
    windows = built.windows(given)
    assert (windows[0].first, windows[0].end, windows[-1].end) == (0, first, LAYERS)
    assert all(a.end == b.first for a, b in pairwise(windows))
    assert sorted(spec.name for window in windows for spec in window.tensors) == [t.name for t in given.tensors]
    assert nbytes(windows[0]) <= max(1000, embeddings + 2 + layer)
    assert all(nbytes(window) <= max(1000, layer) for window in windows[1:])


def test_a_small_model_is_one_window(built: Twins) -> None:
    assert built.windows(layout(embeddings=100, layer=20)) == [Window(layout(embeddings=100, layer=20).tensors)]


def test_a_model_that_cannot_be_built_with_few_layers(built: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first layers have no experts, and vLLM looks for some."""
    monkeypatch.setattr(Twins, "_has", lambda self, window, layers: window.end > 4)
    given = layout(embeddings=5000, layer=100)
    assert [(window.first, window.end) for window in built.windows(given)] == [(0, 10), (10, 20), (20, 28)]
    monkeypatch.setattr(Twins, "_has", lambda self, window, layers: window.end == layers)
    assert built.windows(given) == [Window(given.tensors)]
