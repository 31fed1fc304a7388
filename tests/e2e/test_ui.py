"""The page of a feed in a real browser: live updates, alerts, the heat map, widths, colours, accessibility."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support import LONG_S, processes
from support.feeds import Feed
from support.servers import missing, npm_package

import deltasync
from deltasync import blocks
from deltasync.blocks import detect
from deltasync.codecs import exp
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat
from deltasync.format.weights import Weights
from deltasync.replica.events import Seconds
from deltasync.store.local import LocalStore
from deltasync.ui.index import version_json

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, Response, Route

pytestmark = pytest.mark.e2e

AXE_VERSION = "4.14.0"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LONG_MS = 1000 * LONG_S
NONE = "\u2013"
"""What the page shows for a figure that is not known."""

HOSTILE = "<img src=x onerror=alert(1)>\u202e"
STEP_S = 20
WIDTH = 64
_KINDS = {
    "self_attn.q_proj.weight": (WIDTH, WIDTH),
    "self_attn.k_proj.weight": (WIDTH // 4, WIDTH),
    "self_attn.v_proj.weight": (WIDTH // 4, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.gate_proj.weight": (2 * WIDTH, WIDTH),
    "mlp.up_proj.weight": (2 * WIDTH, WIDTH),
    "mlp.down_proj.weight": (WIDTH, 2 * WIDTH),
    "input_layernorm.weight": (WIDTH,),
}


def model(layers: int) -> dict[str, np.ndarray]:
    """A small model whose tensors have the names of a large one."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, WIDTH)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{kind}": shape for kind, shape in _KINDS.items()}
    shapes["model.norm.weight"] = (WIDTH,)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


class Run(Feed):
    """A run in a folder. Each tensor is a block of its own, as in a model whose tensors have millions of elements.

    Its last version so far is committed now, those before at a steady pace.
    """

    def __init__(self, folder: Path, *, versions: int, layers: int = 8) -> None:
        super().__init__(LocalStore(folder))
        self.folder = folder
        self._first_unix_s = int(time.time()) - STEP_S * (versions - 1)
        self._rng = np.random.default_rng(1)
        self.anchor(model(layers))
        for _ in range(versions - 1):
            self.step()

    def new(self, *args: Any, **fields: Any) -> Manifest:
        version = len(self.states)
        return super().new(*args, created_unix_s=self._first_unix_s + STEP_S * version, step=10 * version, **fields)

    def step(self) -> Manifest:
        """The next version: late layers and the MLP change most."""
        old, version = self.states[-1], len(self.states)
        arrays = tuple(array.copy() for array in old.arrays)
        for spec, array in zip(old.layout.tensors, arrays, strict=True):
            layer = int(spec.name.split(".")[2]) if ".layers." in spec.name else 1
            share = 0.002 * (1 + layer) * (0.35 if "attn" in spec.name else 1.0) * (1.2 + math.sin(version / 6))
            bits = array.reshape(-1)
            hit = self._rng.random(bits.size) < share
            # Most changes are by one unit in the last place, as in training.
            bits[hit] += self._rng.geometric(0.8, np.count_nonzero(hit)).astype(bits.dtype)
        new = Weights(old.layout, arrays)
        runs = [np.array([(i, 0, spec.elements)], np.int64) for i, spec in enumerate(old.layout.tensors)]
        group = [exp.encode(old, changes) for piece in runs for changes in detect(old, new, piece)]
        ref = self.put_change(version - 1, version, group)
        changed = sum(block.changed for block in group)
        return self._commit(self.new("delta", new, blocks.digest(new), payloads=(ref,), changed=changed), new)

    def beat(
        self, replica: str, version: int, *, ago_s: float = 3, engine: str = "vllm 0.32", proved: bool = True
    ) -> None:
        """The heartbeat of a replica that serves a version."""
        served = self.log.read(version)
        seconds = Seconds(plan=0.012, fetch=0.31, decode=0.17, stage=0.09, commit=0.021, pause=0.008)
        facts = {"engine": engine, "digest": served.digest.hex}
        facts |= {f"{phase}_s": f"{value:.4f}" for phase, value in asdict(seconds).items()}
        if proved:
            facts |= {"proved_version": str(version), "proved_unix_s": str(int(time.time() - ago_s - 240))}
        self.write_beat(replica, version, facts, ago_s=ago_s)

    def write_beat(self, replica: str, version: int | None, facts: dict[str, str], *, ago_s: float = 3) -> None:
        """A heartbeat with any facts."""
        at_s = time.time() - ago_s
        self.log.beat(Heartbeat(replica, version, int(at_s), facts))
        os.utime(self.folder / keys.replica_key(replica), (at_s, at_s))


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    chromium = shutil.which("chromium")
    if chromium is None:
        missing("chromium is not installed (apt install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed (pip install playwright)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def axe() -> str:
    return (npm_package("axe-core", AXE_VERSION) / "axe.min.js").read_text()


@dataclass
class Seen:
    """What a page did beside what it shows."""

    problems: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@contextmanager
def opened(browser: "Browser", url: str, **options: Any) -> "Iterator[tuple[Page, Seen]]":
    """A page, which must make no error and ask no other host."""
    seen = Seen()
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    page.set_default_timeout(LONG_MS)
    page.on("console", lambda message: seen.problems.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: seen.problems.append(str(error)))
    page.on("request", lambda request: seen.hosts.add(request.url.split("/")[2]))
    page.goto(url)
    yield page, seen
    context.close()


@contextmanager
def ui(folder: Path, **environment: str) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """The command as a user starts it."""
    command = [sys.executable, "-m", "deltasync", "ui", str(folder), "--listen", "127.0.0.1:0", "--json"]
    env = {**{k: v for k, v in os.environ.items() if k != "DELTASYNC_TOKEN"}, **environment}
    with processes.running(command, env=env, stderr=subprocess.PIPE) as process:
        yield json.loads(process.stderr.readline())["listening"], process


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "feed", versions=24)
    made.late_anchor(16)
    made.skip(8, 12)
    made.skip(12, 16)
    deltasync.pin(str(made.folder), 20, name="best")
    for number in range(3):
        made.beat(f"near-{number}", 23)
    return made


