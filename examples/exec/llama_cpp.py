"""Let a llama.cpp server load the checkpoint folder of a version. Runs after each switch of `deltasync follow`.

    llama-server --models-dir /models/gguf --port 8080
    deltasync follow s3://bucket/run-42 --target /models/live --exec \
        "python llama_cpp.py {path} /models/gguf/policy.gguf --convert llama.cpp/convert_hf_to_gguf.py"

The folder is converted beside the served file, which is then replaced. The server, in router mode, unloads the old one
and loads the new one. Exits with 0 once the server says that the model is loaded.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_POLL_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a checkpoint folder, and let a llama.cpp server load it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path, metavar="FILE", help="the GGUF file in the server's --models-dir")
    parser.add_argument("--convert", required=True, type=Path, metavar="SCRIPT", help="llama.cpp's converter")
    parser.add_argument("--type", default="bf16", help="element type of the GGUF file")
    parser.add_argument("--server", default="http://127.0.0.1:8080", metavar="URL")
    parser.add_argument("--wait-s", type=float, default=300.0, help="how long the server may take to load it")
    options = parser.parse_args()
    # In the same folder, so that the rename is one; with another suffix, so that the server does not list it.
    converted = options.model.with_suffix(".converting")
    command = [sys.executable, options.convert, options.folder, "--outfile", converted, "--outtype", options.type]
    subprocess.run(command, check=True)
    os.replace(converted, options.model)
    try:
        reload(options.server, options.model.stem, wait_s=options.wait_s)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {options.server} did not load {options.model}: {error}")


def reload(server: str, model: str, *, wait_s: float) -> None:
    """Unload a model, load it again, and wait for that. ValueError if it fails."""
    until_s = time.monotonic() + wait_s
    ask(f"{server}/models?reload=1")
    if status(server, model)["value"] != "unloaded":
        ask(f"{server}/models/unload", {"model": model})
    for wanted in ("unloaded", "loaded"):
        while (found := status(server, model))["value"] != wanted:
            if wanted == "loaded" and found.get("failed"):
                raise ValueError(f"the model ended with exit code {found.get('exit_code')}")
            if time.monotonic() > until_s:
                raise ValueError(f"it is {found['value']!r}, not {wanted!r}")
            time.sleep(_POLL_S)
        if wanted == "unloaded":
            ask(f"{server}/models/load", {"model": model})


def status(server: str, model: str) -> dict[str, Any]:
    """What the server says of a model: its `value` is "loaded", "loading", "unloaded" and so on."""
    for found in ask(f"{server}/models")["data"]:
        if found["id"] == model:
            result: dict[str, Any] = found["status"]
            return result
    raise ValueError(f"it has no model {model!r}: is the file in its --models-dir?")


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: {error.code} {error.read()[:300]!r}") from error


if __name__ == "__main__":
    main()
