"""The environment's host: a short Wordle behind HTTP.

    python environment.py [--host ADDRESS] [--port PORT]

A game is a number. The player sends the number and all guesses so far and gets the marks of the last one, so that the
server keeps no state: it can be restarted at any time, and any number of servers can share the work. The rules are
those of examples/wordle.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

# Run as a script, Python finds modules in this folder only, and the game is in the one beside it.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from wordle.game import (
    GREEN,
    GREY,
    LETTERS,
    REFUSED,
    YELLOW,
    Games,
    Wordle,
    bundled_words,
    letters_of,
    marks,
)

__all__ = ["GREEN", "GUESSES", "NO_WORD", "OVER", "SIGNS", "WORDS", "Environment", "Turn", "marks", "marks_text"]

WORDS = tuple(sorted(bundled_words()))[::8]
GUESSES = 4
"""Eight words and four guesses: small enough for a policy to improve within a minute on two cores."""

SIGNS = {GREY: "-", YELLOW: "~", GREEN: "+"}
NO_WORD = "not a word"
OVER = " over"


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to a guess: the text that the policy reads, and the reward of the game so far."""

    text: str
    reward: float
    is_over: bool


class Environment:
    """Games of Wordle, identified by their number."""

    def __init__(self) -> None:
        self._wordle = Wordle(WORDS)

    def answer(self, game: int) -> str:
        """The word of a game. Only the environment knows it."""
        return random.Random(game).choice(self._wordle.words)

    def play(self, game: int, guesses: Sequence[str]) -> Turn:
        """The turn that these guesses lead to. Guesses after the end of a game do not count."""
        state = Games(self._wordle, np.array([self._wordle.words.index(self.answer(game))]))
        text = ""
        for guess in guesses[:GUESSES]:
            if not state.is_open[0]:
                break
            text = marks_text(guess, state.guess(_letters(guess))[0])
        is_over = len(guesses) >= GUESSES or bool(state.solved[0])
        return Turn(text + OVER * is_over, round(float(state.rewards[0]), 6), is_over)


def marks_text(guess: str, given: Sequence[int]) -> str:
    """The marks of a guess as text: each letter with its sign."""
    if REFUSED in given:
        return NO_WORD
    return "".join(letter + SIGNS[int(mark)] for letter, mark in zip(guess, given, strict=True))


def _letters(guess: str) -> Any:
    """A guess as one row of letters. Text that cannot be a word becomes a word that is not in the list."""
    is_word = len(guess) == LETTERS and guess.isascii() and guess.isalpha() and guess.islower()
    return np.array([letters_of(guess if is_word else "z" * LETTERS)])


class Handler(BaseHTTPRequestHandler):
    """`POST /play {"game": 7, "guesses": ["crane"]}` returns a turn, `GET /` a description of the environment."""

    protocol_version = "HTTP/1.1"
    # The header and the body of an answer are two writes, and the second must not be delayed.
    disable_nagle_algorithm = True
    environment = Environment()

    def do_GET(self) -> None:
        self._answer(200, {"environment": "wordle", "words": len(WORDS), "guesses": GUESSES})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            asked = json.loads(body)
            turn = self.environment.play(int(asked["game"]), [str(guess) for guess in asked["guesses"]])
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, {"error": f"a game and its guesses are needed: {error!r}"})
            return
        self._answer(200, asdict(turn))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there are thousands of requests a minute."""


class Server(ThreadingHTTPServer):
    """A server with one daemon thread for each connection."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve Wordle over HTTP.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    options = parser.parse_args()
    try:
        server = Server((options.host, options.port), Handler)
    except OSError as error:
        sys.exit(
            f"error: the environment cannot listen on {options.host}:{options.port}: {error} (give another --port)"
        )
    with server:
        print(f"Wordle with {len(WORDS)} words at http://{options.host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
