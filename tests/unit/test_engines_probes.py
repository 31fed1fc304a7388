"""The map that is read from twins: right for every way of loading, and the live model is only looked at."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from served_model import (
    HIDDEN,
    SHAPES,
    Loader,
    Served,
    ServedTwins,
    casting,
    into,
    moving,
    plain,
    quantizing,
    raising,
    tensors,
)

from deltasync.engines import probes
from deltasync.engines.memory import Memory
from deltasync.engines.probes import Alphabet, WeightMap, map_weights
from deltasync.errors import MismatchError
from deltasync.format.layout import DTYPES, Layout
from deltasync.torch.tensors import as_bits, layout_of, torch_dtype

WORKERS = [(0, 1), (0, 2), (1, 2)]


def weight_map(model: Served, layout: Layout) -> WeightMap:
    twins = ServedTwins(model)
    (window,) = twins.windows(layout)
    return map_weights(Memory(model), lambda weights: twins.build(weights, window), layout.tensors, twins.dtype)


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.name != "BOOL"], ids=lambda d: d.name)
def test_digits_survive_casts(dtype, served: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    alphabet = Alphabet.of(dtype, served)
    letters = 1 << alphabet.digit_bits
    for first, count in ((0, 3 * letters), (letters * 5 + 7, letters), (letters**2 - 3, 9)):
        for digit in range(3):
            weights = alphabet.weights(digit, first, count)
            wanted = (np.arange(first, first + count) >> (digit * alphabet.digit_bits)) % letters
            assert alphabet.decode(weights).tolist() == wanted.tolist()
            if torch_dtype(dtype).is_floating_point and dtype.width > 1:
                assert alphabet.decode(weights.to(served)).tolist() == wanted.tolist()
    assert (alphabet.decode(alphabet.weights(None, 0, 5000)) == -1).all()


@pytest.mark.parametrize("chunk", [3, 64, 1 << 22])
@pytest.mark.parametrize("run", [1, 1 << 12])
@pytest.mark.parametrize(("rank", "size"), WORKERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_the_map_is_where_the_loader_puts_things(
    rank: int, size: int, dtype: torch.dtype, chunk: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the bits are: each element is where the map says, and every other element of memory is a constant."""
    monkeypatch.setattr(probes, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(probes, "_RUN_ELEMENTS", run)
    state = tensors(0, dtype=dtype)
    model = Served(rank=rank, size=size, dtype=dtype).load(state.items())
    result = weight_map(model, layout_of(state))
    assert result.computed == []
    assert result.placements.keys() == SHAPES.keys() - {"nothing"}
    memory = [span.bits.clone().numpy() for span in Memory(model).spans]
    for name, placements in result.placements.items():
        bits = as_bits(state[name]).numpy()
        for placement in placements:
            which, places = placement.locate(np.arange(bits.size))
            assert (memory[placement.storage][places] == bits[which]).all(), name
            memory[placement.storage][places] = 0
    elements = sum(placement.elements for placements in result.placements.values() for placement in placements)
    assert result.elements == elements
    # Padding is zero, and buffers are not weights.
    assert not any(flat.any() for flat in memory if flat.itemsize == dtype.itemsize and flat.size != 6)


def test_the_live_model_is_only_looked_at() -> None:
    names = ["cast", "quantized"]
    model = Served(
        odd={"cast": (torch.ones(4, HIDDEN), casting), "quantized": (torch.ones(4, 8, dtype=torch.int8), quantizing)},
    ).load(tensors(1, *names).items())
    before, places = model.bits(), {name: p.data_ptr() for name, p in model.named_parameters()}
    weight_map(model, layout_of(tensors(0, *names)))
    after = model.bits()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert places == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_the_head_of_a_tied_model_goes_nowhere() -> None:
    state = {**tensors(), "lm_head.weight": torch.zeros(22, HIDDEN)}
    model = Served().load(state.items())
    assert "lm_head.weight" not in weight_map(model, layout_of(state)).placements


def moving_and_casting(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data, loaded.to(parameter.device, torch.float32).to(parameter.dtype))


def by_way_of_its_own(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    own = torch.zeros(6, HIDDEN, dtype=loaded.dtype)
    own[:4].copy_(loaded)
    into(parameter.data, own[:4])


def by_numbers(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data[torch.tensor([3, 1, 0, 2])] = loaded


def into_an_argument(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    torch.mul(loaded, 2, out=parameter.data)


def adding(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.zero_()
    parameter.data.add_(loaded)


def as_bytes(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data.view(torch.uint8), loaded.view(torch.uint8))


def altering(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    loaded.mul_(2)
    into(parameter.data, loaded)


def half_and_half(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data[:2], loaded[:2])
    into(parameter.data[2:], loaded[2:] * 2)


def in_two_parts(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    for half, part in zip(parameter.data.chunk(2, 1), loaded.chunk(2, 1), strict=True):
        into(half, part)


def transposing(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data.view(HIDDEN, 4), loaded.t())


def raising_half_way(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    half_and_half(parameter, loaded)
    raising(parameter, loaded)


LOADERS: dict[str, tuple[Loader, str]] = {
    "plain": (plain, "copied"),
    "moving": (moving, "copied"),
    "in two parts": (in_two_parts, "copied"),
    "transposing": (transposing, "copied"),
    "casting to the same type": (casting, "copied"),
    "moving and casting": (moving_and_casting, "copied"),
    "by way of its own memory": (by_way_of_its_own, "copied"),
    "by numbers": (by_numbers, "copied"),
    "adding": (adding, "copied"),
    "many at once": (lambda p, w: torch._foreach_copy_([p.data], [w]), "copied"),
    "in order": (lambda p, w: into(p.data, w.t().contiguous().t()), "copied"),
    "as bytes": (as_bytes, "copied"),
    "broadcasting": (lambda p, w: p.data.copy_(w[:1]), "copied"),
    "quantizing": (lambda p, w: plain(p, (w.float() * 10).round().to(p.dtype)), "computed"),
    "into an argument": (into_an_argument, "computed"),
    "altering": (altering, "computed"),
    "half and half": (half_and_half, "computed"),
    "numbers of bits": (lambda p, w: into(p.data, w.view(torch.int16)), "computed"),
    "the sum of all": (lambda p, w: p.data.fill_(w.sum().item()), "computed"),
    "raising": (raising, "refused"),
    "raising half way": (raising_half_way, "refused"),
    "too large": (lambda p, w: into(p.data, w.narrow(0, 0, 9)), "refused"),
    "nothing at all": (lambda p, w: None, "refused"),
}


@pytest.mark.parametrize(("loader", "kind"), LOADERS.values(), ids=LOADERS.keys())
def test_what_a_loader_does_is_found_out(loader: Loader, kind: str) -> None:
    """The odd one comes first and last, with others around it that are found all the same."""
    names = ["a", "z"]
    state = tensors(3, *names)
    model = Served(odd={name: (torch.ones(4, HIDDEN, dtype=torch.bfloat16), loader) for name in names})
    if kind == "refused":
        with pytest.raises(MismatchError, match=r"a\.weight"):
            weight_map(model, layout_of(state))
        return
    model.load(state.items())
    result = weight_map(model, layout_of(state))
    live = Memory(model)
    own = [live.ordinals[f"{name}.weight"] for name in names]
    assert result.computed == (sorted(own) if kind == "computed" else [])
    for ordinal in own:
        placements = [p for found in result.placements.values() for p in found if p.storage == ordinal]
        assert sum(p.elements for p in placements) == (4 * HIDDEN if kind == "copied" else 0) or kind == "computed"
    assert result.placements.keys() - {"a.weight", "z.weight"} == SHAPES.keys() - {"nothing"}


MISSING: dict[str, Iterable[str]] = {
    "one": ["norm.weight"],
    "a part of a fused one": ["k.weight"],
    "all that go into one": ["packed.a", "packed.b"],
    "an expert": ["experts.1.up.weight"],
}


@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING.keys())
def test_parameters_that_nothing_goes_to_are_refused(missing: Iterable[str]) -> None:
    """Their memory holds what the checkpoint had that the server was started with."""
    state = tensors(0)
    model = Served().load(state.items())
    given = {name: tensor for name, tensor in state.items() if name not in missing}
    with pytest.raises(MismatchError, match="the feed has nothing for elements of the model's parameter"):
        weight_map(model, layout_of(given))


def test_memory_that_is_never_initialized_is_refused() -> None:
    """A twin shows it even if the live model happens to hold the same bits."""

    class Uninitialized(Served):
        def again(self) -> "Served":
            twin = super().again()
            twin.norm.weight.data = torch.empty(HIDDEN, dtype=torch.bfloat16)
            return twin

    state = tensors(0)
    model = Uninitialized().load(state.items())
    model.norm.weight.data.fill_(float("nan"))
    del state["norm.weight"]
    with pytest.raises(MismatchError, match=r"norm\.weight"):
        weight_map(model, layout_of(state))


def test_memory_that_is_computed_from_nothing_is_refused() -> None:
    """As by quantizing while loading, where one of the tensors that are fused is missing."""

    class Quantized(Served):
        def pack(self) -> None:
            super().pack()
            scale = self.qkv.weight.data.float().abs().amax(dim=1)
            self.qkv.scale = torch.nn.Parameter(scale, requires_grad=False)

        def again(self) -> "Served":
            twin = Quantized(rank=self.rank, size=self.size)
            twin.qkv.weight.data = torch.empty_like(twin.qkv.weight.data)
            return twin

    state = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in tensors(0).items()}
    model = Quantized().load(state.items())
    assert weight_map(model, layout_of(state)).computed == [Memory(model).ordinals["qkv.scale"]]
    del state["k.weight"]
    with pytest.raises(MismatchError, match=r"qkv\.(weight|scale)"):
        weight_map(model, layout_of(state))


def test_a_model_that_shares_memory_since_is_refused() -> None:
    """vLLM ties a head whose values happen to be those of the embeddings."""
    state = tensors(0)
    model = Served().load(state.items())
    model.norm.weight = model.scale.weight
    with pytest.raises(MismatchError, match=r"in another form"):
        weight_map(model, layout_of(state))


def test_derived_memory_in_attributes_is_found() -> None:
    """Copies and results that vLLM keeps outside of parameters: one is mapped, one is computed, one is a number."""

    class Derived(Served):
        def pack(self) -> None:
            super().pack()
            self.norm.plain = [self.qkv.weight.data.t().contiguous()]
            self.norm.sinks = self.norm.weight.data.float() * 2

        def again(self) -> "Served":
            return Derived(rank=self.rank, size=self.size)

    state = tensors(0)
    model = Derived().load(state.items())
    result = weight_map(model, layout_of(state))
    live = Memory(model)
    assert result.computed == [live.ordinals["norm.sinks"]]
    transposed = [c for c in result.placements["q.weight"] if c.storage == live.ordinals["norm.plain.0"]]
    assert sum(placement.elements for placement in transposed) == 12 * HIDDEN

    class Numbered(Derived):
        def pack(self) -> None:
            super().pack()
            self.norm.largest = float(self.norm.weight.data.float().abs().nan_to_num().max())

        def again(self) -> "Served":
            return Numbered(rank=self.rank, size=self.size)

    with pytest.raises(MismatchError, match=r"keeps the number 'norm\.largest'"):
        weight_map(Numbered().load(state.items()), layout_of(state))
