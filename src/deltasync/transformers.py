"""`DeltasyncCallback`: lets any trainer of transformers publish after its optimizer steps.

    with DeltasyncCallback("s3://bucket/runs/42", dtype=torch.bfloat16) as callback:
        Trainer(..., callbacks=[callback]).train()

Models with PEFT adapters publish the adapter alone, or the weights with the adapter merged in.
"""

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion

from deltasync import DeltasyncError, InvalidInputError, Publication, PublisherOptions, Store, arguments
from deltasync.torch import Publisher, ShardedPublisher
from deltasync.torch.publisher import model_files, saved_files
from deltasync.torch.tensors import NamedTensors, TorchState, named_tensors, require_dtype, unwrapped

if TYPE_CHECKING:
    # Imported where it is used: models without adapters need no PEFT.
    from peft import PeftModel

__all__ = ["DeltasyncCallback", "What", "model_files"]


class AdapterTensors:
    """The tensors of the active adapter, under the names that PEFT saves them with."""

    def __init__(self, model: "PeftModel") -> None:
        names = list(model.active_adapters)
        if len(names) != 1:
            raise InvalidInputError(f"{len(names)} adapters are active: {names}", hint="set_adapter to a single one")
        self._model = model
        self._name = names[0]
        # PEFT may ask the Hub whether embeddings belong to the adapter: it is asked only once.
        self._has_embeddings = self._state(None).keys() != self._state(False).keys()

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
        from peft import get_peft_model_state_dict

        return dict(
            get_peft_model_state_dict(self._model, adapter_name=self._name, save_embedding_layers=choice)  # type: ignore[arg-type]
        )


