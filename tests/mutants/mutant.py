"""One deliberate fault in our own code, and the tests that must notice it."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A replacement of one passage of a source file.

    `harm`: what the fault breaks, and what that would mean for a user.
    `path`: the file, from the root of the repository. `old` must occur in it exactly once.
    `killers`: ids of tests that pass without the fault, and of which at least one fails with it.
    """

    name: str
    harm: str
    path: str
    old: str
    new: str
    killers: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        """Whether the native core has to be built again."""
        return self.path.startswith("native/")

    def applied_to(self, text: str) -> str:
        """The text of the file with the fault. ValueError if the record no longer fits the file."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.path} has the old text {count} times, not once")
        if self.old == self.new:
            raise ValueError("the new text is the old one")
        mutated = text.replace(self.old, self.new)
        if self.path.endswith(".py"):
            try:
                ast.parse(mutated)
            except SyntaxError as error:
                raise ValueError(f"{self.path} is not Python with the new text: {error}") from error
        return mutated

    def missing_killers(self, root: Path) -> list[str]:
        """The killers that are no tests any more."""
        split = {killer: killer.partition("[")[0].partition("::") for killer in self.killers}
        return [killer for killer, (path, _, name) in split.items() if name not in _tests_of(root / path)]


@cache
def _tests_of(path: Path) -> set[str]:
    """The functions of a file; none if it does not exist."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return {node.name for node in body if isinstance(node, functions)}
