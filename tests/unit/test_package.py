"""What a release is made from: metadata, the long description, the workflow, the check of a tag; and Windows."""

import importlib.metadata
import importlib.util
import re
import shutil
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from readme_renderer import markdown
from support import processes
from trove_classifiers import classifiers

import deltasync

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
TAG = f"v{PROJECT['version']}"
SAMPLE_TAG = "v42.0"
"""The tag in a long description that is rendered without a build."""


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_one_version() -> None:
    assert PROJECT["version"] == deltasync.__version__ == importlib.metadata.version("deltasync")


def test_classifiers_exist() -> None:
    assert set(PROJECT["classifiers"]) <= classifiers
    assert PROJECT["classifiers"] == sorted(PROJECT["classifiers"])


def test_every_url_is_in_the_repository() -> None:
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= PROJECT["urls"].keys()
    for url in PROJECT["urls"].values():
        assert url.startswith(REPOSITORY)
        page = re.fullmatch(r"/(?:blob|tree)/main/(.+)", url.removeprefix(REPOSITORY))
        assert page is None or (ROOT / page[1]).exists(), url


def test_every_tool_of_the_build_is_pinned() -> None:
    pins = {
        name: {Requirement(line).name.lower().replace("_", "-") for line in text.splitlines() if "==" in line}
        for name in ("constraints.txt", "vllm-constraints.txt", "vllm-oldest-constraints.txt")
        for text in [(ROOT / name).read_text()]
    }
    for requirement in PYPROJECT["build-system"]["requires"]:
        wanted = Requirement(requirement).name
        assert not [name for name, pinned in pins.items() if wanted not in pinned], wanted


# --- the long description ---------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """The addresses of all links and images, the ids of all elements, and the text of all code blocks."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.images: list[str] = []
        self.ids: set[str] = set()
        self.code: list[str] = []
        self._in_code = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "img":
            self.images.append(values["src"])
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "pre":
            self._in_code = True
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_code = self._in_code and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code[-1] += data


def rendered(text: str) -> Links:
    html = markdown.render(text)
    assert html is not None
    return Links(html)


@pytest.fixture(scope="module")
def page() -> Links:
    """The long description as an index shows it. An installed package that is older than the README has another one."""
    command = [sys.executable, "-m", "hatch_fancy_pypi_readme"]
    done = processes.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return rendered(done.stdout)


def test_every_link_of_the_long_description_leads_somewhere(page: Links) -> None:
    inside = {f"#{name}" for name in page.ids}
    files = f"{REPOSITORY}/blob/{SAMPLE_TAG}/"
    assert sum(link.startswith(files) for link in page.links) > 30
    for link in page.links:
        assert link in inside or link.startswith("https://"), f"{link} is relative to nothing on an index"
        if link.startswith(files):
            path = link.removeprefix(files).partition("#")[0]
            assert (ROOT / path).exists(), link


def test_every_image_of_the_long_description_is_in_the_repository(page: Links) -> None:
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + f"/{SAMPLE_TAG}/"
    assert page.images
    for image in page.images:
        assert (ROOT / image.removeprefix(raw)).is_file(), image


def test_code_of_the_readme_is_not_rewritten(page: Links) -> None:
    readme = rendered((ROOT / "README.md").read_text())
    assert len(readme.code) > 5
    assert page.code == readme.code


# --- the workflow -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    """`on` is True here: YAML 1.1 reads it as a truth value."""
    loaded: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    return loaded


def test_only_a_tag_is_published_and_only_after_every_check(workflow: dict[Any, Any]) -> None:
    jobs = workflow["jobs"]
    assert workflow[True]["push"] == {"tags": ["v*"]}
    assert jobs["publish"]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"

    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        names = {needs} if isinstance(needs, str) else set(needs)
        return names.union(*(before(name) for name in names))

    assert before("publish") == jobs.keys() - {"publish"}


