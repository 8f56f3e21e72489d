"""``scripts/results`` writes docs/results.md and its plots from docs/results/*.json."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Return the functions and constants of scripts/results."""
    return runpy.run_path(str(ROOT / "scripts" / "results"))


def test_the_page_and_its_plots_are_up_to_date(script: dict[str, Any]) -> None:
    written = script["write_all"]()
    differ = [str(path) for path, content in written.items() if not path.exists() or path.read_text() != content]
    assert differ == [], "run scripts/results"
    assert set((ROOT / "docs" / "results").glob("*.svg")) == {path for path in written if path.suffix == ".svg"}
    for path, content in written.items():
        if path.suffix == ".svg":
            ElementTree.fromstring(content)


def test_the_texts_in_the_script_contain_no_figures(script: dict[str, Any]) -> None:
    texts = [script["HEAD"], *(text for section in script["SECTIONS"].values() for text in section)]
    assert [text for text in texts if re.search(r"\d", text)] == []


def test_the_page_begins_with_the_losses(script: dict[str, Any]) -> None:
    columns = [{"name": "requests/s", "better": "higher"}, {"name": "CPU", "better": "lower"}, {"name": "wall"}]
    rows = [
        {"name": "ours", "ours": True, "values": [5, 3, 1]},
        {"name": "ours, slow", "ours": True, "values": [4, 4, 1]},
        {"name": "other", "values": [6, 3, 0]},
        {"name": "silent", "values": [None, None, None]},
    ]
    assert script["find_losses"]({"title": "Routers", "columns": columns, "rows": rows}) == [
        "- Routers, requests/s: other 6; our best is ours 5."
    ]
    page = (ROOT / "docs" / "results.md").read_text()
    assert re.findall("^## (.*)", page, re.MULTILINE)[0] == "Where we lose"


def test_a_certificate_has_a_row_in_the_table_and_a_column_in_the_matrix(script: dict[str, Any]) -> None:
    figures = {"requests": 8, "wrong": 0, "failed": 0, "longest_seconds": 2.0}
    case = {"case": "master hung", **figures, "problems": [], "skipped": ""}
    cases = [case, {**case, "case": "two models", "wrong": 3, "problems": ["3 of 8 answers are wrong"]}]
    cases.append({**case, "case": "pool full", "longest_seconds": 92.04, "problems": ["one request took 92.0 s"]})
    cases.append({**case, "case": "owner hung", "skipped": "the recipe has no part owner"})
    table = script["make_matrix"]([{"title": "a pool", "cases": cases}])
    assert table["losses"] == []
    ours = script["make_matrix"]([{"title": "vLLM with KVStoreConnector", "cases": cases}])
    assert ours["losses"] == ["- vLLM with KVStoreConnector: 2 of 3 cases did not pass."]
    assert [row["values"] for row in table["rows"]] == [[3, 2, 3, 0, 92.0]]
    cells = [row["values"] for row in table["matrix"]["rows"]]
    assert cells == [["passed"], ["wrong: 3 of 8"], ["failed"], ["not run"]]
    assert "failed" in script["draw_plots"](table)["certificates.svg"]
