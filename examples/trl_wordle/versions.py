"""Which weights made each token that the trainer learns from, according to the server.

TRL labels a sample with the count that was current when its group started. The server has more precise data: every
answer carries the versions that made its tokens. `follow_versions` records these with each sample, labels the sample
with the oldest of them, and counts how stale every token was when the trainer took it.
"""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample, _AsyncRolloutLoop

VERSION, LAST_VERSION = "x-deltasync-version", "x-deltasync-last-version"
KEY = "made_by"
"""The key in the metrics of a sample, from the rollout process to the trainer."""

MadeBy = tuple[int, int, int]
"""The oldest and the newest version of one answer, and its number of tokens. -1 is the initial checkpoint."""

_answers: ContextVar[list[MadeBy]] = ContextVar("answers")


class LabelledLoop(_AsyncRolloutLoop):
    """TRL's rollout loop, extended to read the headers of the server's answers. It runs in TRL's rollout process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._made_by: dict[str, list[MadeBy]] = {}

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        # Each conversation is a task of its own, with a context of its own.
        _answers.set([])
        generated = await super()._generate_one(*args, **kwargs)
        for sequence in generated[2]:
            self._made_by[sequence.rollout_id] = _answers.get()
        return generated

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        async def ask() -> Any:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self.session.post(f"{self.vllm_server_url}{path}", json=payload, timeout=limit) as response:
                response.raise_for_status()
                body = await response.json()
                oldest = _number(response.headers[VERSION])
                newest = _number(response.headers.get(LAST_VERSION, response.headers[VERSION]))
                _answers.get().append((oldest, newest, len(body["choices"][0]["token_ids"])))
                return body

        return await self._retry(ask, label=f"POST {path}", max_attempts=max_retries)

    async def _score_group(self, group: Any) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        sequences = [each for conversation in group.completions_sequences for each in conversation]
        for sample, sequence in zip(samples, sequences, strict=True):
            sample.metrics[KEY] = self._made_by[sequence.rollout_id]
        for sequence in sequences:
            self._made_by.pop(sequence.rollout_id, None)
        return samples


def _number(label: str) -> int:
    return -1 if label == "none" else int(label)


@dataclass(slots=True)
class Account:
    """Counts of what the trainer learned from. `staleness`: tokens by how many syncs their weights were behind.

    An answer that was in progress at a switch counts as made by the older weights: `spanning` of all `answers`.
    `older_than_label`, `newer_than_label`: tokens whose weights were not those of the label that TRL first gave the
    sample. `dropped`: samples that were too old to learn from.
    """

    samples: int = 0
    dropped: int = 0
    answers: int = 0
    spanning: int = 0
    older_than_label: int = 0
    newer_than_label: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def add(self, made_by: list[MadeBy], *, label: int, count: int, count_of: Callable[[int], int]) -> None:
        """Add a sample that TRL labelled with the count `label`, and takes at `count`."""
        self.samples += 1
        self.answers += len(made_by)
        for first, last, tokens in made_by:
            made_at = count_of(first)
            self.spanning += first != last
            self.staleness[count - made_at] += tokens
            self.older_than_label += tokens * (made_at < label)
            self.newer_than_label += tokens * (made_at > label)

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        tokens = {str(syncs): self.staleness[syncs] for syncs in sorted(self.staleness)}
        return {**{name: getattr(self, name) for name in self.__slots__}, "staleness": tokens}


class LabellingQueue:
    """TRL's queue of samples, as the trainer reads it: each is labelled according to the server's answers."""

    def __init__(self, trainer: AsyncGRPOTrainer, count_of: Callable[[int], int], account: Account) -> None:
        self._queue = trainer.rollout_queue
        self._trainer = trainer
        self._count_of = count_of
        self._account = account

    def get(self, timeout: float | None = None) -> RolloutSample:
        sample = self._queue.get(timeout=timeout)
        made_by: list[MadeBy] = sample.metrics.pop(KEY)
        label, count = sample.model_version, self._trainer.model_version
        sample.model_version = min(self._count_of(first) for first, _, _ in made_by)
        if count - sample.model_version > self._trainer.args.max_staleness:
            # TRL checks the label next, and drops the sample.
            self._account.dropped += 1
        else:
            self._account.add(made_by, label=label, count=count, count_of=self._count_of)
        return sample

    def qsize(self) -> int:
        return self._queue.qsize()


def follow_versions(trainer: AsyncGRPOTrainer, count_of: Callable[[int], int]) -> Account:
    """Correct the labels of a trainer that has not started yet. The account fills while it trains.

    `count_of` returns TRL's count for a version of the feed.
    """
    account = Account()
    trainer.rollout_worker._loop_cls = LabelledLoop
    trainer.rollout_queue = LabellingQueue(trainer, count_of, account)
    return account
