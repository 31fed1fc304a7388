"""Check that a tag can be released: `python .ci/check_release.py v0.1.0 [OWNER/REPOSITORY]`. Exits with 1 if not."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(root: Path, tag: str, repository: str | None = None) -> list[str]:
    """What has to change before `tag` can be released from this tree, and from `repository` on GitHub."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = project["version"]
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, but pyproject.toml has version {version}: the tag must be v{version}")
    if f'\n__version__ = "{version}"\n' not in (root / "src" / "deltasync" / "__init__.py").read_text():
        found.append(f"deltasync.__version__ is not {version}, the version in pyproject.toml")
    sections = re.split(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    bodies = {title.split()[0]: body.strip() for title, body in zip(sections[1::2], sections[2::2], strict=True)}
    if not bodies.get(version):
        found.append(f"CHANGELOG.md has no section {version}: give Unreleased this title and a date")
    if bodies.get("Unreleased"):
        found.append("CHANGELOG.md still has a section Unreleased, which the release would leave out")
    if repository is not None and project["urls"]["Repository"] != f"https://github.com/{repository}":
        found.append(
            f"this is {repository}, but pyproject.toml names {project['urls']['Repository']}: "
            "change its URLs, which the long description links to as well"
        )
    return found


def main() -> int:
    """Print every problem."""
    found = problems(ROOT, *sys.argv[1:3])
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
