"""Which tensors of a model are published, and under which names: those of its checkpoint."""

from collections.abc import Iterable, Mapping

import torch

from deltasync.errors import InvalidInputError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
_COMPILED = "_orig_mod."
"""What torch.compile adds to the names of a part of a model that was compiled by itself."""

TorchState = torch.nn.Module | Mapping[str, torch.Tensor]


def named_tensors(weights: TorchState) -> dict[str, torch.Tensor]:
    """The tensors of a module or state dict. Tied weights come once, under the name that the checkpoint uses."""
    if isinstance(weights, torch.nn.Module):
        module = unwrapped(weights)
        state = {name.replace(_COMPILED, ""): tensor for name, tensor in module.state_dict().items()}
        return _untied(_tensors(state), _tied_names(module))
    return _untied(_tensors(weights), frozenset())


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and torch.compile: their names are not those of the checkpoint."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, torch.nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def _tensors(found: Mapping[str, object]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(
                f"{name!r:.200} is a {type(tensor).__qualname__}, not a tensor",
                hint="give a module or its state dict; leave out what is not a weight",
            )
        tensors[name] = tensor
    return tensors


def _untied(tensors: Mapping[str, torch.Tensor], tied: frozenset[str]) -> dict[str, torch.Tensor]:
    by_memory: dict[object, str] = {}
    for name, tensor in tensors.items():
        place = _memory(name, tensor)
        kept = by_memory.setdefault(place, name)
        if kept in tied and name not in tied:
            by_memory[place] = name
    kept_names = set(by_memory.values())
    return {name: tensor.detach() for name, tensor in tensors.items() if name in kept_names}


def _memory(name: str, tensor: torch.Tensor) -> object:
    """Equal for two names of the same memory, seen the same way."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return name
    local = getattr(tensor, "_local_tensor", tensor)
    if local.numel() == 0:
        return name
    return local.data_ptr(), local.device, local.dtype, tuple(local.shape), local.stride()


def _tied_names(module: torch.nn.Module) -> frozenset[str]:
    """Names that transformers leaves out of a checkpoint because another name has their weights."""
    found = getattr(module, "all_tied_weights_keys", None)
    if found is None:
        found = getattr(module, "_tied_weights_keys", None)
    return frozenset() if found is None else frozenset(found)
