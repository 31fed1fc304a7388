"""Draw the pictures of docs/ui.md: the page of a made-up run, and that of a version in dark colours.

    PYTHONPATH=tests python tests/e2e/ui_pictures.py docs/img

It needs Chromium and Playwright, as test_ui.py does. Draw them again when the page has changed.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright
from test_ui import FLAGS, Run, ui

import deltasync

if TYPE_CHECKING:
    from playwright.sync_api import Route

URL = "s3://bucket/run-42"
VERSIONS = 60


def made_up_run(folder: Path) -> Run:
    """A run with anchors, skips, a pin, a fleet at the head, a replica that is behind, and one that is silent."""
    run = Run(folder, versions=VERSIONS, layers=16)
    for version in (20, 40):
        run.late_anchor(version)
    for level in (4, 16):
        for start in range(0, VERSIONS - level, level):
            run.skip(start, start + level)
    deltasync.pin(str(folder), 36, name="best", note="reward 0.71")
    run.beat("vllm-eu-west-00", 44, ago_s=8)
    for number in range(1, 4):
        run.beat(f"vllm-eu-west-{number:02d}", VERSIONS - 2 + (number == 3), ago_s=5)
    for number in range(7):
        run.beat(f"vllm-us-east-{number:02d}", VERSIONS - 1, ago_s=2 + number)
    run.beat("notebook", 31, ago_s=1500, engine="folder")
    return run


def renamed(route: "Route") -> None:
    """The data of the page with the URL of a bucket instead of a temporary folder."""
    response = route.fetch()
    route.fulfill(response=response, body=json.dumps({**response.json(), "url": URL}))


def main(output: Path) -> None:
    pictures = (
        ("ui.png", "", "light", 980, "#replicas tbody tr"),
        ("ui-version.png", f"/#/v/{VERSIONS - 1}", "dark", 960, "table.heat"),
    )
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = made_up_run(Path(folder) / "feed")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        with ui(run.folder) as (url, _):
            for name, path, scheme, height, shown in pictures:
                context = browser.new_context(viewport={"width": 1200, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.route("**/api/feed", renamed)
                page.goto(f"{url}{path}")
                page.wait_for_selector(shown)
                page.wait_for_selector(f"text={URL}")
                page.screenshot(path=output / name)
                context.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
