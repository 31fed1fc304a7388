"""The host of the store: SeaweedFS with its S3 gateway at one port of all addresses, and one bucket.

Run as `python store.py PORT BUCKET`, with the keys to ask for in the environment. Sends `ready`.
"""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from demo.child import Orders, run_child, send

from deltasync.errors import EngineError, StoreError
from deltasync.store import open_store

_LOOK_S = 0.2
_END_S = 60.0


def main(port: str, bucket: str, orders: Orders) -> None:
    """Serve until standard input ends."""
    config, data = Path("s3.json"), Path("data")
    keys = {"accessKey": os.environ["AWS_ACCESS_KEY_ID"], "secretKey": os.environ["AWS_SECRET_ACCESS_KEY"]}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config.write_text(json.dumps({"identities": [{"name": "all", "credentials": [keys], "actions": actions}]}))
    data.mkdir()
    command = [
        str(Path(sys.prefix) / "bin/weed"), "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=0.0.0.0",
        f"-bucket={bucket}", f"-s3.port={port}", f"-s3.config={config}", "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        is_ready = False
        while not orders.stopped.wait(_LOOK_S):
            if server.poll() is not None:
                raise EngineError(f"SeaweedFS ended with {server.returncode}", hint="look at its log")
            if not is_ready and _can_put(f"s3://{bucket}/ready"):
                is_ready = True
                send("ready")
    finally:
        server.terminate()
        server.wait(_END_S)


def _can_put(url: str) -> bool:
    with closing(open_store(url)) as store:
        try:
            store.put("ready", b"yes")
        except StoreError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(run_child(lambda orders: main(sys.argv[1], sys.argv[2], orders)))
