"""After a run: check that the server has the trained weights, tensor by tensor, and that it answers accordingly.

    DELTASYNC_TOKEN=… python check.py --feed URL --server URL --mirror FILE --run FOLDER

The server's own scrub compares its live memory with its mirror; the mirror is compared with the trainer's weights here,
bit by bit; and the log-probabilities of its answers are compared with those that transformers computes.
"""

import argparse
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from game import PROMPT, WordleGame
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from deltasync import open_store, restore, verify

MOST_APART = 0.03
"""The largest mean difference of log-probabilities. The server computes in bfloat16, and in another order."""
GUESSES, TOKENS = 32, 10
_CATCH_UP_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare what is served with what was trained.")
    parser.add_argument("--feed", required=True, metavar="URL")
    parser.add_argument("--server", required=True, metavar="URL")
    parser.add_argument("--mirror", required=True, type=Path, metavar="FILE")
    parser.add_argument("--run", required=True, type=Path, metavar="FOLDER", help="what trainer.py left")
    options = parser.parse_args()
    disable_progress_bar()
    report = json.loads((options.run / "report.json").read_text())
    first = options.run / "first"
    with open_store(options.feed) as store:
        head = verify(store).head
        if head is None:
            sys.exit(f"error: there is no version in {options.feed} (give the --feed of the run)")
        if not first.exists():
            restore(store, first, version=0)
    checks = {
        "version": caught_up(options.server, head),
        "tensors": differing(options.mirror, options.run / "weights" / "model.safetensors"),
        "live": ask(options.server, "/deltasync/scrub", {"repair": False}),
        "apart": log_prob_distance(options.server, options.run / "weights", first),
    }
    (options.run / "check.json").write_text(json.dumps(checks, indent=1))
    is_right = print_report(head, checks, report)
    sys.exit(0 if is_right else 3)


def caught_up(server: str, version: int) -> int | None:
    """Wait until the server has the last version, or time is up; return the version that it has."""
    deadline_s = time.monotonic() + _CATCH_UP_S
    while True:
        live: int | None = ask(server, "/deltasync/status", None)["version"]
        if live == version or time.monotonic() >= deadline_s:
            return live
        time.sleep(0.1)


def differing(mirror: Path, weights: Path) -> dict[str, Any]:
    """How many tensors were compared, and the names of those that have other bits."""
    served, trained = load_file(mirror), load_file(weights)
    names = sorted(served.keys() | trained.keys())
    wrong = [name for name in names if not _same(served.get(name), trained.get(name))]
    return {"compared": len(names), "differing": wrong}


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


@torch.inference_mode()
def log_prob_distance(server: str, weights: Path, first: Path) -> dict[str, float]:
    """How far the log-probabilities of the server's guesses are from those that transformers computes.

    `first` is a checkpoint with the weights that training began with, for comparison: those must be further apart.
    """
    prompt = AutoTokenizer.from_pretrained(first).apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        tools=[WordleGame("").guess],
        add_generation_prompt=True,
        return_dict=False,
    )
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in (weights, first)]
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    apart: list[list[torch.Tensor]] = [[], []]
    for seed in range(GUESSES):
        body = {"model": served_name(server), "seed": seed, **asked}
        choice = ask(server, "/v1/completions", body)["choices"][0]
        served = torch.tensor(choice["logprobs"]["token_logprobs"])
        ids = torch.tensor([prompt + choice["token_ids"]])
        for model, differences in zip(models, apart, strict=True):
            logs = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            differences.append((logs[-len(served) :] - served).abs())
    last, before = (torch.cat(differences) for differences in apart)
    return {"tokens": len(last), "mean": float(last.mean()), "max": float(last.max()), "before": float(before.mean())}


def served_name(server: str) -> str:
    with urllib.request.urlopen(f"{server}/v1/models") as response:
        return str(json.loads(response.read())["data"][0]["id"])


def ask(server: str, path: str, body: Any) -> Any:
    """The answer to a POST, or without a body to a GET, as JSON."""
    headers = {"authorization": f"Bearer {os.environ['DELTASYNC_TOKEN']}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server + path, data, headers)) as response:
        return json.loads(response.read())


def print_report(head: int, checks: dict[str, Any], report: dict[str, Any]) -> bool:
    """Print the result of every check; return whether all succeeded."""
    account, rewards, apart = report["account"], report["rewards"], checks["apart"]
    tokens = sum(account["staleness"].values())
    stale = ", ".join(f"{syncs}: {count / tokens:.0%}" for syncs, count in account["staleness"].items())
    deltas = [event for event in report["versions"] if event["kind"] == "delta"]
    some = max(1, len(rewards) // 6)
    tensors, live = checks["tensors"], checks["live"]
    results = [
        (checks["version"] == head, f"the server has version {checks['version']} of {head}"),
        (not tensors["differing"], f"{tensors['compared']} tensors in its mirror are the trainer's, bit by bit"),
        (live == {"version": head, "damaged": [], "unseen_elements": 0}, "its live memory is its mirror"),
        (
            apart["mean"] < min(MOST_APART, apart["before"] / 3),
            f"log-probabilities are {apart['mean']:.4f} from those of transformers, at most {apart['max']:.4f} "
            f"({apart['before']:.4f} with the weights of the beginning)",
        ),
        (account["older_than_label"] == 0, f"no token of {tokens} is older than its label"),
    ]
    print(f"reward of the first {some} steps {_mean(rewards[:some]):.3f}, of the last {_mean(rewards[-some:]):.3f}")
    print(f"{len(deltas)} deltas of {_mean([event['payload_bytes'] for event in deltas]) / 1000:.1f} kB")
    print(f"staleness in syncs, by token: {stale}; {account['spanning']} of {account['answers']} answers span a switch")
    for is_right, what in results:
        print(f"{'yes' if is_right else 'NO '}  {what}")
    return all(is_right for is_right, _ in results)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    main()
