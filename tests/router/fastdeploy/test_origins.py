"""No test of FastDeploy's is left out in silence: each has a translation that passes, or a reason."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.router.fastdeploy.origins import DIFFERENT, NOT_APPLICABLE, RECORDED, TRANSLATIONS, render_lists

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "internals" / "fastdeploy_router_tests.md"


@pytest.fixture(scope="module", autouse=True)
def all_translations() -> None:
    """Every test of this folder has said what it translates."""
    for module in HERE.glob("test_*.py"):
        importlib.import_module(f"{__package__}.{module.stem}")


def test_the_list_has_all_115_tests_once() -> None:
    """22 of the Python router; of the Go router 92, and the set-up of one package."""
    assert len(RECORDED) == len(set(RECORDED)) == 115
    assert sum(name.startswith("tests/router/") for name in RECORDED) == 22


def test_each_test_is_translated_or_says_why_it_does_not_apply() -> None:
    assert set(RECORDED) - TRANSLATIONS.keys() - NOT_APPLICABLE.keys() == set()


def test_only_recorded_tests_are_translated_or_have_a_reason() -> None:
    assert {*TRANSLATIONS, *DIFFERENT, *NOT_APPLICABLE} - set(RECORDED) == set()


def test_a_test_differs_or_does_not_apply_but_not_both() -> None:
    assert DIFFERENT.keys() & NOT_APPLICABLE.keys() == set()


def test_what_is_documented_is_what_the_table_says() -> None:
    """The page ends with the lists as ``python -m tests.router.fastdeploy.origins`` prints them."""
    assert PAGE.read_text().partition("## Pass")[2] == render_lists().partition("## Pass")[2]
