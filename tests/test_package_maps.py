"""The docstring of each package is a map: one line for each file and folder in it, beginning with its name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("kvcommon", "router", "kvstore_backend", "engine")
PACKAGES = sorted(init.parent for top in TOPS for init in (ROOT / top).rglob("__init__.py"))
LINE = re.compile(r"^(\w+(?:\.py|/)) +\S", re.MULTILINE)


def listed(package: Path) -> Counter[str]:
    """The names that begin the lines of a package's map."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return Counter(LINE.findall(docstring))


def contained(package: Path) -> Counter[str]:
    """The modules and subpackages of a package, as a map names them."""
    modules = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    return Counter([*modules, *(f"{init.parent.name}/" for init in package.glob("*/__init__.py"))])


def test_a_packages_docstring_lists_each_of_its_parts_once() -> None:
    for package in PACKAGES:
        missing, unknown = contained(package) - listed(package), listed(package) - contained(package)
        place = f"the docstring of {package.relative_to(ROOT)}/__init__.py"
        assert not missing, f"{place} needs a line for each of {', '.join(missing)}: its name, and what it holds"
        assert not unknown, f"{place} names {', '.join(unknown)} more often than the folder has it"


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        path.parent
        for top in ("kvcommon", "router", "kvstore_backend", "engine")
        for path in (ROOT / top).rglob("*.py")
    }
    assert folders == set(PACKAGES)
