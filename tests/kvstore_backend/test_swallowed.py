"""Nothing is swallowed: who catches everything says so in the log, hands the exception on, or raises."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "kvstore_backend").rglob("*.py"))
BROAD = {"Exception", "BaseException"}
TOLD_BY = ("logger.", "_log.", "log.")


def names_of(caught: ast.expr | None) -> set[str]:
    """The classes of an ``except``; of one without any, all."""
    if caught is None:
        return {"BaseException"}
    return {ast.unparse(each) for each in (caught.elts if isinstance(caught, ast.Tuple) else [caught])}


def find_swallowed(tree: ast.Module) -> Iterator[int]:
    """The lines where any exception is caught, and nobody is told."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            yield from [node.lineno for each in node.args if names_of(each) & BROAD]
        if isinstance(node, ast.ExceptHandler) and names_of(node.type) & BROAD and not is_told(node):
            yield node.lineno


def is_told(handler: ast.ExceptHandler) -> bool:
    """Whether a handler raises, writes to the log, or does something with the exception."""
    for node in (each for statement in handler.body for each in ast.walk(statement)):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == handler.name):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(TOLD_BY):
            return True
    return False


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_swallows_whatever_is_raised(module: Path) -> None:
    assert list(find_swallowed(ast.parse(module.read_text()))) == []


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: x = 1", True),
        ("try: f()\nexcept (OSError, Exception) as exc: x = 1", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("with suppress(OSError): f()", False),
        ("try: f()\nexcept OSError: pass", False),
        ("try: f()\nexcept Exception: raise", False),
        ("try: f()\nexcept Exception as exc: future.set_exception(exc)", False),
        ("try: f()\nexcept Exception: logger.exception('so')", False),
    ],
)
def test_it_finds_what_is_swallowed_and_nothing_else(code: str, is_found: bool) -> None:
    assert bool(list(find_swallowed(ast.parse(code)))) is is_found
