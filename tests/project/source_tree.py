"""The project's own source, read as syntax trees: what the tests of this folder look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "pallas_kernels": ROOT / "pallas_kernels",
    "jaxserve_checkpoints": ROOT / "checkpoints" / "jaxserve_checkpoints",
    "jaxserve": ROOT / "jaxserve",
    "jaxserve_server": ROOT / "server" / "jaxserve_server",
}


@dataclass(frozen=True)
class Import:
    """One imported module name and where it stands."""

    module: str  # absolute, for example "jax.numpy"
    path: Path
    line: int
    at_top: bool  # runs when the module is imported: in no function, and not for type checkers only

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def modules(package: str) -> dict[str, Path]:
    """Dotted name to file, for every module of a package."""
    base = PACKAGES[package]
    found = {}
    for path in sorted(base.rglob("*.py")):
        parts = (package, *path.relative_to(base).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path) -> list[Import]:
    """Every import of one file; relative ones made absolute."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def absolute(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = package.split(".")[: len(package.split(".")) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def walk(node: ast.AST, at_top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, path, child.lineno, at_top)
            elif isinstance(child, ast.ImportFrom):
                module = absolute(child)
                # `from package import name` may name a module: both readings count.
                for alias in child.names:
                    yield Import(f"{module}.{alias.name}", path, child.lineno, at_top)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for part in child.body:
                    yield from walk(ast.Module([part], []), False)
                for part in child.orelse:
                    yield from walk(ast.Module([part], []), at_top)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_top and not inside)

    return list(walk(ast.parse(path.read_text(), str(path)), True))


def package_imports(package: str) -> list[Import]:
    return [found for name, path in modules(package).items() for found in imports(name, path)]


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")
