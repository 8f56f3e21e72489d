"""Each test of FastDeploy's routers has a test of ours with the same check, or a reason why not."""

from __future__ import annotations

from pathlib import Path

from tests.router.fastdeploy.origins import DIFFERENT, NOT_APPLICABLE, RECORDED, render_lists

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parents[1] / "docs" / "internals" / "fastdeploy_router_tests.md"


def test_the_list_has_all_115_tests() -> None:
    """There are 22 tests of the Python router, and 92 of the Go router with the set-up of one package."""
    assert len(RECORDED) == 115
    assert sum(name.startswith("tests/router/") for name in RECORDED) == 22


def test_each_test_has_tests_of_ours_or_a_reason() -> None:
    assert {name for name, ours in RECORDED.items() if not ours} == NOT_APPLICABLE.keys()
    assert DIFFERENT.keys() <= RECORDED.keys() - NOT_APPLICABLE.keys()


def test_the_tests_of_ours_exist() -> None:
    for ours in RECORDED.values():
        for file, _, name in (each.partition("::") for each in ours):
            assert f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"


def test_the_page_has_the_lists_of_the_table() -> None:
    """The page ends with the output of ``python -m tests.router.fastdeploy.origins``."""
    assert PAGE.read_text().partition("## Pass")[2] == render_lists().partition("## Pass")[2]
