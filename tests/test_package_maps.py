"""The docstring of each package has one line for each of its files and folders, which begins with the name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("kvcommon", "router", "kvstore_backend", "engine")
PACKAGES = sorted(init.parent for top in TOPS for init in (ROOT / top).rglob("__init__.py"))
LINE = re.compile(r"^(\w+(?:\.py|/)) +\S", re.MULTILINE)


def list_described(package: Path) -> Counter[str]:
    """Count the names at the beginnings of the lines in a package's docstring."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return Counter(LINE.findall(docstring))


def list_contents(package: Path) -> Counter[str]:
    """Count the modules and subpackages of a package, with the names that its docstring should have."""
    modules = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    return Counter([*modules, *(f"{init.parent.name}/" for init in package.glob("*/__init__.py"))])


def test_the_docstring_of_a_package_lists_each_module_once() -> None:
    for package in PACKAGES:
        missing, unknown = (
            list_contents(package) - list_described(package),
            list_described(package) - list_contents(package),
        )
        place = f"the docstring of {package.relative_to(ROOT)}/__init__.py"
        assert not missing, f"{place} needs a line for each of {', '.join(missing)}: the name and a description"
        assert not unknown, f"{place} names {', '.join(unknown)} more often than they exist"


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        path.parent
        for top in ("kvcommon", "router", "kvstore_backend", "engine")
        for path in (ROOT / top).rglob("*.py")
    }
    assert folders == set(PACKAGES)
