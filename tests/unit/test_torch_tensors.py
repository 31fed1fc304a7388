"""Torch tensors as the core sees them: every type, any strides, casts as torch makes them, and the names."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.changes import by_tensor
from torch import nn

from deltasync.blocks import layout_runs
from deltasync.errors import InvalidInputError
from deltasync.format.layout import DTYPES
from deltasync.format.weights import Weights, zeros
from deltasync.torch import tensors as module
from deltasync.torch.tensors import TorchWeights, host_bits, layout_of, named_tensors, unwrapped
from deltasync.trainer import capture as capturing
from deltasync.trainer.capture import capture, copy_into

TYPES = {name: dtype for dtype, name in module._NAMES.items()}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits, NaNs and infinities among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in C order, by torch alone."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def filled(source: TorchWeights) -> Weights:
    target = zeros(source.layout)
    copy_into(target, source)
    return target


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(1, 2, 0),
    "rows left out": lambda t: t[::2],
    "columns": lambda t: t[:, 1:3, ::2],
    "one dimension, strided": lambda t: t.reshape(-1)[1::3],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "one element": lambda t: t[0, 0, 0],
    "none": lambda t: t[:0],
    "none, transposed": lambda t: t[:, :0].transpose(0, 2),
}


@pytest.fixture(params=[1 << 19, 64, 7], ids=lambda size: f"chunks of {size}")
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "CACHED_ELEMENTS", request.param)
    monkeypatch.setitem(layout_runs.__kwdefaults__, "elements", 3 * request.param)


def test_every_type_of_the_format_has_one_in_torch() -> None:
    assert set(TYPES) == set(DTYPES)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES.keys())
def test_every_type_and_stride(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    old, new = (view(random_bits((6, 5, 4), dtype, seed)) for seed in (0, 1))
    shadow = filled(TorchWeights({"a": old}))
    assert shadow.arrays[0].tobytes() == raw_bytes(old)
    found = by_tensor(shadow.layout, capture(shadow, TorchWeights({"a": new})))
    a, b = (np.frombuffer(raw_bytes(t), shadow.arrays[0].dtype) for t in (old, new))
    at = np.flatnonzero(a != b)
    indices, values = found.get("a", (np.empty(0, int), np.empty(0, int)))
    assert (indices.tolist(), values.tolist()) == (at.tolist(), b[at].tolist())


def test_contiguous_tensors_are_read_in_place() -> None:
    tensor = torch.ones(4, 6)
    source = TorchWeights({"w": tensor})
    region = source.region(np.array([[0, 2, 9]]))
    assert not source.is_converted
    assert np.shares_memory(region.arrays[0], tensor.numpy())
    assert TorchWeights({"w": tensor.t()}).is_converted


def rounding_cases() -> torch.Tensor:
    """Every upper half of a float32 with lower halves around the middle between two neighbours."""
    upper = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(6)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]).repeat(1 << 16)
    bits = upper << 16 | lower
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def rounded_by_hand(values: torch.Tensor) -> np.ndarray:
    """To the nearest, of two equally near ones to the even; for what is not a NaN."""
    bits = values.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.fixture(params=[1, 2, 8], ids=lambda count: f"{count} threads of torch")
def _torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_torch_threads")
@pytest.mark.parametrize("chunk", [1 << 19, 100_003, 40_000])
def test_rounds_as_torch_does(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also subnormal numbers, infinities, and the largest numbers, which become infinite."""
    monkeypatch.setattr(capturing, "CACHED_ELEMENTS", chunk)
    master = rounding_cases()
    source = TorchWeights({"w": master}, cast=torch.bfloat16)
    assert source.layout.tensors[0].dtype.name == "BF16"
    (bits,) = filled(source).arrays
    by_torch = master.to(torch.bfloat16)
    number = ~torch.isnan(master).numpy()
    assert np.array_equal(bits[number], rounded_by_hand(master)[number])
    assert np.array_equal(bits[number], by_torch.view(torch.int16).numpy().view(np.uint16)[number])
    # Which NaN it becomes is up to torch and may differ from place to place: that it is one is not.
    published = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    assert torch.isnan(published).numpy().tolist() == (~number).tolist()
    shadow = filled(source)
    assert capture(shadow, source) == []
    shadow.arrays[0][::1000] ^= 1
    found = by_tensor(shadow.layout, capture(shadow, source))
    assert found["w"][0].tolist() == list(range(0, len(bits), 1000))
    assert np.array_equal(found["w"][1], bits[::1000])


