"""The weights as they are published, and their digest."""

import copy
import tempfile

import torch
from transformers import PreTrainedModel

import deltasync

PUBLISHED = torch.bfloat16
"""The type of the weights in the feeds. Trainers compute in float32."""


def published_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with the bits that are published."""
    return copy.deepcopy(model).to(PUBLISHED)


def digest_of(published: PreTrainedModel) -> str:
    """The state digest of a published copy, computed from its bits alone: it is saved, and the files are read."""
    with tempfile.TemporaryDirectory() as folder:
        published.save_pretrained(folder)
        return deltasync.digest(folder).hex
