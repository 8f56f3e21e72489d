"""The docs site builds without a warning and loads nothing from elsewhere; what stands in two languages is the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHINESE = sorted(path.relative_to(DOCS / "zh") for path in (DOCS / "zh").rglob("*.md"))
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
COMMANDS = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


def test_every_page_is_in_it(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not (site / page).exists()} == set()


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)")
    found = {(page.name, url) for page in site.rglob("*.html") for url in loads.findall(page.read_text())}
    assert found == set()


def test_the_reference_has_flags_and_metrics_of_each_program(site: Path) -> None:
    flags, metrics = ((site / "reference" / f"{name}.html").read_text() for name in ("flags", "metrics"))
    for flag in ("--splitwise-role", "--prefill-policy", "--kvcache-storage-backend"):
        assert flag in flags
    for metric in ("router_time_to_first_token_seconds", "fastdeploy:num_requests_running", "kvstore_call_seconds"):
        assert metric in metrics


def test_some_pages_are_there_in_chinese() -> None:
    assert {str(page) for page in CHINESE} >= {"index.md", "migrate.md", "mindie.md", "runbook.md"}


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_a_page_in_chinese_lacks_no_heading_and_no_command_of_the_english_one(page: Path) -> None:
    chinese, english = (DOCS / "zh" / page).read_text(), original_of(page).read_text()
    assert outline(chinese) == outline(english)
    assert commands(chinese) == commands(english)
    assert named(english) - named(chinese) == set()


def original_of(page: Path) -> Path:
    """The English page; the first one is the README."""
    return ROOT / "README.md" if str(page) == "index.md" else DOCS / page


def outline(text: str) -> list[int]:
    """The levels of its headings, in their order."""
    return [len(level) for level in HEADING.findall(COMMANDS.sub("", text))]


def commands(text: str) -> list[tuple[str, str]]:
    """What is typed and printed in its blocks, without comments, which are translated."""
    return [(language, re.sub(r" *#.*", "", block)) for language, block in COMMANDS.findall(text)]


def named(text: str) -> set[str]:
    """The flags, files and names in its sentences."""
    return set(CODE.findall(COMMANDS.sub("", text)))
