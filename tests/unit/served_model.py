"""A model that loads its weights as vLLM's do: fused, stacked, sharded, padded, tied, moved, and packed afterwards."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deltasync.format.layout import Layout
from deltasync.format.safetensors import header_bytes
from deltasync.format.weights import Changes, Weights
from deltasync.torch.tensors import element_type, host_bits, layout_of
from deltasync.vllm.worker import RuntimeWeights, Window

Tensors = dict[str, torch.Tensor]
Loader = Callable[[torch.Tensor, torch.Tensor], None]

HIDDEN, VOCABULARY, PADDED, INNER, EXPERTS = 8, 22, 24, 6, 3
Q_ROWS, KV_ROWS = 12, 3
"""One head of keys and values: ranks hold the same."""

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "q.weight": (Q_ROWS, HIDDEN),
    "k.weight": (KV_ROWS, HIDDEN),
    "v.weight": (KV_ROWS, HIDDEN),
    "q.bias": (Q_ROWS,),
    "k.bias": (KV_ROWS,),
    "v.bias": (KV_ROWS,),
    "o.weight": (HIDDEN, Q_ROWS),
    **{f"experts.{e}.{name}.weight": (INNER, HIDDEN) for e in range(EXPERTS) for name in ("gate", "up")},
    **{f"experts.{e}.down.weight": (HIDDEN, INNER) for e in range(EXPERTS)},
    "norm.weight": (HIDDEN,),
    "scale": (),
    "moved.weight": (4, HIDDEN),
    "nothing": (0, HIDDEN),
    "packed.a": (4, HIDDEN),
    "packed.b": (2, HIDDEN),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the checkpoint goes."""

    parameter: str
    load: Loader