@pytest.mark.usefixtures("every_kernels")
@pytest.mark.parametrize("is_uniform", [True, False], ids=["one NaN", "NaNs that differ"])
def test_the_kernel_rounds_as_torch_does(is_uniform: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit, those of NaNs too. Where torch makes several NaNs, torch casts."""
    if not is_uniform:
        monkeypatch.setattr(module, "_nan_bits", lambda: None)
    monkeypatch.setitem(layout_runs.__kwdefaults__, "elements", 100_003)
    tensors = {"a": rounding_cases(), "b": torch.tensor(0.1), "c": torch.full((3, 5), -torch.nan)}
    source = TorchWeights(tensors, cast=torch.bfloat16)
    runs = np.array([[0, 7, 9], [1, 0, 1]])
    assert (source.masters(runs) is not None) == is_uniform
    by_torch = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    expected = filled(TorchWeights(by_torch))
    shadow = Weights(expected.layout, tuple(~array for array in expected.arrays))
    found = by_tensor(shadow.layout, capture(shadow, source))
    for spec, bits in zip(expected.layout.tensors, expected.arrays, strict=True):
        assert np.array_equal(found[spec.name][1], bits), spec
    assert capture(expected, source) == []


def test_only_what_is_just_to_be_rounded_goes_to_the_kernel() -> None:
    tensors = {
        "a": torch.zeros(4, 3),
        "b": torch.zeros(4, 3).t(),
        "c": torch.zeros(3, dtype=torch.bfloat16),
        "d": torch.zeros(3, dtype=torch.float64),
    }
    source = TorchWeights(tensors, cast=torch.bfloat16)
    is_master = [source.masters(np.array([[ordinal, 0, 3]])) is not None for ordinal in range(len(tensors))]
    assert is_master == [True, False, False, False]
    assert source.masters(np.array([[0, 0, 3], [1, 0, 3]])) is None
    assert TorchWeights(tensors, cast=torch.float16).masters(np.array([[0, 0, 3]])) is None


CASTS = [
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.int64, torch.int64),
    (torch.bool, torch.bool),
]


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(("given", "published"), CASTS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("view", [VIEWS["as it is"], VIEWS["transposed"]], ids=["as it is", "transposed"])
def test_casts_floating_point_only(given: torch.dtype, published: torch.dtype, view: Any) -> None:
    tensor = view((torch.arange(-60, 60).reshape(6, 5, 4) / 7).to(given))
    cast = published if given.is_floating_point else torch.bfloat16
    source = TorchWeights({"w": tensor}, cast=cast)
    (bits,) = filled(source).arrays
    assert bits.tobytes() == raw_bytes(tensor.to(published))
    assert source.layout.tensors[0].dtype == DTYPES[module._NAMES[published]]


def test_one_region_of_cast_and_plain_and_strided_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "CACHED_ELEMENTS", 50)
    tensors = {
        "a": torch.randn(13, 7),
        "b": torch.randn(13, 7).to(torch.bfloat16),
        "c": torch.randn(13, 7).t(),
        "d": torch.randn(13, 7).to(torch.bfloat16).t(),
        "e": torch.tensor(0.1),
    }
    source = TorchWeights(tensors, cast=torch.bfloat16)
    assert {spec.dtype.name for spec in source.layout.tensors} == {"BF16"}
    shadow = filled(source)
    for spec, bits in zip(source.layout.tensors, shadow.arrays, strict=True):
        assert bits.tobytes() == raw_bytes(tensors[spec.name].to(torch.bfloat16)), spec
    assert capture(shadow, source) == []


def test_a_type_that_cannot_be_published() -> None:
    with pytest.raises(InvalidInputError, match=r"'w' has the type torch\.complex64"):
        layout_of({"w": torch.zeros(3, dtype=torch.complex64)})


def test_bits_of_a_tensor_on_the_host() -> None:
    tensor = torch.tensor([[1.0, -0.0], [float("nan"), 2.0]], dtype=torch.bfloat16).t()
    bits = host_bits(tensor, DTYPES["BF16"])
    assert bits.tolist() == [0x3F80, bits[1], 0x8000, 0x4000]
    assert bits[1] & 0x7FFF > 0x7F80


class Tied(nn.Module):
    """The head has the embedding's weights, under a name that comes first."""

    _tied_weights_keys = ("a_head.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.a_head = nn.Linear(4, 10, bias=False)
        self.embed = nn.Embedding(10, 4)
        self.a_head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_tied_weights_come_once_under_the_name_of_the_checkpoint() -> None:
    assert list(named_tensors(Tied())) == ["kept", "embed.weight"]


def test_of_a_state_dict_the_first_name_is_kept() -> None:
    """It does not say which one the checkpoint uses. transformers has the embedding first."""
    assert list(named_tensors(Tied().state_dict())) == ["kept", "a_head.weight"]


SAME_MEMORY: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "another shape": (W := torch.ones(4, 6), W.reshape(6, 4)),
    "another order": (W, W.t()),
    "a part": (W, W[:2]),
    "none": (W[:0], W[:0]),
}


@pytest.mark.parametrize(("one", "other"), SAME_MEMORY.values(), ids=SAME_MEMORY.keys())
def test_other_views_of_the_same_memory_are_not_tied(one: torch.Tensor, other: torch.Tensor) -> None:
    assert set(named_tensors({"one": one, "other": other})) == {"one", "other"}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_names_are_those_that_transformers_saves(kind: str, is_tied: bool, tmp_path: Any) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=40, tie_word_embeddings=is_tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        names = set(saved.keys())
        found = named_tensors(model)
        assert set(found) == names
        assert ("lm_head.weight" in names) == (not is_tied)
        for name, tensor in found.items():
            assert raw_bytes(saved.get_tensor(name)) == raw_bytes(tensor)
    # The same from its state dict, and from what torch.compile makes of it.
    assert set(named_tensors(model.state_dict())) == names
    assert set(named_tensors(torch.compile(model))) == names


def test_wrappers_are_taken_off(tmp_path: Any) -> None:
    import torch.distributed as dist

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    plain = list(named_tensors(model))
    assert plain == ["0.weight", "0.bias", "1.weight", "1.bias"]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        for module in (wrapped, torch.compile(model), torch.compile(wrapped)):
            assert unwrapped(module) is model
            assert list(named_tensors(module)) == plain
    finally:
        dist.destroy_process_group()


def test_a_layer_that_was_compiled_by_itself_keeps_its_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    plain = list(named_tensors(model))
    model[1] = torch.compile(model[1])
    assert list(named_tensors(model)) == plain


def test_gradients_are_no_part_of_it() -> None:
    model = nn.Linear(3, 2)
    assert not any(tensor.requires_grad for tensor in named_tensors(model).values())


class WithExtra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"scale": 3}

    def set_extra_state(self, state: object) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w": [1.0]}, "'w' is a list"),
        ({3: torch.ones(2)}, "3 is a Tensor"),
        (WithExtra(2, 2), "'_extra_state' is a dict"),
    ],
    ids=["a list", "a number as a name", "extra state"],
)
def test_what_is_not_a_tensor_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        named_tensors(given)
