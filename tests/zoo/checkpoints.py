"""Checkpoints of random models, and feeds of them. This runs in vLLM's environment, for its transformers."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from deltasync import publish, restore

from .models import SIZES, Model

VERSIONS = 4
_FILE = "model.safetensors"
_FRACTION = 0.01
_SCALE = 0.1
"""Weights at the scale of the usual initialization give nearly flat answers, which hide mistakes."""

_CONFIG = """from transformers import PreTrainedConfig


class ZooConfig(PreTrainedConfig):
    model_type = "zoo"
"""
"""The code of a config that transformers does not have, as vLLM loads it from a checkpoint."""

Weights = dict[str, torch.Tensor]


def make(model: Model, folder: Path) -> None:
    """Write what a replica needs to `folder`.

    `start` has the weights that the replica starts with. `feed` has other ones in `VERSIONS` versions; `head` is the
    last one, restored. A replica of this model must refuse the feeds `other`, of another model, and `partial`, which
    lacks one tensor.
    """
    random = torch.Generator().manual_seed(sum(model.architecture.encode()))
    start, step = folder / "start", folder / "step-0"
    _save(model, start)
    weights = load_file(start / _FILE)
    _write({name: _noisy(tensor, random) for name, tensor in weights.items()}, step, like=start)
    _write({name: _noisy(tensor, random) for name, tensor in weights.items()}, start, like=start)
    publish((folder / "feed").as_uri(), step, trust_code=True)
    for version in range(1, VERSIONS):
        after = folder / f"step-{version}"
        changed = {name: _stepped(tensor, random) for name, tensor in load_file(step / _FILE).items()}
        _write(changed, after, like=start)
        publish((folder / "feed").as_uri(), after, parent=step, trust_code=True)
        step = after
    # Some configs are code of the checkpoint.
    restore((folder / "feed").as_uri(), folder / "head", trust_code=True)

    needed = [name for name, tensor in weights.items() if tensor.ndim > 1 and ".0." in name]
    left_out = needed[int(torch.randint(len(needed), (), generator=random))]
    _write({name: t for name, t in weights.items() if name != left_out}, folder / "without", like=start)
    publish((folder / "partial").as_uri(), folder / "without")
    _write(_another_model(random), folder / "another", like=start)
    publish((folder / "other").as_uri(), folder / "another")


def _save(model: Model, folder: Path) -> None:
    """Save a model of transformers with as few parameters as its architecture allows."""
    import transformers

    kind = getattr(transformers, model.saved_as or model.architecture)
    names = kind.config_class.attribute_map
    fields = {field.name for field in dataclasses.fields(kind.config_class)}
    own = {key: key if key in fields else names.get(key, key) for key in SIZES}
    sizes = {own[key]: value for key, value in SIZES.items() if own[key] in fields}
    torch.manual_seed(0)
    made = kind(kind.config_class(**{**sizes, **model.config})).to(getattr(torch, model.dtype))
    made.save_pretrained(folder)
    weights = load_file(folder / _FILE)
    if model.tensors:
        shapes = {name.format(layer): shape for name, shape in model.tensors.items() for layer in range(2)}
        weights = {name: torch.full(shape, float(len(shape) == 1)) for name, shape in shapes.items()}
        weights = {name: tensor.to(getattr(torch, model.dtype)) for name, tensor in weights.items()}
    for pattern, name in model.renamed.items():
        weights = {re.sub(pattern, name, key): tensor for key, tensor in weights.items()}
    is_fp32 = re.compile(model.fp32 or "$^")
    save_file({key: t.float() if is_fp32.search(key) else t for key, t in weights.items()}, folder / _FILE)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["architectures"] = [model.architecture]
    if not hasattr(transformers, model.architecture) and model.architecture != "PhiMoEForCausalLM":
        config |= {"model_type": "zoo", "auto_map": {"AutoConfig": "configuration_zoo.ZooConfig"}}
        (folder / "configuration_zoo.py").write_text(_CONFIG)
    (folder / "config.json").write_text(json.dumps(config))


def _write(weights: Weights, folder: Path, *, like: Path) -> None:
    """A checkpoint with these weights and the config of another one."""
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / _FILE, {"format": "pt"})
    if folder != like:
        for path in (*like.glob("*.json"), *like.glob("*.py")):
            shutil.copy(path, folder)


def _noisy(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """The tensor with noise, so that no bias is zero and no norm is one."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=random)
    return (tensor.float() + _SCALE * noise).to(tensor.dtype)


def _stepped(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """The tensor with a few elements moved, at least one of them."""
    if not tensor.is_floating_point():
        return tensor
    is_moved = torch.rand(tensor.shape, generator=random) < _FRACTION
    is_moved.view(-1)[torch.randint(tensor.numel(), (1,), generator=random)] = True
    return torch.where(is_moved, _noisy(tensor, random), tensor)


def _another_model(random: torch.Generator) -> Weights:
    """A model of one layer, whose names are those of many architectures. No model of the zoo has its sizes."""
    vocabulary, hidden = 77, 24
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        **{f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
        **{f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
        **{f"{layer}.mlp.{name}_proj.weight": (hidden, hidden) for name in ("gate", "up", "down")},
    }
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
