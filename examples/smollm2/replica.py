"""The replica of the demo's first act: follows the feed in a thread, and answers a prompt with the live version.

Run as `python -m smollm2.replica SETTINGS NAME`, by the demo.
"""

import sys
import threading
from typing import Any

import torch
from demo.child import Orders, run_child, send, send_move
from demo.published import PUBLISHED, digest_of
from demo.settings import REAL, Settings

from deltasync import Follower
from deltasync.torch import ModuleTarget
from smollm2 import weights

PROMPT = "Name a colour and say where you see it."
TOKENS = 16
_POLL_S = 0.2


class Generator:
    """A model that answers. Its weights change between two answers: `lock` is held while one is generated."""

    def __init__(self) -> None:
        self.model = weights.empty_model(PUBLISHED).eval()
        self._tokenizer = weights.load_tokenizer()
        self._lock = threading.Lock()
        self.target = ModuleTarget(self.model, hold=self._lock)

    @torch.no_grad()
    def answer(self, prompt: str) -> tuple[int, str] | None:
        """The live version and its answer; None while there is no version."""
        chat = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs: Any = self._tokenizer(text, return_tensors="pt")
        with self._lock:
            version = self.target.version
            if version is None:
                return None
            tokens = self.model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        return version, self._tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(settings: Settings, name: str, orders: Orders) -> None:
    """Follow and generate until the last version is live, then report the digest of the live weights."""
    torch.set_num_threads(1)
    generator = Generator()
    mirror = settings.mirror(REAL, name)
    with Follower(settings.feed(REAL), generator.target, mirror=mirror, replica=name, observer=send_move) as follower:
        send("following")
        follower.start()
        while not orders.stopped.is_set():
            if follower.error is not None and not follower.status().is_following:
                raise follower.error
            if orders.finish_at is None or generator.target.version != orders.finish_at:
                answered = generator.answer(PROMPT)
                if answered is not None:
                    send("answered", version=answered[0], text=answered[1])
                # Between two answers the follower can switch; a server would go on with the next request.
                orders.stopped.wait(_POLL_S)
            else:
                send("final", version=orders.finish_at, digest=digest_of(generator.model))
                return


if __name__ == "__main__":
    given = Settings.from_json(sys.argv[1])
    sys.exit(run_child(lambda orders: main(given, sys.argv[2], orders)))
