"""One deliberate fault in our own code, and the tests that must notice it."""

import ast
from dataclasses import dataclass
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
        return [killer for killer in self.killers if not _is_test(root, killer)]


def _is_test(root: Path, killer: str) -> bool:
    path, _, function = killer.partition("[")[0].partition("::")
    if not (root / path).is_file():
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((root / path).read_text())
    return any(isinstance(node, functions) and node.name == function for node in tree.body)
