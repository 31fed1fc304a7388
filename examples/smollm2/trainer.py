"""The trainer of the demo's first act: takes policy-gradient steps with SmolLM2-135M, and publishes each of them.

Run as `python -m smollm2.trainer SETTINGS`, by the demo.
"""

import sys
import time

from demo.child import Orders, run_child, send, send_version
from demo.published import PUBLISHED, digest_of, published_copy
from demo.settings import REAL, Settings

from deltasync import PublisherOptions
from deltasync.torch import Publisher
from deltasync.transformers import model_files
from smollm2 import policy, weights

LEARNING_RATE = 1e-6
SIZES = policy.Settings(prompts=1, samples=4, tokens=12)
"""Small, so that a step takes seconds on a CPU. How many weights a step changes hardly depends on them."""
_RETRY_S = 20.0
"""How long a failing store is retried."""


def main(settings: Settings, orders: Orders) -> None:
    """Train and publish; report the digest of the trained weights."""
    model, tokenizer = weights.load_model(seed=settings.seed), weights.load_tokenizer()
    trainer = policy.PolicyTrainer(model, tokenizer, settings=SIZES, seed=settings.seed)
    count = model.num_parameters()
    send("ready", weights=count, full_bytes=count * PUBLISHED.itemsize)
    options = PublisherOptions(
        files=model_files(model, tokenizer, dtype=PUBLISHED), retry_s=_RETRY_S, observer=send_version
    )
    with Publisher(settings.feed(REAL), dtype=PUBLISHED, options=options) as publisher:
        last = publisher.publish(model, step=0).wait()
        for step in range(1, settings.real_steps + 1):
            started = time.perf_counter()
            outcome = trainer.step(LEARNING_RATE)
            publication = publisher.publish(model, step=step)
            send("stepped", step=step, reward=outcome.reward, loss=outcome.loss, step_s=time.perf_counter() - started)
            if orders.stopped.is_set():
                return
            last = publication.wait()
    send("trained", version=last.version, digest=digest_of(published_copy(model)))


if __name__ == "__main__":
    given = Settings.from_json(sys.argv[1])
    sys.exit(run_child(lambda orders: main(given, orders)))
