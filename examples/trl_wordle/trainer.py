"""The trainer's host: TRL's asynchronous GRPO, which publishes its weights to a feed.

    python trainer.py --feed URL --server http://HOST:8000 --environment http://HOST:8001

The model is a folder on this host. It becomes the first version of the feed, from which the server gets it.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from checks import environment_at, require_model, wait_for_server

from deltasync import DeltasyncError, publish


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy on Wordle with TRL; its weights go to a feed.")
    parser.add_argument("--feed", required=True, metavar="URL")
    parser.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL", help="the vLLM server")
    parser.add_argument("--environment", default="http://127.0.0.1:8001", metavar="URL", help="the game")
    parser.add_argument("--model", default="wordle-policy", metavar="FOLDER", help="also its name on the server")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-lag", type=int, default=2, help="syncs that the server may be behind")
    parser.add_argument("--wait-s", type=float, default=300.0, help="how long to wait for the server")
    parser.add_argument(
        "--out", type=Path, default=Path("run"), metavar="FOLDER", help="for the report and the weights"
    )
    options = parser.parse_args()
    # So that TRL's rollout process ends, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(options)
    except DeltasyncError as error:
        sys.exit("\n  ".join([f"error: {error}", *getattr(error, "__notes__", ())]))
    except KeyboardInterrupt:
        sys.exit(130)


def run(options: argparse.Namespace) -> None:
    """Run the checks, publish the first version, train, report."""
    require_model(options.model)
    game = environment_at(options.environment)
    # A feed of another model is refused here.
    publish(options.feed, options.model, step=0)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Not earlier: importing TRL takes as long as all of the above, and the server starts meanwhile.
    from training import Training

    training = Training(options, guesses=game["guesses"])
    wait_for_server(options.server, options.model, wait_s=options.wait_s)
    training.run()


if __name__ == "__main__":
    main()