def merged_tensors(model: "PeftModel") -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the base model with the active adapter merged in, one by one, under the base model's names.

    The bits are those of `merge_and_unload` on a copy. Each layer is merged in a copy of its own, and at most two of
    these copies exist at a time: the model is not modified and never exists twice.
    """
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model.base_model, BaseTuner):
        raise InvalidInputError(
            f"an adapter of kind {model.peft_type} cannot be merged into weights", hint='use what="adapter"'
        )
    try:
        model.base_model._check_merge_allowed()  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise InvalidInputError(f"the adapter cannot be merged: {error}", hint='use what="adapter"') from error
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
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    targets: dict[str, torch.nn.Module] = {}
    for path, module in base.named_modules():
        is_target = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if is_target and _owner(path, targets) is None:
            targets[path] = module
    return targets


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
    """The tensors that PEFT leaves of one of its modules when it merges and unloads it, from a copy."""
    copied: Any = copy.deepcopy(target)
    if hasattr(copied, "unload_and_optionally_merge_module"):
        left = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        copied.merge(safe_merge=False, adapter_names=None)
        left = copied.get_base_layer()
    return dict(left.state_dict())


def _require_own_weights(base: torch.nn.Module, targets: Mapping[str, torch.nn.Module]) -> None:
    """InvalidInputError if modules share weights: merged one by one, these would become different."""
    owners: dict[int, tuple[str | None, str]] = {}
    for name, tensor in base.state_dict().items():
        owner = _owner(name, targets)
        # Inside a target, only tensors of the model that it was made from.
        parts = name.removeprefix(f"{owner}.").split(".")
        is_added = owner is not None and {"base_layer", "original_module"}.isdisjoint(parts)
        if tensor.numel() == 0 or is_added:
            continue
        first, first_name = owners.setdefault(tensor.data_ptr(), (owner, name))
        if first != owner:
            raise InvalidInputError(
                f"{first_name!r:.200} and {name!r:.200} are tied, and an adapter is on one of them: "
                "they cannot be merged one by one",
                hint='use what="adapter", or untie them',
            )


What = Literal["model", "adapter", "merged"]
Source = Callable[[], TorchState | NamedTensors]
Send = Callable[[int], Publication]
"""Publishes the weights of this step."""


class DeltasyncCallback(TrainerCallback):
    """Publishes the initial weights, those after every `every_steps` optimizer steps, and the last ones.

    Only the main process publishes; under FSDP2 every process publishes its shard. `what` says which weights: "model";
    of a model with PEFT adapters the "adapter" alone, or "merged", the base model's weights with the adapter merged in,
    while training goes on unmerged. `files` go beside the weights, in addition to the configuration and the tokenizer.
    `dtype` and `options` are those of `Publisher`; under FSDP2 those of `ShardedPublisher`.

    A publication that fails for good is logged, and the next one carries its changes; if the last one fails, the end
    of training raises its error. Training that fails does not call its callbacks: leave the `with` block, or call
    `close`, to release the feed.
    """

    def __init__(
        self,
        feed: str | os.PathLike[str] | Store,
        *,
        what: What = "model",
        every_steps: int = 1,
        files: Mapping[str, bytes] | None = None,
        dtype: torch.dtype | None = None,
        options: PublisherOptions = PublisherOptions(),
    ) -> None:
        arguments.one_of("what", what, ("model", "adapter", "merged"))
        every_steps = arguments.whole_number("every_steps", every_steps, least=1, hint="1 publishes after every step")
        if dtype is not None:
            require_dtype(dtype)
        arguments.instance("options", options, PublisherOptions)
        self._feed = feed
        self._what: What = what
        self._every_steps = every_steps
        self._files = PublisherOptions(files={} if files is None else files).files
        self._dtype = dtype
        self._options = options
        self._publisher: Publisher | ShardedPublisher | None = None
        self._send: Send | None = None
        self._last: Publication | None = None

    @property
    def last(self) -> Publication | None:
        """The newest publication; None in processes that do not publish."""
        return self._last

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish the weights that training starts from."""
        self.close()
        module = unwrapped(kwargs["model"])
        is_sharded = _is_sharded(module)
        if not is_sharded and not state.is_world_process_zero:
            return
        source, files = _source_of(module, self._what, self._dtype)
        files |= saved_files(kwargs.get("processing_class"))
        options = replace(self._options, files={**files, **self._options.files, **self._files})
        if is_sharded:
            if self._what != "model" or _is_converted(module):
                # The tensors to publish are made of shards, instead of being them.
                raise InvalidInputError(
                    f"{self._what!r} weights of {type(module).__name__} have to be computed from shards, which is not "
                    "supported",
                    hint="train without FSDP, or publish with deltasync.torch.ShardedPublisher what each rank has",
                )
            sharded = ShardedPublisher(self._feed, dtype=self._dtype, options=options)
            self._publisher, self._send = sharded, lambda step: sharded.publish(module, step=step)
        else:
            whole = Publisher(self._feed, dtype=self._dtype, options=options)
            self._publisher, self._send = whole, lambda step: whole.publish(source(), step=step)
        self._publish(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Publish every `every_steps` steps."""
        if state.global_step % self._every_steps == 0:
            self._publish(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish the last weights if they are not published yet, and wait until all is committed."""
        if self._last is not None and self._last.step != state.global_step:
            self._publish(state)
        self.close()
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """Finish what is in flight and release the feed. It may be called at any time, and twice."""
        publisher, self._publisher, self._send = self._publisher, None, None
        if publisher is not None:
            publisher.close()

    def __enter__(self) -> "DeltasyncCallback":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _publish(self, state: TrainerState) -> None:
        if self._send is None:
            return
        try:
            self._last = self._send(state.global_step)
        except DeltasyncError:
            self.close()
            raise


def _source_of(module: torch.nn.Module, what: What, dtype: torch.dtype | None) -> tuple[Source, dict[str, bytes]]:
    """The source of the weights of each publication, and the files that belong beside them."""
    if what == "model":
        if hasattr(module, "peft_config"):
            raise InvalidInputError(
                "the model has PEFT adapters, so its own weights are not a checkpoint",
                hint='use what="adapter" or what="merged"',
            )
        if not isinstance(module, PreTrainedModel):
            return lambda: module, {}
        files = model_files(module, dtype=dtype)
        if _is_converted(module):
            return lambda: revert_weight_conversion(module, named_tensors(module)).items(), files
        return lambda: module, files
    from peft import PeftModel

    if not isinstance(module, PeftModel):
        raise InvalidInputError(f"{type(module).__name__} is not a PEFT model", hint='use what="model"')
    if what == "adapter":
        adapter = AdapterTensors(module)
        return lambda: adapter, adapter.files()
    base = module.get_base_model()
    if _is_converted(base):
        raise InvalidInputError(
            f"the checkpoints of {type(base).__name__} have other tensors than the model, which is not supported here",
            hint='use what="adapter"',
        )
    return lambda: merged_tensors(module), model_files(base, dtype=dtype) if isinstance(base, PreTrainedModel) else {}


def _is_converted(module: torch.nn.Module) -> bool:
    """Whether transformers saves this model under other names than its modules have, as with fused experts."""
    if not isinstance(module, PreTrainedModel):
        return False
    names = {name: tensor.to("meta") for name, tensor in named_tensors(module).items()}
    return bool(revert_weight_conversion(module, dict(names)).keys() != names.keys())


def _is_sharded(module: torch.nn.Module) -> bool:
    """Whether the weights are DTensors, sharded over processes; InvalidInputError for other kinds of sharding."""
    if any(isinstance(m, FullyShardedDataParallel) for m in module.modules()):
        raise InvalidInputError("the weights are sharded by FSDP1", hint="use FSDP2: fsdp_version=2")
    by_deepspeed = [name for name, p in module.named_parameters() if hasattr(p, "ds_id")]
    if by_deepspeed:
        raise InvalidInputError(
            f"the weights are sharded by DeepSpeed ({by_deepspeed[0]})", hint="use FSDP2, or ZeRO up to stage 2"
        )
    return any(isinstance(p, DTensor) for p in module.parameters())