def test_only_the_last_job_may_upload_and_nothing_holds_a_token(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    allowed = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_actions_are_pinned_by_their_commit(workflow: dict[Any, Any]) -> None:
    uses = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert len(uses) > 5
    assert not [use for use in uses if re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", use) is None]


def test_the_files_that_the_workflow_runs_exist(workflow: dict[Any, Any]) -> None:
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    runs.append(PYPROJECT["tool"]["cibuildwheel"]["test-command"].replace("{project}/", ""))
    files = [word for run in runs for word in run.split() if word.endswith((".py", ".txt"))]
    assert {".ci/check_release.py", "tests/e2e/installed_package.py", "constraints.txt"} <= set(files)
    assert all((ROOT / file).is_file() for file in files), files


def test_wheels_are_built_and_installed_for_every_python_that_is_claimed(workflow: dict[Any, Any]) -> None:
    claimed = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert claimed
    assert set(claimed) <= set(workflow["jobs"]["check"]["strategy"]["matrix"]["python"])
    runners = {entry["name"] for entry in workflow["jobs"]["wheels"]["strategy"]["matrix"]["include"]}
    assert runners == {"manylinux-x86_64", "manylinux-aarch64", "macos-arm64", "macos-x86_64"}
    # The stable ABI of the oldest Python that nanobind supports it for, and a wheel for each Python before.
    assert PYPROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
    assert PYPROJECT["tool"]["cibuildwheel"]["build"] == ["cp311-*", "cp312-*"]


# --- the check of a tag -----------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that can be released as v1.2.3 from somebody/deltasync."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "check_release.py", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nversion = "1.2.3"\n[project.urls]\nRepository = "https://github.com/somebody/deltasync"\n'
    )
    (tmp_path / "src" / "deltasync").mkdir(parents=True)
    (tmp_path / "src" / "deltasync" / "__init__.py").write_text('"""Text."""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2027-01-31)\n\n- It works.\n\n## 1.2.2\n\n- No.\n")
    return tmp_path


def check(tree: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, tree / ".ci" / "check_release.py", *arguments]
    done = processes.run(command)
    return done.returncode, done.stderr


def test_a_tree_that_can_be_released(tree: Path) -> None:
    assert check(tree, "v1.2.3") == check(tree, "v1.2.3", "somebody/deltasync") == (0, "")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("pyproject.toml", "1.2.3", "1.2.4", "the tag must be v1.2.4"),
        ("src/deltasync/__init__.py", "1.2.3", "1.2.30", "__version__ is not 1.2.3"),
        ("CHANGELOG.md", "## 1.2.3 ", "## 1.2.30 ", "no section 1.2.3"),
        ("CHANGELOG.md", "- It works.", "", "no section 1.2.3"),
        ("CHANGELOG.md", "## 1.2.2", "## Unreleased", "still has a section Unreleased"),
        ("pyproject.toml", "somebody", "nobody", "names https://github.com/nobody/deltasync"),
    ],
)
def test_a_tree_that_cannot_be_released(tree: Path, file: str, old: str, new: str, message: str) -> None:
    path = tree / file
    path.write_text(path.read_text().replace(old, new))
    code, err = check(tree, "v1.2.3", "somebody/deltasync")
    assert (code, message in err) == (1, True), err


def test_the_check_reads_this_tree() -> None:
    spec = importlib.util.spec_from_file_location("check_release", ROOT / ".ci" / "check_release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.problems(ROOT, TAG, REPOSITORY.removeprefix("https://github.com/"))
    assert [problem for problem in found if "CHANGELOG.md" not in problem] == []


# --- Windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["import deltasync", "from deltasync.files import locked", "import deltasync.__main__"]
)
def test_windows_is_refused_at_import(code: str) -> None:
    command = [sys.executable, "-c", f"import sys; sys.platform = 'win32'; {code}"]
    done = processes.run(command)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: deltasync does not run on Windows")