class Served(nn.Module):
    """One worker of `size`. `odd` has further tensors of [4, 8] with parameters and loaders of their own."""

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        odd: Mapping[str, tuple[torch.Tensor, Loader]] | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.size, self.is_tied = rank, size, True
        shapes = {
            "embed": (PADDED // size, HIDDEN),
            "qkv": (Q_ROWS // size + 2 * KV_ROWS, HIDDEN),
            "bias": (Q_ROWS // size + 2 * KV_ROWS,),
            "o": (HIDDEN, Q_ROWS // size),
            "w13": (EXPERTS, 2 * INNER // size, HIDDEN),
            # Transposed against the checkpoint.
            "w2": (EXPERTS, INNER // size, HIDDEN),
            "norm": (HIDDEN,),
            "scale": (1,),
            "moved": (4, HIDDEN),
            "nothing": (0, HIDDEN),
            "packed": (6, HIDDEN),
        }
        for name, shape in shapes.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
            self.add_module(name, module)
        self.register_buffer("angles", torch.arange(6.0), persistent=False)
        self.head = nn.Module()
        self.head.weight = self.embed.weight
        self.places = {**self._fused(), **self._stacked(), **self._plain()}
        kinds = {name: (p.shape, p.dtype, loader) for name, (p, loader) in ({} if odd is None else odd).items()}
        self._odd_again = lambda: {n: (torch.zeros(s, dtype=d), loader) for n, (s, d, loader) in kinds.items()}
        for name, (parameter, loader) in ({} if odd is None else odd).items():
            module = nn.Module()
            module.weight = nn.Parameter(parameter, requires_grad=False)
            self.add_module(name, module)
            self.places[f"{name}.weight"] = Place(f"{name}.weight", loader)

    def again(self) -> "Served":
        """A fresh model like this one, which holds no weights yet."""
        return Served(rank=self.rank, size=self.size, dtype=self.norm.weight.dtype, odd=self._odd_again())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The names of the parameters that were filled."""
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            if name == "lm_head.weight" and self.is_tied:
                continue
            place = self.places[name]
            parameter = parameters[place.parameter]
            place.load(parameter, tensor)
            loaded.add(place.parameter)
        return loaded

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> "Served":
        """All that vLLM does to start."""
        with torch.no_grad():
            self.load_weights(tensors)
            self.pack()
        return self

    def pack(self) -> None:
        """What follows loading: one parameter gets an order of its own."""
        self.packed.weight.data.copy_(self.packed.weight.data.flip(0).clone())

    def bits(self) -> dict[str, np.ndarray]:
        """A copy of all memory."""
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: host_bits(t, element_type(name, t.dtype)).copy() for name, t in named.items()}

    def _fused(self) -> dict[str, Place]:
        rows = Q_ROWS // self.size
        parts = {"q": (0, rows, self.rank), "k": (rows, KV_ROWS, 0), "v": (rows + KV_ROWS, KV_ROWS, 0)}

        def fused(at: int, rows: int, shard: int, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            into(parameter.data.narrow(0, at, rows), loaded.narrow(0, shard * rows, rows))

        return {
            f"{part}.{kind}": Place(f"{name}.weight", partial(fused, *where))
            for part, where in parts.items()
            for kind, name in (("weight", "qkv"), ("bias", "bias"))
        }

    def _stacked(self) -> dict[str, Place]:
        rows = INNER // self.size

        def w13(expert: int, half: int, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            into(parameter.data[expert].narrow(0, half * rows, rows), loaded.narrow(0, self.rank * rows, rows))

        def w2(expert: int, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            into(parameter.data[expert], loaded.narrow(1, self.rank * rows, rows).t())

        found = {}
        for e in range(EXPERTS):
            found[f"experts.{e}.gate.weight"] = Place("w13.weight", partial(w13, e, 0))
            found[f"experts.{e}.up.weight"] = Place("w13.weight", partial(w13, e, 1))
            found[f"experts.{e}.down.weight"] = Place("w2.weight", partial(w2, e))
        return found

    def _plain(self) -> dict[str, Place]:
        def vocabulary(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            assert len(loaded) == VOCABULARY
            first = self.rank * len(parameter)
            mine = loaded.narrow(0, first, min(len(parameter), VOCABULARY - first))
            parameter[: len(mine)].data.copy_(mine)
            parameter[len(mine) :].data.fill_(0)

        def row(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            columns = parameter.shape[1]
            into(parameter.data, loaded.narrow(1, self.rank * columns, columns))

        def packed(at: int, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            into(parameter.data.narrow(0, at, len(loaded)), loaded)

        return {
            "embed.weight": Place("embed.weight", vocabulary),
            "o.weight": Place("o.weight", row),
            "norm.weight": Place("norm.weight", plain),
            "scale": Place("scale.weight", plain),
            "moved.weight": Place("moved.weight", moving),
            "nothing": Place("nothing.weight", plain),
            "packed.a": Place("packed.weight", partial(packed, 0)),
            "packed.b": Place("packed.weight", partial(packed, 4)),
        }


def into(part: torch.Tensor, loaded: torch.Tensor) -> None:
    assert part.shape == loaded.shape, f"{tuple(loaded.shape)} into {tuple(part.shape)}"
    part.copy_(loaded)


def plain(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """The default loader."""
    into(parameter.data, loaded.view(parameter.shape) if parameter.numel() == loaded.numel() == 1 else loaded)


def moving(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """Asks for the device first."""
    into(parameter.data, loaded.to(parameter.device))


def casting(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """Casts before it copies."""
    into(parameter.data, loaded.to(parameter.dtype))


def quantizing(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """Stores something else than what it is given."""
    into(parameter.data, (loaded.float().nan_to_num() * 10).round().clamp(-127, 127).to(torch.int8))


def raising(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    raise KeyError("no such parameter")


ODD: dict[str, tuple[Callable[[], torch.Tensor], Loader]] = {
    "cast": (lambda: torch.zeros(4, HIDDEN, dtype=torch.float32), casting),
    "quantized": (lambda: torch.zeros(4, HIDDEN, dtype=torch.int8), quantizing),
    "raised": (lambda: torch.zeros(4, HIDDEN, dtype=torch.bfloat16), raising),
}


def odd(*names: str) -> dict[str, tuple[torch.Tensor, Loader]]:
    """Fresh parameters for `Served`."""
    return {name: (ODD[name][0](), ODD[name][1]) for name in names}


def tensors(seed: int = 0, *names: str, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A checkpoint: any bits, so NaNs of all kinds and signed zeros too. `names` are those of odd tensors."""
    shapes = {**SHAPES, **{f"{name}.weight": (4, HIDDEN) for name in names}}
    return {
        name: _random(np.random.default_rng((seed, i)), shape, dtype) for i, (name, shape) in enumerate(shapes.items())
    }


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    width = dtype.itemsize
    bits = rng.integers(0, 256, (*shape, width), np.uint8).view(f"i{width}").reshape(shape).copy()
    if bits.size > 1:
        # A NaN with a payload, and minus zero.
        bits.reshape(-1)[:2] = (np.array([-3, -(2 ** (8 * width - 1))], "i8")).astype(bits.dtype)
    return torch.from_numpy(bits).view(dtype)


def changed(old: Tensors, seed: int, share: float = 0.1) -> Tensors:
    """Other bits for some elements of each tensor, at least one of them unless there is no share."""
    new = {name: tensor.clone() for name, tensor in old.items()}
    for i, tensor in enumerate(new.values()):
        rng = np.random.default_rng((seed, i))
        is_picked = rng.random(tensor.numel()) < share
        is_picked[-1:] |= share > 0
        picked = np.repeat(is_picked, tensor.element_size())
        tensor.view(-1).view(torch.uint8).numpy()[picked] ^= rng.integers(1, 256, int(picked.sum()), np.uint8)
    return new


def weights_of(state: Tensors) -> Weights:
    """The same bits for the core."""
    layout = layout_of(state)
    return Weights(layout, tuple(host_bits(state[t.name], t.dtype).copy() for t in layout.tensors))


def save(state: Tensors, path: Path) -> Path:
    """A safetensors file whose tensors are aligned."""
    weights = weights_of(state)
    pairs = sorted(zip(weights.layout.tensors, weights.arrays, strict=True), key=lambda pair: -pair[0].dtype.width)
    header = header_bytes([spec for spec, _ in pairs], {})
    path.write_bytes(header + b"".join(array.tobytes() for _, array in pairs))
    return path


def same_memory(a: Served, b: Served) -> bool:
    ours, theirs = a.bits(), b.bits()
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


class ServedTwins:
    """Builds the model of a worker once more, in one window or in two."""

    def __init__(self, model: Served) -> None:
        self._model = model
        self.dtype: torch.dtype = model.norm.weight.dtype

    def windows(self, layout: Layout) -> list[Window]:
        return [Window(layout.tensors)]

    def build(self, weights: Iterable[tuple[str, torch.Tensor]], window: Window) -> Served:
        return self._model.again().load(weights)


class Workers:
    """The workers of an engine, each with a model of its own; what goes between is JSON."""

    def __init__(self, state: Tensors, *, size: int = 1, odd_names: Iterable[str] = (), **options: Any) -> None:
        fresh = [Served(rank=rank, size=size, odd=odd(*odd_names), **options) for rank in range(size)]
        self.models = [model.load(state.items()) for model in fresh]
        self.runtimes = [RuntimeWeights(model, ServedTwins(model), rank) for rank, model in enumerate(self.models)]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Of `RuntimeWeights`, in each worker."""
        results: list[Any] = [json.loads(json.dumps(getattr(runtime, method)(*args))) for runtime in self.runtimes]
        return results

    def hold(self, state: Tensors, *, is_cast: bool = False) -> bool:
        """Whether all memory is as if the workers had been started with this checkpoint.

        `is_cast`: any NaN will do. Which one a cast makes depends on how the elements lie.
        """
        pairs = [(model, model.again().load(state.items())) for model in self.models]
        if is_cast:
            for parameter in (p for pair in pairs for model in pair for p in model.parameters()):
                parameter.data[parameter.isnan()] = float("nan")
        return all(same_memory(model, other) for model, other in pairs)


def changes_between(old: Weights, new: Weights) -> tuple[Changes, ...]:
    """One for each tensor that differs."""
    found = []
    for ordinal, (before, after) in enumerate(zip(old.arrays, new.arrays, strict=True)):
        positions = np.nonzero(before != after)[0].astype(np.uint32)
        if len(positions):
            found.append(Changes(np.array([(ordinal, 0, len(after))], np.int64), positions, after[positions]))
    return tuple(found)
