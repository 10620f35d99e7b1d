"""The project's imports, read from its source without running it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("eagle3", "tasks", "flows")


@dataclass(frozen=True)
class Call:
    name: str
    keywords: dict[str, str]
    line: int


class Imports:
    """Who imports whom, by syntax: imports inside functions count."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = [
            path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))
        ]

    def tree(self, path: Path) -> ast.Module:
        return ast.parse(path.read_text(), str(path))

    def names(self, path: Path) -> Iterator[tuple[str, str | None]]:
        """Each import of a file as (module, name), name None for `import module`."""
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                yield from ((node.module or "", alias.name) for alias in node.names)

    def modules(self, path: Path) -> set[str]:
        return {module for module, _ in self.names(path)}

    def top_level_modules(self, path: Path) -> set[str]:
        """Modules that importing the file imports at once."""
        found = set()
        for node in self.tree(path).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
        return found

    def calls(self, path: Path) -> Iterator["Call"]:
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.Call):
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
                yield Call(ast.unparse(node.func), keywords, node.lineno)

    def ours(self, path: Path) -> set[Path]:
        """Files of ours that a file takes something from, seen through what packages re-export."""
        found = (self._home(module, name) for module, name in self.names(path))
        return {home for home in found if home is not None}

    def closure(self, start: Path) -> set[Path]:
        seen: set[Path] = set()
        waiting = [start]
        while waiting:
            new = self.ours(waiting.pop()) - seen
            seen |= new
            waiting += new
        return seen

    def _home(self, module: str, name: str | None) -> Path | None:
        if module.split(".")[0] not in PACKAGES:
            return None
        base = self.root / Path(*module.split("."))
        if base.with_suffix(".py").exists():
            return base.with_suffix(".py")
        init = base / "__init__.py"
        if name is None:
            return init
        if (base / name).is_dir() or (base / f"{name}.py").exists():
            return self._home(f"{module}.{name}", None)
        if not init.exists():
            return None  # not there: mypy says so
        for origin, exported in self.names(init):
            if exported == name:
                return self._home(origin, name)
        return init


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def imports() -> Imports:
    return Imports(ROOT)


@pytest.fixture(scope="session")
def dvc_stages() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
