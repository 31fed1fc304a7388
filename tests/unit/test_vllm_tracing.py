"""The map that is taken from a loader: true for every way of loading, and nothing is written to take it."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from support.loading import HIDDEN, SHAPES, Loader, Served, casting, into, moving, plain, quantizing, raising, tensors

from deltasync.torch.tensors import layout_of
from deltasync.vllm.tracing import Storages, Trace, trace

WORKERS = [(0, 1), (0, 2), (1, 2)]


def traced(model: Served, names: Iterable[str] = ()) -> Trace:
    layout = layout_of(tensors(0, *names, dtype=model.norm.weight.dtype))
    return trace(model, layout, Storages(model))


@pytest.mark.parametrize(("rank", "size"), WORKERS)
def test_the_map_is_where_the_loader_puts_things(rank: int, size: int) -> None:
    """Every element of the checkpoint is a number of its own, which is then looked for in memory."""
    model, count, numbered = Served(rank=rank, size=size, dtype=torch.int64), 1, {}
    for name, shape in SHAPES.items():
        elements = int(np.prod(shape))
        numbered[name] = torch.arange(count, count + elements).view(shape)
        count += elements
    found = traced(model)
    model.load_weights(numbered.items())
    memory = [flat.clone() for flat in Storages(model).flat]
    for name, copies in found.copies.items():
        first = int(numbered[name].reshape(-1)[0])
        for copy in copies:
            indices = np.arange(numbered[name].numel())
            which, places = copy.locate(indices)
            assert (memory[copy.storage][places] == torch.from_numpy(indices[which] + first)).all(), name
            memory[copy.storage][places] = 0
    # All that the loader put anywhere was found. Buffers are not its own.
    assert not any(flat.any() for flat in memory if flat.dtype == torch.int64)
    assert found.errors == found.computed == {}
    assert found.copies.keys() == SHAPES.keys() - {"nothing"}


@pytest.mark.parametrize(("rank", "size"), WORKERS)
def test_nothing_is_written(rank: int, size: int) -> None:
    names = ["cast", "quantized"]
    model = Served(
        rank=rank,
        size=size,
        odd={"cast": (torch.ones(4, HIDDEN), casting), "quantized": (torch.ones(4, 8, dtype=torch.int8), quantizing)},
    ).load(tensors(1, *names))
    # Padding is bits like others, too.
    model.embed.weight.data[-1].view(torch.int16).fill_(-2)
    before, places = model.bits(), {name: p.data_ptr() for name, p in model.named_parameters()}
    traced(model, names)
    after = model.bits()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert places == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert all(p.grad_fn is None for p in model.parameters())


def test_tied_parameters_are_one_storage() -> None:
    model = Served()
    storages = Storages(model)
    assert storages.ordinal(model.head.weight) == storages.ordinal(model.embed.weight[3:])
    assert storages.ordinal(torch.zeros(3)) is None
    assert storages.ordinal(torch.zeros(3, device="meta")) is None
    # A buffer is memory as well; what has none is left out.
    assert len(storages.flat) == len(list(model.parameters())) - 1 + 1
    assert storages.ordinal(model.angles) is not None
    assert storages.ordinal(model.nothing.weight) is None


def test_the_head_of_a_tied_model_goes_nowhere() -> None:
    model = Served()
    layout = layout_of({**tensors(), "lm_head.weight": torch.zeros(22, HIDDEN)})
    found = trace(model, layout, Storages(model))
    assert "lm_head.weight" not in found.copies.keys() | found.computed.keys() | found.errors.keys()


def moving_and_casting(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data, loaded.to(parameter.device, torch.float32).to(parameter.dtype))


def broadcasting(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded[:1])


def looking(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.fill_(loaded.sum().item())


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


def many_at_once(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    torch._foreach_copy_([parameter.data], [loaded])


def in_order(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data, loaded.t().contiguous().t())


def as_bits(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data.view(torch.int16), loaded.view(torch.int16))


def as_bytes(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data.view(torch.uint8), loaded.view(torch.uint8))


def numbers_of_bits(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data, loaded.view(torch.int16))


def altering(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    loaded.mul_(2)
    into(parameter.data, loaded)


def half_and_half(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data[:2], loaded[:2])
    into(parameter.data[2:], loaded[2:] * 2)


def in_two_parts(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    for half, part in zip(parameter.data.chunk(2, 1), loaded.chunk(2, 1), strict=True):
        into(half, part)


def with_an_empty_part(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """A rank behind the end of the vocabulary has no rows of it."""
    into(parameter.data[:0], loaded[4:])
    into(parameter.data, loaded)


def raising_half_way(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    half_and_half(parameter, loaded)
    raising(parameter, loaded)


def too_large(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    into(parameter.data, loaded.narrow(0, 0, 9))


LOADERS: dict[str, tuple[Loader, str]] = {
    "plain": (plain, "copied"),
    "moving": (moving, "copied"),
    "as bits": (as_bits, "copied"),
    "in two parts": (in_two_parts, "copied"),
    "with an empty part": (with_an_empty_part, "copied"),
    "casting to the same type": (casting, "copied"),
    "moving and casting": (moving_and_casting, "computed"),
    "quantizing": (lambda p, w: plain(p, (w.float() * 10).round().to(p.dtype)), "computed"),
    "broadcasting": (broadcasting, "computed"),
    "by way of its own memory": (by_way_of_its_own, "computed"),
    "by numbers": (by_numbers, "computed"),
    "into an argument": (into_an_argument, "computed"),
    "adding": (adding, "computed"),
    "many at once": (many_at_once, "computed"),
    "in order": (in_order, "computed"),
    "as bytes": (as_bytes, "computed"),
    "numbers of bits": (numbers_of_bits, "computed"),
    "altering": (altering, "computed"),
    "half and half": (half_and_half, "computed"),
    "looking": (looking, "somewhere"),
    "raising": (raising, "error"),
    "raising half way": (raising_half_way, "error"),
    "too large": (too_large, "error"),
}


@pytest.mark.parametrize(("loader", "kind"), LOADERS.values(), ids=LOADERS.keys())
def test_tensors_that_are_not_copied_are_reported(loader: Loader, kind: str) -> None:
    """The odd one comes first and last, with others around it that must be found all the same."""
    names = ["a", "z"]
    model = Served(odd={name: (torch.ones(4, HIDDEN, dtype=torch.bfloat16), loader) for name in names})
    before = model.bits()
    found = traced(model, names)
    storages = Storages(model)
    for name in names:
        tensor, own = f"{name}.weight", storages.ordinal(model.get_submodule(name).weight)
        kinds = {
            "copied": tensor in found.copies and tensor not in found.computed,
            "computed": found.computed.get(tensor) == {own},
            "somewhere": found.computed.get(tensor) == set(),
            "error": tensor in found.errors and tensor not in found.copies,
        }
        assert kinds == {other: other == kind for other in kinds}
        if kind == "copied":
            assert sum(copy.elements for copy in found.copies[tensor]) == 4 * HIDDEN
            assert all(copy.elements for copy in found.copies[tensor])
    plain_names = SHAPES.keys() - {"nothing"}
    assert plain_names == found.copies.keys() - {"a.weight", "z.weight"}
    assert not plain_names & (found.errors.keys() | found.computed.keys())
    after = model.bits()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_the_error_is_reported() -> None:
    model = Served(odd={"raised": (torch.ones(4, HIDDEN), raising)})
    assert traced(model, ["raised"]).errors == {"raised.weight": "KeyError: 'no such parameter'"}


UNFILLED: dict[str, tuple[list[str], Loader, list[str]]] = {
    "all is given": ([], plain, []),
    "one is missing": (["norm.weight"], plain, ["norm.weight"]),
    "all that go into one": (["packed.a", "packed.b"], plain, ["packed.weight"]),
    "an empty one is missing": (["nothing"], plain, []),
    "one that is computed is there": ([], quantizing, []),
    "one that raises is not": ([], raising, ["odd.weight"]),
    "one that raises, and one is missing": (["scale"], raising, ["odd.weight", "scale.weight"]),
    "the place of one is not known": (["scale"], looking, []),
}


@pytest.mark.parametrize(("missing", "loader", "unfilled"), UNFILLED.values(), ids=UNFILLED.keys())
@pytest.mark.parametrize("is_silent", [False, True])
def test_parameters_that_nothing_goes_to(
    missing: list[str], loader: Loader, unfilled: list[str], is_silent: bool
) -> None:
    """Also of a loader that does not say what it filled."""
    model = Served(odd={"odd": (torch.ones(4, HIDDEN, dtype=torch.int8), loader)})
    if loader is plain:
        model.odd.weight = torch.nn.Parameter(torch.ones(4, HIDDEN))
    if is_silent:
        load = model.load_weights
        model.load_weights = lambda weights: load(weights) and None  # type: ignore[assignment, method-assign]
    given = {name: tensor for name, tensor in tensors(0, "odd").items() if name not in missing}
    storages = Storages(model)
    found = trace(model, layout_of(given), storages)
    assert found.unfilled([(name, storages.ordinal(p)) for name, p in model.named_parameters()]) == unfilled


def test_a_parameter_that_the_loader_says_to_have_filled() -> None:
    """It knows better: there are parameters that need nothing."""
    model = Served(odd={"odd": (torch.ones(4, HIDDEN), lambda parameter, loaded: None)})
    found, parameter = traced(model, ["odd"]), ("odd.weight", Storages(model).ordinal(model.odd.weight))
    assert found.unfilled([parameter]) == []
    found.loaded.clear()
    assert found.unfilled([parameter]) == ["odd.weight"]
