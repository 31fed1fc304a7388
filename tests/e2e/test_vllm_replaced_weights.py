"""A real server that follows a feed, and vLLM's own routes that would replace its weights or its label."""

from pathlib import Path
from typing import Any

import pytest
from support.vllm import TOKEN, VllmServer, answers, require_vllm, tiny_model, training_feed, versions_of, vllm_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WRITES: list[tuple[str, Any]] = [
    ("/collective_rpc", {"method": "reload_weights"}),
    ("/collective_rpc", {"method": "reset_weights"}),
    ("/collective_rpc", {"method": "load_model"}),
    ("/collective_rpc", {"method": "sleep", "kwargs": {"level": 2}}),
    ("/sleep?level=2", {}),
    ("/init_weight_transfer_engine", {"init_info": {}}),
    ("/start_weight_update", {}),
    ("/update_weight_version", {"new_version": "1"}),
]
"""Each of them would leave the label of version 0 with other weights, or give them another label."""


@pytest.mark.every_vllm
def test_no_other_way_replaces_the_weights_or_the_label_of_a_server_that_follows(tmp_path: Path) -> None:
    """The server is started with version 1 and moves to version 0, so that a reload would be seen."""
    require_vllm()
    with training_feed(tiny_model("qwen3"), tmp_path) as feed:
        feed.step(fraction=0.3, scale=1.0)
        newest = feed.restored(tmp_path / "v1")
        with vllm_server(
            newest, feed.url, tmp_path / "server", DELTASYNC_WAY="push", VLLM_SERVER_DEV_MODE="1"
        ) as server:
            server.control("advance", to=0)
            before = answers(server)
            for path, body in WRITES:
                refused = server.request(path, body)
                assert refused.status >= 400, (path, body, refused)
                assert "POST /deltasync/advance" in str(refused.body), (path, body, refused)
                assert server.request("/deltasync/ready").status == 200
                require_version_0(server, before)
            assert server.control("scrub", repair=False)["damaged"] == []
            require_rest_while_asleep(server, before)


def require_version_0(server: VllmServer, before: list[Any]) -> None:
    assert versions_of(server.complete([5, 17])) == ("0", "0")
    # What the prefix cache holds was computed with version 0, whatever the weights are now.
    assert server.request("/reset_prefix_cache", {}).status == 200
    assert answers(server) == before


def require_rest_while_asleep(server: VllmServer, before: list[Any]) -> None:
    """The weights of a server that sleeps are not in memory. Nothing is written, and it does not wake up."""
    assert server.request("/sleep?level=1", {}).status == 200
    asleep = server.request("/deltasync/advance", {"to": 1}, token=TOKEN)
    assert asleep.status == 503
    assert "asleep" in asleep.body["error"]["message"]
    assert server.request("/is_sleeping").body == {"is_sleeping": True}
    assert server.request("/wake_up", {}).status == 200
    require_version_0(server, before)
    assert server.control("advance", to=1)["version"] == 1
    assert answers(server) != before
