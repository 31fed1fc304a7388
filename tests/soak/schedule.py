"""What happens when: a list of steps that a seed determines. How far the processes are at each of them, it does not."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Verb = Literal[
    "kill", "start", "stop", "continue", "fill", "empty", "jump", "return", "spoil", "release", "prune"
]  # fmt: skip

KILLED = ("trainer", "torch", "folder")
STOPPED = ("trainer", "torch", "steady", "folder", "store")
JUMPING = ("trainer", "steady", "folder")
SPOILED = ("cut", "drop", "503", "refuse", "half", "flip", "stall", "slow")
JUMPS_S = (-86_400, -840, -40, 40, 840, 86_400, 172_800)
"""The server refuses requests whose time is more than 15 minutes off, so the small jumps are below that."""

_UNDO: dict[str, Verb] = {"kill": "start", "stop": "continue", "fill": "empty", "jump": "return", "spoil": "release"}
_LENGTHS_S = {"kill": (0.2, 3.0), "stop": (1.0, 8.0), "fill": (3.0, 12.0), "jump": (3.0, 12.0), "spoil": (3.0, 10.0)}
_GAP_S = (1.0, 5.0)
_VLLM_LIFE_S = 420.0
"""A vLLM server takes long to start, so it is killed rarely."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something that is done at `at_s` to a process, the disk, the feed or the network (then `subject` is a fault).

    `amount` is the jump of a clock in seconds, the pages that are left on a full disk, or the share of the answers that
    are spoiled; for the start of a trainer, whether its shadow is mapped.
    """

    at_s: float
    verb: Verb
    subject: str
    amount: float = 0.0


def schedule(seed: int, seconds: float, *, disk: bool, clocks: bool, vllm: bool) -> list[Step]:
    """All steps within so many seconds. Every fault is undone before the end."""
    rng = random.Random(seed)
    steps: list[Step] = []
    busy_until_s: Counter[tuple[str, str]] = Counter()
    vllm_killed_s = 0.0
    at_s = 0.0
    for verb, subject in _faults(rng, disk=disk, clocks=clocks, vllm=vllm):
        at_s += rng.uniform(*_GAP_S)
        if at_s >= seconds:
            break
        length_s, amount = rng.uniform(*_LENGTHS_S.get(verb, (0.5, 4.0))), _amount(rng, verb)
        if (verb, subject) == ("kill", "vllm"):
            if at_s < vllm_killed_s + _VLLM_LIFE_S:
                continue
            vllm_killed_s = at_s
        # Two faults of a kind on one subject do not overlap, so that each ends with its own step.
        thing = verb, "network" if verb == "spoil" else subject
        begin_s = max(at_s, busy_until_s[thing])
        end_s = min(begin_s + length_s, seconds)
        if begin_s >= seconds:
            continue
        busy_until_s[thing] = end_s
        steps.append(Step(begin_s, verb, subject, amount))
        if verb in _UNDO:
            steps.append(Step(end_s, _UNDO[verb], subject, float(rng.random() < 0.6)))
        elif rng.random() < 0.3:
            steps.append(Step(end_s, "kill", "pruner"))
    return sorted(steps, key=lambda step: step.at_s)


def _faults(rng: random.Random, *, disk: bool, clocks: bool, vllm: bool) -> Iterator[tuple[Verb, str]]:
    """Every fault once, in random order, then all of them again."""
    bag: list[tuple[Verb, str]] = [("kill", name) for name in KILLED]
    bag += [("stop", name) for name in STOPPED]
    bag += [("spoil", name) for name in SPOILED]
    bag += [("prune", "feed")] * 3
    bag += [("fill", "disk")] * 2 * disk
    bag += [("jump", name) for name in JUMPING] * clocks
    bag += [("kill", "vllm"), ("stop", "vllm")] * vllm
    while True:
        yield from rng.sample(bag, len(bag))


def _amount(rng: random.Random, verb: Verb) -> float:
    if verb == "jump":
        return rng.choice(JUMPS_S)
    if verb == "fill":
        return rng.choice((0, 1, 4, 16, 64))
    return rng.choice((0.1, 0.3, 1.0)) if verb == "spoil" else 0.0
