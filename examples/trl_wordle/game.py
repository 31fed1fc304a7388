"""The game as an environment of TRL: `reset`, a tool that the policy calls, and a reward. The rules are behind HTTP."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

PROMPT = "Guess the word."
TIMEOUT_S = 30.0


class WordleGame:
    """One game at a time. TRL's rollout process makes one of these for each concurrent game, and reuses it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: http.client.HTTPConnection | None = None
        self._game = 0
        self._guesses: list[str] = []
        self._reward = 0.0
        self._error: OSError | None = None

    def reset(self, *, game: int, **_row: Any) -> None:
        """Start a game of the dataset."""
        self._game, self._guesses, self._reward, self._error = game, [], 0.0, None

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: A word of five letters.

        Returns:
            Each letter with its mark.
        """
        self._guesses.append(word)
        try:
            turn = _play(self._connected(), {"game": self._game, "guesses": self._guesses})
        except (OSError, http.client.HTTPException) as error:
            # TRL would show the error to the policy as part of the game, so it is kept for `get_reward`.
            self._connection = None
            self._error = OSError(f"the environment at {self._url} failed: {error!r}")
            raise self._error from error
        self._reward = float(turn["reward"])
        return str(turn["text"])

    def get_reward(self) -> float:
        """The reward of the game so far. Raises the error if the environment failed: such a game teaches nothing."""
        if self._error is not None:
            raise self._error
        return self._reward

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(urlsplit(self._url).netloc, timeout=TIMEOUT_S)
        return self._connection


def _play(connection: http.client.HTTPConnection, asked: dict[str, Any]) -> dict[str, Any]:
    connection.request("POST", "/play", json.dumps(asked), {"content-type": "application/json"})
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise OSError(f"status {response.status}: {body[:200]!r}")
    turn: dict[str, Any] = json.loads(body)
    return turn