def violations(page: "Page", axe: str) -> list[str]:
    """What axe-core finds wrong, on the page as it is."""
    # As the browser's own tools do it, which the page's policy does not bind.
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{v['id']}: {node['html'][:200]} {node['failureSummary']}" for v in found["violations"] for node in v["nodes"]
    ]


def overflow(page: "Page") -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_a_run_live(browser: "Browser", run: Run) -> None:
    """New versions, a replica that falls behind and catches up, damage, a store that vanishes: without a reload."""
    with ui(run.folder) as (url, _), opened(browser, url) as (page, seen):
        page.wait_for_selector("#figures >> text=v23")
        assert page.locator("#state").inner_text() == "Live"
        assert page.locator("#alerts .alert").count() == 0
        assert page.locator("#replicas tbody tr").count() == 3
        assert page.locator("#replicas >> text=current").count() == 3
        assert page.locator(".u-wrap canvas").count() == 3
        assert page.locator("#chain .skip-arc").count() == 2
        assert page.locator("#chain .ring").count() == 1
        assert page.locator("#chain .pin-mark title").all_text_contents() == ["best"]

        run.step()
        page.wait_for_selector("#figures >> text=v24")
        page.wait_for_selector("#replicas >> text=catching up")
        for _ in range(9):
            run.step()
        run.beat("near-0", 33)
        run.beat("near-1", 33)
        page.wait_for_selector('#alerts [data-kind="behind"] >> text=Replica near-2 is 10 versions')
        run.beat("near-2", 33)
        page.wait_for_selector('#alerts [data-kind="behind"]', state="detached")
        page.wait_for_function("document.querySelectorAll('#replicas .pill.good').length === 6")

        run.write_beat("near-0", 33, {"digest": "0" * 32, "engine": HOSTILE})
        page.wait_for_selector('#alerts [data-kind="diverged"]')
        assert page.locator("#replicas >> text=DIFFERENT").count() == 1
        assert HOSTILE in page.locator("#replicas").inner_text()
        assert page.locator("#replicas img").count() == 0

        run.store.put(keys.version_key(34), b"{}")
        page.wait_for_selector('#alerts [data-kind="damage"] >> text=version 34')

        away = run.folder.rename(run.folder.with_name("elsewhere"))
        page.wait_for_selector("#error >> text=cannot be read")
        assert page.locator("#state").inner_text() == "Store unreachable"
        assert page.locator("#replicas tbody tr").count() == 3
        away.rename(run.folder)
        page.wait_for_selector("#error", state="hidden")
        assert seen.problems == []
        assert seen.hosts == {url.removeprefix("http://")}


