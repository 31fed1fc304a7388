"""The front door: which names are public, what they take, and what importing them costs.

The golden text below is the public face of the package. A change of it is a change for users: it belongs into
CHANGELOG.md. To print the current one: `python tests/unit/test_public_api.py`.
"""

import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import resources
from pathlib import Path

import pytest
from support import processes

import deltasync
from deltasync import errors

DOORS = (
    "deltasync",
    "deltasync.torch",
    "deltasync.transformers",
    "deltasync.trl",
    "deltasync.interop",
    "deltasync.sglang",
    "deltasync.trackers",
    "deltasync.testing",
)

GOLDEN = Path(__file__).with_name("public_api.txt")


MODULES_MAX = 60
"""The most modules of deltasync that `import deltasync` may load."""

WITHOUT_TORCH = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "vllm", "trl"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import deltasync
print(json.dumps(sorted(sys.modules)))
"""


def public_names(door: str) -> list[str]:
    names: list[str] = importlib.import_module(door).__all__
    return names


def signature(function: Callable[..., object]) -> str:
    """A signature without the modules of its types: those are internal. A default that is an object is `...`."""
    found = inspect.signature(function)
    parameters = [
        parameter
        if isinstance(parameter.default, str | int | float | None) or parameter.default is parameter.empty
        else parameter.replace(default=...)
        for parameter in found.parameters.values()
    ]
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", str(found.replace(parameters=parameters))).replace(
        "Ellipsis", "..."
    )


def described(name: str, thing: object) -> Iterator[str]:
    """One line for a name, and one for each public method, property and field of a class."""
    if not isinstance(thing, type):
        yield f"{name}{signature(thing)}" if inspect.isfunction(thing) else f"{name}: {type(thing).__name__}"
        return
    if issubclass(thing, BaseException | Enum):
        yield f"{name}({thing.__bases__[0].__name__})"
        return
    is_protocol = getattr(thing, "_is_protocol", False)
    yield f"{name}" if is_protocol else f"{name}{signature(thing)}"
    for member in sorted(dir(thing)):
        value = inspect.getattr_static(thing, member)
        if (
            member.startswith(("_", "test_"))
            or getattr(value, "__module__", "deltasync").partition(".")[0] != "deltasync"
        ):
            continue
        if isinstance(value, property):
            yield f"  .{member}"
        elif isinstance(value, staticmethod | classmethod):
            yield f"  .{member}{signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"  .{member}{signature(value)}"
        elif value is None or isinstance(value, str | int):
            yield f"  .{member} = {value!r}"


def public_face() -> str:
    """All doors as text."""
    lines: list[str] = []
    for door in DOORS:
        module = importlib.import_module(door)
        lines.append(f"== {door}")
        for name in public_names(door):
            if name != "__version__":
                lines.extend(described(name, getattr(module, name)))
    return "\n".join(lines) + "\n"


def test_the_public_face_is_the_golden_one() -> None:
    wanted, face = GOLDEN.read_text().splitlines(), public_face().splitlines()
    gone = [line for line in wanted if line not in face]
    new = [line for line in face if line not in wanted]
    assert face == wanted, (
        "the public names or signatures have changed. If that is intended: add it to CHANGELOG.md, and run "
        f"`PYTHONPATH=tests python tests/unit/test_public_api.py > {GOLDEN}`\n"
        + "\n".join([*(f"- {line}" for line in gone), *(f"+ {line}" for line in new)])
    )


def test_names_are_sorted_and_exist() -> None:
    for door in DOORS:
        module = importlib.import_module(door)
        assert module.__all__ == sorted(module.__all__), door
        assert all(hasattr(module, name) for name in module.__all__), door


@pytest.mark.parametrize("door", DOORS)
def test_no_public_name_hides_a_module(door: str) -> None:
    path = getattr(importlib.import_module(door), "__path__", ())
    modules = {module.name for module in pkgutil.iter_modules(path)}
    assert modules.isdisjoint(public_names(door))


def test_every_error_is_public_and_has_its_own_kind() -> None:
    classes = {n: e for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)}
    assert classes.keys() <= set(deltasync.__all__)
    assert len({e.kind for e in classes.values()}) == len(classes)


def test_one_spelling_of_the_project_in_names() -> None:
    names = [name for door in DOORS for name in public_names(door) if "sync" in name.lower()]
    assert names
    assert all("Deltasync" in name for name in names)


def test_import_needs_no_torch_and_few_modules() -> None:
    done = processes.run([sys.executable, "-c", WITHOUT_TORCH])
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)
    heavy = {"obstore", "huggingface_hub", "torch", "rich", "safetensors", "ml_dtypes"}
    assert heavy.isdisjoint(name.partition(".")[0] for name in modules)
    own = [name for name in modules if name.partition(".")[0] == "deltasync"]
    assert len(own) <= MODULES_MAX, own
    above = ("deltasync.torch", "deltasync.vllm", "deltasync.cli", "deltasync.testing")
    assert not [name for name in own if name.startswith(above)]


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"], ["serve", "--help"]], ids=" ".join)
def test_the_command_line_needs_no_torch(arguments: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom deltasync.cli.main import main\nmain(sys.argv[1:])"
    done = processes.run([sys.executable, "-c", code, *arguments])
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_package_is_typed() -> None:
    assert resources.files("deltasync").joinpath("py.typed").is_file()


if __name__ == "__main__":
    sys.stdout.write(public_face())
