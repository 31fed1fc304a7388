"""The host of the environment: plays Wordle with what the replica serves, and puts the games into the store.

Run as `python environment.py REPLICA FEED SAMPLES`: three URLs. Of the feed it reads only which version is the newest,
to write down that a label is none of the future. Sends `played`.
"""

import sys
from contextlib import closing

import numpy as np
from client import Client
from demo.child import Orders, run_child, send
from samples import GAMES, GROUP, Sample, put
from wordle.game import TURNS, Array, Games, Wordle
from wordle.training import BEGIN, FIRST_LETTER, TEXT, Played, mark_tokens

from deltasync.feed.log import Log
from deltasync.store import open_store


def main(replica: str, feed: str, samples: str, orders: Orders) -> None:
    """Play until standard input ends."""
    client, wordle, random = Client(replica), Wordle.bundled(), np.random.default_rng(0)
    with closing(open_store(feed)) as of_feed, closing(open_store(samples)) as store:
        log, number = Log(of_feed), 0
        client.wait_up()
        while not orders.stopped.is_set():
            answers = np.repeat(random.integers(len(wordle.words), size=GAMES // GROUP), GROUP)
            played, versions = play(client, wordle, answers)
            sample = Sample(versions, log.require_head().version, played)
            put(store, number, sample)
            send("played", number=number, oldest=sample.oldest, newest=sample.newest, head=sample.head)
            number += 1


def play(client: Client, wordle: Wordle, answers: Array) -> tuple[Played, tuple[tuple[int, int], ...]]:
    """One game for each answer, and the versions of each turn."""
    games = Games(wordle, answers)
    texts = np.full((len(answers), 1), BEGIN)
    log_probs, counts, versions = [], [], []
    for _ in range(TURNS):
        said = client.letters(texts)
        counts.append(np.repeat(games.is_open[:, None], said.tokens.shape[1], axis=1))
        log_probs.append(said.log_probs)
        versions.append(said.versions)
        letters = said.tokens - FIRST_LETTER
        texts = np.concatenate([texts, said.tokens, mark_tokens(letters, games.guess(letters))], axis=1)
    played = Played(
        texts=texts[:, :TEXT],
        log_probs=np.concatenate(log_probs, axis=1),
        counts=np.concatenate(counts, axis=1),
        rewards=games.rewards,
        solved=games.solved,
    )
    return played, tuple(versions)


if __name__ == "__main__":
    sys.exit(run_child(lambda orders: main(*sys.argv[1:4], orders)))
