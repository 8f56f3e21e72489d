"""The runbook has a section for each alert, and each alert names its section. Names in its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.test_public_surface import RECORD

ROOT = Path(__file__).parents[2]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_severity_a_text_and_a_link_to_the_runbook(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/runbook.md#{str(rule['alert']).lower()}"


def test_each_alert_has_a_section_in_the_same_order() -> None:
    assert list(SECTIONS) == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_the_meaning_the_effect_the_diagnosis_and_the_action(name: str) -> None:
    section = SECTIONS[name]
    places = [section.find(f"**{word}:**") for word in ("Means", "Users notice", "Look at", "Do")]
    assert -1 not in places
    assert places == sorted(places)
    assert "```bash" in section[places[2] : places[3]], "commands to look with"


def test_metrics_and_flags_in_the_runbook_exist() -> None:
    known = RECORD.read_text() + "".join(page.read_text() for page in (ROOT / "docs" / "operations").glob("*.md"))
    # Metrics of the master, which the test of the whole system reads.
    known += (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    for name in re.findall(r"\b(?:router|kvstore)_\w+_\w+", RUNBOOK):
        assert name.removesuffix("_total").removesuffix("_sum") in known, name
    for flag in re.findall(r"`(--[a-z_-]+)", RUNBOOK):
        assert flag in known, flag
