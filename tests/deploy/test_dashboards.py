"""Grafana's dashboards, which scripts/dashboards writes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
UNITS = {"short", "s", "reqps", "ops", "bytes", "Bps", "percent", "percentunit"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Import scripts/dashboards, which has no suffix."""
    loader = importlib.machinery.SourceFileLoader("dashboards_script", str(ROOT / "scripts" / "dashboards"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # dataclasses search for their module during its import
        patch.setitem(sys.modules, loader.name, module)
        loader.exec_module(module)
    return module


def list_panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def test_the_files_are_up_to_date(script: ModuleType) -> None:
    assert {path.name: path.read_text() for path in FILES} == script.render(), "run scripts/dashboards"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_panel_has_a_description_a_unit_and_queries_to_the_selected_source(path: Path) -> None:
    for panel in list_panels(path):
        assert panel["title"], panel
        assert panel["description"], panel
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_queries_use_only_variables_of_the_dashboard(path: Path) -> None:
    chosen = {each["name"] for each in json.loads(path.read_text())["templating"]["list"]}
    used = {
        name
        for panel in list_panels(path)
        for target in panel["targets"]
        for name in re.findall(r"\$(\w+)", target["expr"])
    }
    assert used - {"__rate_interval"} == chosen - {"datasource"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_are_inside_the_page_and_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        ids.add(panel["id"])
    assert len(ids) == len(json.loads(path.read_text())["panels"])
