"""What a model with PEFT adapters publishes: the adapter alone, or the weights with the adapter merged in."""

import copy
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from deltasync.errors import InvalidInputError
from deltasync.trainer.names import named_tensors


class AdapterTensors:
    """The tensors of the active adapter, under the names that PEFT saves them with."""

    def __init__(self, model: PeftModel) -> None:
        names = list(model.active_adapters)
        if len(names) != 1:
            raise InvalidInputError(f"{len(names)} adapters are active: {names}", hint="set_adapter to a single one")
        self._model = model
        self._name = names[0]
        # PEFT may ask the Hub whether embeddings belong to the adapter: once is enough.
        found = self._state(None)
        self._has_embeddings = found.keys() != self._state(False).keys()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._state(self._has_embeddings).items())

    def files(self) -> dict[str, bytes]:
        """The configuration of the adapter, as PEFT writes it."""
        with tempfile.TemporaryDirectory() as folder:
            # The tensors are written too, and dropped: adapters are small, and the rest is exactly PEFT's.
            self._model.save_pretrained(
                folder, selected_adapters=[self._name], save_embedding_layers=self._has_embeddings
            )
            return {path.name: path.read_bytes() for path in Path(folder).rglob("adapter_config.json")}

    def _state(self, has_embeddings: bool | None) -> dict[str, torch.Tensor]:
        choice = "auto" if has_embeddings is None else has_embeddings
        return dict(
            get_peft_model_state_dict(self._model, adapter_name=self._name, save_embedding_layers=choice)  # type: ignore[arg-type]
        )


def merged_tensors(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the base model with the active adapter merged in, one by one, under the base model's names.

    The same bits as `merge_and_unload` of a copy gives. Each layer is merged in a copy of its own, which is gone before
    the one after the next is made: the model is not touched and never exists twice.
    """
    if not isinstance(model.base_model, BaseTuner):
        raise InvalidInputError(
            f"an adapter of kind {model.peft_type} cannot be merged into weights", hint='say what="adapter"'
        )
    try:
        model.base_model._check_merge_allowed()  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InvalidInputError(f"the adapter cannot be merged: {error}", hint='say what="adapter"') from error
    base = model.get_base_model()
    targets = _targets(base)
    _require_own_weights(base, targets)
    for name, tensor in named_tensors(base).items():
        if _owner(name, targets) is None:
            yield name, tensor
    for path, target in targets.items():
        for name, tensor in _merged(target).items():
            yield f"{path}.{name}", tensor


def _targets(base: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules that an adapter replaced, by their path."""
    found: dict[str, torch.nn.Module] = {}
    for path, module in base.named_modules():
        is_target = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if is_target and _owner(path, found) is None:
            found[path] = module
    return found


def _owner(name: str, targets: Mapping[str, torch.nn.Module]) -> str | None:
    """The target that a module or tensor lies in."""
    parent, dot, _ = name.rpartition(".")
    while dot:
        if parent in targets:
            return parent
        parent, dot, _ = parent.rpartition(".")
    return None


@torch.no_grad()
def _merged(target: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What PEFT leaves of one of its modules when it merges and unloads it, from a copy."""
    copied: Any = copy.deepcopy(target)
    if hasattr(copied, "unload_and_optionally_merge_module"):
        left = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        copied.merge(safe_merge=False, adapter_names=None)
        left = copied.get_base_layer()
    return dict(left.state_dict())


def _require_own_weights(base: torch.nn.Module, targets: Mapping[str, torch.nn.Module]) -> None:
    """Merged one by one, two modules with the same weights would part ways."""
    owners: dict[int, tuple[str | None, str]] = {}
    for name, tensor in base.state_dict().items():
        owner = _owner(name, targets)
        if tensor.numel() == 0 or (owner is not None and not _is_base(name.removeprefix(f"{owner}."))):
            continue
        first, first_name = owners.setdefault(tensor.data_ptr(), (owner, name))
        if first != owner:
            raise InvalidInputError(
                f"{first_name!r:.200} and {name!r:.200} are tied, and an adapter is on one of them: "
                "they cannot be merged one by one",
                hint='say what="adapter", or untie them',
            )


def _is_base(name: str) -> bool:
    """Whether a tensor inside a target is of the model that it was made from."""
    return not {"base_layer", "original_module"}.isdisjoint(name.split("."))
