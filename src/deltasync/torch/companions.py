"""The files beside the weights of a model of transformers, which is recognized by its methods, not by its type."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

from deltasync.format.companions import can_run_code


def model_files(
    model: torch.nn.Module, processing_class: Any = None, *, dtype: torch.dtype | None = None
) -> dict[str, bytes]:
    """The files that `save_pretrained` writes beside the weights of a model and its tokenizer or processor.

    `dtype`: what the weights are published as, if that is not what they are.
    """
    pretrained: Any = model
    config = copy.deepcopy(pretrained.config)
    # FSDP2 changes the class of a module to one with this prefix.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = pretrained.dtype if dtype is None else dtype
    generation = saved_files(pretrained.generation_config) if pretrained.can_generate() else {}
    return {"config.json": config.to_json_string().encode(), **generation, **saved_files(processing_class)}


def is_pretrained(model: object) -> bool:
    """Whether `model_files` can be called with it: a model of transformers, whose own weights are its checkpoint."""
    is_model = isinstance(model, torch.nn.Module) and hasattr(model, "can_generate") and hasattr(model, "dtype")
    return is_model and hasattr(getattr(model, "config", None), "to_json_string") and not hasattr(model, "peft_config")


def saved_files(thing: Any) -> dict[str, bytes]:
    """What a tokenizer, processor or configuration writes when it is saved, but no code; nothing for None."""
    if thing is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        thing.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and not can_run_code(path.name))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
