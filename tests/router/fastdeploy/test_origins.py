"""No test of FastDeploy's is left out in silence: a test of ours makes the same check, or there is a reason."""

from __future__ import annotations

from pathlib import Path

from tests.router.fastdeploy.origins import DIFFERENT, NOT_APPLICABLE, RECORDED, render_lists

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parents[1] / "docs" / "internals" / "fastdeploy_router_tests.md"


def test_the_list_has_all_115_tests() -> None:
    """22 of the Python router; of the Go router 92, and the set-up of one package."""
    assert len(RECORDED) == 115
    assert sum(name.startswith("tests/router/") for name in RECORDED) == 22


def test_each_test_has_tests_of_ours_or_a_reason() -> None:
    assert {name for name, ours in RECORDED.items() if not ours} == NOT_APPLICABLE.keys()
    assert DIFFERENT.keys() <= RECORDED.keys() - NOT_APPLICABLE.keys()


def test_the_tests_of_ours_exist() -> None:
    for ours in RECORDED.values():
        for file, _, name in (each.partition("::") for each in ours):
            assert f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"


def test_what_is_documented_is_what_the_table_says() -> None:
    """The page ends with the lists as ``python -m tests.router.fastdeploy.origins`` prints them."""
    assert PAGE.read_text().partition("## Pass")[2] == render_lists().partition("## Pass")[2]
