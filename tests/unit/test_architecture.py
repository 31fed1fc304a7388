"""The pages stay true: links lead somewhere, named functions exist, and every room is in the map and in a layer."""

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import deltasync

ROOT = Path(__file__).parents[2]
PACKAGE = Path(deltasync.__file__).parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "examples/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)
NEEDS_ENGINE = (*(f"deltasync.vllm.{name}" for name in ("engine", "plugin", "trainer", "worker")), "deltasync.nemo_rl")
"""Modules that need a framework that is not here: it is enough that their text defines the name."""


def rooms() -> set[str]:
    """The packages and modules directly below deltasync."""
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    found |= {path.stem for path in PACKAGE.glob("*.py")}
    return found - {"__init__"}


def layers() -> list[set[str]]:
    """The layers of the import linter, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layered,) = (contract for contract in contracts if contract["type"] == "layers")
    return [set(re.split(r"\s*[|:]\s*", layer)) for layer in layered["layers"]]


def defines(name: str) -> bool:
    """Whether a dotted name can be imported: a module, or a class or function and its attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        path = PACKAGE.parent.joinpath(*parts[:count])
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if not source.is_file():
            continue
        if module in NEEDS_ENGINE:
            text = source.read_text(encoding="utf-8")
            return all(re.search(rf"^\s*(class|def) {part}\b", text, re.M) for part in parts[count:])
        thing: object = importlib.import_module(module)
        for attribute in parts[count:]:
            if not hasattr(thing, attribute):
                return False
            thing = getattr(thing, attribute)
        return True
    return False


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.*)", without_code(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        if "://" not in link:
            found = path.parent / file if file else path
            assert found.exists(), link
            assert not anchor or anchor in anchors(found), link


PUBLIC = ("", ".torch", ".transformers", ".trl", ".interop", ".sglang", ".trackers", ".testing")


def public_names() -> dict[str, object]:
    modules = [importlib.import_module(f"deltasync{name}") for name in PUBLIC]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_python_of_the_pages_names_what_exists(page: str) -> None:
    """Imports from deltasync, and the arguments in calls of public names, in blocks of code and inside of sentences."""
    known, text = public_names(), (ROOT / page).read_text(encoding="utf-8")
    codes = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    for code in re.findall(r"`(?:deltasync\.)?(\w+\([^`]*\))`", without_code(text)):
        if code.partition("(")[0] in known:
            codes.append(code.replace("\n", " "))
    for node in (node for code in codes for node in ast.walk(ast.parse(code.replace("…", "...")))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deltasync"):
            assert all(defines(f"{node.module}.{alias.name}") for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("deltasync.")
            if name in known:
                taken = inspect.signature(known[name]).parameters  # type: ignore[arg-type]
                assert {keyword.arg for keyword in node.keywords} <= taken.keys(), ast.unparse(node)


def test_every_function_that_the_walk_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = sorted(set(re.findall(r"`(deltasync(?:\.\w+)+)`", text)))
    assert len(named) > 20
    missing = [name for name in named if not defines(name)]
    assert not missing, f"docs/architecture.md names what does not exist (renamed? moved?): {missing}"


def test_every_room_is_in_a_layer() -> None:
    listed = set().union(*layers())
    assert rooms() == listed, "put every room into the layers of pyproject.toml, and only those"


def test_every_room_is_in_the_map() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = {name.removesuffix(".py").rstrip("/") for name in re.findall(r"`src/deltasync/([\w.]+/?)`", text)}
    assert rooms() == listed, "put every room into the table of CONTRIBUTING.md, and only those"


def test_the_walk_shows_the_layers_of_the_linter() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\n((?:[a-z_| ]+\n)+)```", text, re.M)
    wanted = [layer for layer in layers() if layer != {"__main__"}]
    assert [set(line.split(" | ")) for line in shown[-1].splitlines()] == wanted


ELSEWHERE = {
    "codecs.coo": "property/test_roundtrip.py",
    "codecs.planes": "property/test_roundtrip.py",
    "format.limits": "attacks/test_attacks.py",
    "frameworks": "unit/test_nemo_rl.py",
    "kernels.rans": "property/test_kernels.py",
    "kernels.reference": "property/test_kernels.py",
    "store.memory": "conformance/test_testing_conformance.py",
    "vllm.engine": "e2e/test_vllm.py",
    "vllm.plugin": "e2e/test_vllm.py",
}
"""Modules whose tests are not found by their name: constants, twins that are compared, and what needs a framework."""


def test_the_tests_of_a_module_are_found_by_its_name() -> None:
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    files = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.stem[0] != "_")
    modules = {".".join(path.parts) for path in files}
    assert {name for name in modules if f"test_{name.replace('.', '_')}" not in tests} == set(ELSEWHERE)
    assert [path for path in ELSEWHERE.values() if not (ROOT / "tests" / path).is_file()] == []
