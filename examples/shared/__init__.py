"""What the examples share: the comparison of bits, and the line with the ratio."""

from collections.abc import Iterable, Mapping

import torch

from deltasync import PublishEvent


def same_bits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit. Unlike floats, bits compare -0.0 and NaN exactly."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(_bytes(found[name]), _bytes(tensor))
        for name, tensor in wanted.items()
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def published(model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The weights of a model as they are published."""
    return {name: tensor.detach().to(dtype) for name, tensor in model.state_dict().items()}


def ratio_text(events: Iterable[PublishEvent], *, itemsize: int = 2) -> str:
    """How much smaller the deltas were than as many full copies, from the events of a publisher."""
    deltas = [event for event in events if event.kind == "delta"]
    sent, copies = sum(event.payload_bytes for event in deltas), sum(itemsize * event.elements for event in deltas)
    return f"{len(deltas)} deltas: {sent:,} bytes instead of {copies:,}, {copies / max(1, sent):.1f} times less"