def test_the_heat_map_of_a_version(browser: "Browser", run: Run, axe: str) -> None:
    with ui(run.folder) as (url, _), opened(browser, url) as (page, seen):
        # With the keyboard alone.
        page.wait_for_selector("#versions a")
        page.focus('#versions a[href="#/v/23"]')
        page.keyboard.press("Enter")
        page.wait_for_selector("table.heat")
        assert page.locator("h1:visible").inner_text() == "Version 23"
        heat = page.locator("table.heat").first
        assert heat.locator("tbody tr").count() == 8
        assert heat.locator("tbody tr").first.locator("td").count() == 8
        manifest = run.log.read(23)
        counted = sum(
            float(title.split(": ")[1].split(" of ")[0].replace(",", ""))
            for title in page.locator("table.heat td[title]").evaluate_all("cells => cells.map((c) => c.title)")
        )
        assert counted == manifest.changed
        level = "cell => Number(/h([0-9])/.exec(cell.className)[1])"
        first, last = (heat.locator("tbody tr").nth(i).locator("td").nth(2) for i in (0, 7))
        assert first.evaluate(level) < last.evaluate(level)
        page.select_option("#measure", "bits")
        assert violations(page, axe) == []
        # How far weights moved: as the tables of the blocks say it, for every cell that changed.
        steps = version_json(run.log, 23)["steps"]
        single = steps[0] / sum(steps)
        assert f"1: {100 * single:.1f}"[:4] in page.locator("dl.facts").inner_text()
        for measure, wanted in (("steps", r"[0-9.]+\s?%"), ("ulps", r"[0-9,]+")):
            page.select_option("#measure", measure)
            texts = page.locator("table.heat td[title]").all_inner_texts()
            changed = [text for text in texts if text != NONE]
            assert len(changed) > 30
            assert all(re.fullmatch(wanted, text) for text in changed), changed
            assert violations(page, axe) == []
        page.click("text=Version 22")
        page.wait_for_selector("h1 >> text=Version 22")
        page.go_back()
        page.wait_for_selector("h1 >> text=Version 23")
        page.goto(f"{url}/#/v/9999")
        page.wait_for_selector("#version >> text=version 9999 is not in")
        # The browser itself reports the response 404.
        assert [text for text in seen.problems if "404" not in text] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_widths_and_colours(browser: "Browser", run: Run, axe: str, scheme: str, width: int) -> None:
    run.beat("far", 3)
    run.beat("gone", 3, ago_s=1500)
    options = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme}
    with ui(run.folder) as (url, _), opened(browser, url, **options) as (page, seen):
        page.wait_for_selector('#alerts [data-kind="behind"]')
        page.wait_for_selector('#alerts [data-kind="silent"]')
        assert overflow(page) <= 0
        assert violations(page, axe) == []
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(",")) / 3
        assert (bright > 128) == (scheme == "light")
        page.click("#theme")
        page.click("#theme")
        assert page.locator("#theme").inner_text() == "Dark"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 26)"
        page.goto(f"{url}/#/v/23")
        page.wait_for_selector("table.heat")
        assert overflow(page) <= 0
        edges = "id => document.querySelector(id).getBoundingClientRect().right"
        assert page.evaluate(edges, "#measure") <= page.evaluate(edges, "#version section:has(table.heat)")
        assert violations(page, axe) == []
        assert seen.problems == []


def has_wrong(request: "Request") -> bool:
    return request.headers.get("authorization") == "Bearer wrong"


def is_refused_for_wrong(response: "Response") -> bool:
    return has_wrong(response.request) and response.status == 401


def test_a_token_is_asked_for(browser: "Browser", run: Run, axe: str) -> None:
    with ui(run.folder, DELTASYNC_TOKEN="secret") as (url, _):
        with opened(browser, url) as (page, _):
            page.wait_for_selector("#token-form:visible")
            assert page.locator("#overview").is_hidden()
            assert violations(page, axe) == []
            page.fill("#token", "wrong")
            with page.expect_response(is_refused_for_wrong):
                page.keyboard.press("Enter")
            assert page.locator("#token-form").is_visible()
            # What is asked with the wrong token is answered only after the right one was accepted.
            late: list[Route] = []
            page.route(
                "**/api/feed", lambda route: late.append(route) if has_wrong(route.request) else route.continue_()
            )
            with page.expect_request(has_wrong):
                page.keyboard.press("Enter")
            page.fill("#token", "secret")
            page.keyboard.press("Enter")
            page.wait_for_selector("#figures >> text=v23")
            with page.expect_response(is_refused_for_wrong):
                for route in late:
                    route.continue_()
            with page.expect_response(lambda response: response.ok):
                """The next poll."""
            assert page.locator("#token-form").is_hidden()
            assert page.locator("#overview").is_visible()
        with opened(browser, f"{url}/#token=secret") as (page, seen):
            page.wait_for_selector("#figures >> text=v23")
            assert "secret" not in page.url
            assert seen.problems == []


def test_the_process_that_ends_is_shown(browser: "Browser", run: Run) -> None:
    with ui(run.folder) as (url, process), opened(browser, url) as (page, _):
        page.wait_for_selector("#figures >> text=v23")
        process.terminate()
        process.wait(LONG_S)
        page.wait_for_selector("#error >> text=does not respond")


def test_a_report_needs_nothing_else(browser: "Browser", run: Run, tmp_path: Path, axe: str) -> None:
    run.write_beat("near-0", 23, {"engine": "</script><script>document.title='x'</script>"})
    output = tmp_path / "report.html"
    processes.run([sys.executable, "-m", "deltasync", "report", str(run.folder), "-o", str(output)], check=True)
    shutil.rmtree(run.folder)
    with opened(browser, output.as_uri()) as (page, seen):
        page.wait_for_selector("#figures >> text=v23")
        assert page.locator(".u-wrap canvas").count() == 3
        assert page.title().startswith("version 23")
        assert "</script>" in page.locator("#replicas").inner_text()
        assert violations(page, axe) == []
        page.click('#versions a[href="#/v/23"]')
        page.wait_for_selector("table.heat")
        assert "Steps in ulps" in page.locator("dl.facts").inner_text()
        page.select_option("#measure", "ulps")
        assert set(page.locator("table.heat td[title]").all_inner_texts()) > {NONE}
        assert page.locator("#versions a").count() == 16
        assert seen.problems == []
        assert seen.hosts == {""}
