"""The page of a feed in a real browser: live updates, alerts, the heat map, widths, colours, accessibility."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.servers import missing, npm_package
from support.watching import Run

import deltasync
from deltasync.format import keys

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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
LONG_MS = 30_000
HOSTILE = "<img src=x onerror=alert(1)>\u202e"


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
    process = subprocess.Popen(
        [sys.executable, "-m", "deltasync", "ui", str(folder), "--listen", "127.0.0.1:0", "--json"],
        env={**{k: v for k, v in os.environ.items() if k != "DELTASYNC_TOKEN"}, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        yield json.loads(process.stderr.readline())["listening"], process
    finally:
        process.terminate()
        process.wait(60)


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
        assert violations(page, axe) == []
        assert seen.problems == []


def test_a_token_is_asked_for(browser: "Browser", run: Run, axe: str) -> None:
    with ui(run.folder, DELTASYNC_TOKEN="secret") as (url, _):
        with opened(browser, url) as (page, _):
            page.wait_for_selector("#token-form:visible")
            assert page.locator("#overview").is_hidden()
            assert violations(page, axe) == []
            page.fill("#token", "wrong")
            page.keyboard.press("Enter")
            page.wait_for_timeout(300)
            assert page.locator("#token-form").is_visible()
            page.fill("#token", "secret")
            page.keyboard.press("Enter")
            page.wait_for_selector("#figures >> text=v23")
            assert page.locator("#token-form").is_hidden()
        with opened(browser, f"{url}/#token=secret") as (page, seen):
            page.wait_for_selector("#figures >> text=v23")
            assert "secret" not in page.url
            assert seen.problems == []


def test_the_process_that_ends_is_shown(browser: "Browser", run: Run) -> None:
    with ui(run.folder) as (url, process), opened(browser, url) as (page, _):
        page.wait_for_selector("#figures >> text=v23")
        process.terminate()
        process.wait(60)
        page.wait_for_selector("#error >> text=does not respond")


def test_a_report_needs_nothing_else(browser: "Browser", run: Run, tmp_path: Path, axe: str) -> None:
    run.write_beat("near-0", 23, {"engine": "</script><script>document.title='x'</script>"})
    output = tmp_path / "report.html"
    subprocess.run(
        [sys.executable, "-m", "deltasync", "report", str(run.folder), "-o", str(output)],
        check=True,
        capture_output=True,
    )
    shutil.rmtree(run.folder)
    with opened(browser, output.as_uri()) as (page, seen):
        page.wait_for_selector("#figures >> text=v23")
        assert page.locator(".u-wrap canvas").count() == 3
        assert page.title().startswith("version 23")
        assert "</script>" in page.locator("#replicas").inner_text()
        assert violations(page, axe) == []
        page.click('#versions a[href="#/v/23"]')
        page.wait_for_selector("table.heat")
        assert page.locator("#versions a").count() == 16
        assert seen.problems == []
        assert seen.hosts == {""}
