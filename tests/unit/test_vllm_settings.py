"""How a server follows, from its environment."""

from dataclasses import fields
from pathlib import Path

import pytest

from deltasync.errors import InvalidInputError
from deltasync.vllm.settings import Settings

FEED = {"DELTASYNC_FEED": "s3://bucket/run"}
GOOD: dict[str, tuple[dict[str, str], Settings]] = {
    "only a feed": ({}, Settings("s3://bucket/run")),
    "the defaults": (
        {"DELTASYNC_WAY": "pull", "DELTASYNC_PAUSE": "keep", "DELTASYNC_CACHE": "clear", "DELTASYNC_READY_S": "300"},
        Settings("s3://bucket/run", None, "pull", "keep", None, None, None, 3600.0, "clear", "exit", 300.0),
    ),
    "a token": ({"DELTASYNC_TOKEN": "s3cret"}, Settings("s3://bucket/run", token="s3cret")),
    "driven from outside": ({"DELTASYNC_WAY": "push"}, Settings("s3://bucket/run", way="push")),
    "requests are ended": ({"DELTASYNC_PAUSE": "abort"}, Settings("s3://bucket/run", pause="abort")),
    "requests are waited for": ({"DELTASYNC_PAUSE": "wait"}, Settings("s3://bucket/run", pause="wait")),
    "places": (
        {"DELTASYNC_MIRROR": "/a/mirror", "DELTASYNC_BASE": "b"},
        Settings("s3://bucket/run", mirror=Path("/a/mirror"), base=Path("b")),
    ),
    "a name": ({"DELTASYNC_REPLICA": "r-1"}, Settings("s3://bucket/run", replica="r-1")),
    "scrubbing": ({"DELTASYNC_SCRUB_S": "1e3"}, Settings("s3://bucket/run", scrub_s=1000.0)),
    "no scrubbing": ({"DELTASYNC_SCRUB_S": "off"}, Settings("s3://bucket/run", scrub_s=None)),
    "caches are kept": ({"DELTASYNC_CACHE": "keep"}, Settings("s3://bucket/run", cache="keep")),
    "a refused feed does not end the server": (
        {"DELTASYNC_ON_REFUSED": "serve"},
        Settings("s3://bucket/run", on_refused="serve"),
    ),
    "ready": ({"DELTASYNC_READY_S": "2.5"}, Settings("s3://bucket/run", ready_s=2.5)),
    "ready without a bound": ({"DELTASYNC_READY_S": "off"}, Settings("s3://bucket/run", ready_s=None)),
    "adapters": (
        {"DELTASYNC_ADAPTERS": " math=s3://b/math  chat-2=folder/a=b "},
        Settings("s3://bucket/run", adapters={"math": "s3://b/math", "chat-2": "folder/a=b"}),
    ),
    "adapters alone": (
        {"DELTASYNC_FEED": "", "DELTASYNC_ADAPTERS": "math=s3://b/math"},
        Settings(None, adapters={"math": "s3://b/math"}),
    ),
    "empty is not set": (
        {f"DELTASYNC_{field.name.upper()}": "" for field in fields(Settings) if field.name != "feed"},
        Settings("s3://bucket/run"),
    ),
    "others are left alone": (
        {"DELTASYNC_KERNELS": "reference", "TOKEN": "x", "VLLM_WAY": "y"},
        Settings("s3://bucket/run"),
    ),
}


@pytest.mark.parametrize(("environment", "wanted"), GOOD.values(), ids=GOOD.keys())
def test_good_ones(environment: dict[str, str], wanted: Settings) -> None:
    assert Settings.from_environment({**FEED, **environment}) == wanted


BAD: dict[str, tuple[dict[str, str], str]] = {
    "no feed": ({}, r"DELTASYNC_FEED is not set \(set it to the URL"),
    "an empty feed": ({"DELTASYNC_FEED": ""}, "DELTASYNC_FEED is not set"),
    "no such way": ({**FEED, "DELTASYNC_WAY": "Pull"}, r"DELTASYNC_WAY is 'Pull' \(set it to one of pull, push\)"),
    "no such pause": ({**FEED, "DELTASYNC_PAUSE": "kill"}, r"DELTASYNC_PAUSE is 'kill' .*one of keep, abort, wait"),
    "no such cache": ({**FEED, "DELTASYNC_CACHE": "reset"}, r"DELTASYNC_CACHE is 'reset' .*one of clear, keep"),
    "no such action": ({**FEED, "DELTASYNC_ON_REFUSED": "0"}, r"DELTASYNC_ON_REFUSED is '0' .*one of exit, serve"),
    "no bound": ({**FEED, "DELTASYNC_READY_S": "-1"}, r"DELTASYNC_READY_S is '-1' .*seconds above 0, or off"),
    "an adapter without a feed": ({"DELTASYNC_ADAPTERS": "math"}, r"DELTASYNC_ADAPTERS is 'math' .*NAME=URL"),
    "an adapter twice": ({"DELTASYNC_ADAPTERS": "a=b a=c"}, r"DELTASYNC_ADAPTERS is 'a=b a=c' .*each name once"),
    "a name that is a path": ({"DELTASYNC_ADAPTERS": "../a=b"}, "DELTASYNC_ADAPTERS is"),
    "no number": ({**FEED, "DELTASYNC_SCRUB_S": "often"}, "DELTASYNC_SCRUB_S is 'often'"),
    "zero": ({**FEED, "DELTASYNC_SCRUB_S": "0"}, "DELTASYNC_SCRUB_S is '0'"),
    "below zero": ({**FEED, "DELTASYNC_SCRUB_S": "-3"}, "DELTASYNC_SCRUB_S is '-3'"),
    "never": ({**FEED, "DELTASYNC_SCRUB_S": "inf"}, "DELTASYNC_SCRUB_S is 'inf'"),
    "not a number": ({**FEED, "DELTASYNC_SCRUB_S": "nan"}, "DELTASYNC_SCRUB_S is 'nan'"),
}


@pytest.mark.parametrize(("environment", "message"), BAD.values(), ids=BAD.keys())
def test_bad_ones_name_the_variable(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Settings.from_environment(environment)


def test_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASYNC_FEED", "folder")
    assert Settings.from_environment().feed == "folder"
