"""The docs site builds without a warning and loads nothing from elsewhere; what stands in two languages is the same."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_lines import check_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHINESE = sorted(path.relative_to(DOCS / "zh") for path in (DOCS / "zh").rglob("*.md"))
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
COMMANDS = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")


# What operators type: of ours each command is read by its program's own parser, and each path is one that is served.
OPERATORS_PAGES = sorted(
    path.relative_to(DOCS) for path in (DOCS / "operations.md", DOCS / "runbook.md", *DOCS.glob("operations/*.md"))
)
OURS = re.compile(r"(?:kvrouter|kvstore|python -m)\b")
ADDRESS = re.compile(r"http://127\.0\.0\.1:(52700|52400|52500)(/[\w/]*)")


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


@pytest.mark.parametrize("page", OPERATORS_PAGES, ids=str)
def test_commands_on_operators_pages_would_be_taken(page: Path) -> None:
    served = json.loads((ROOT / "tests" / "public_surface.json").read_text())["HTTP paths"]
    for line in typed((DOCS / page).read_text()):
        if OURS.match(line):
            check_command(shlex.split(line), {})
        for port, path in ADDRESS.findall(line):
            known = served["router" if port == "52700" else "engine"]
            assert path in known or f"{path.rpartition('/')[0]}/{{request_id:path}}" in known, line


def typed(text: str) -> list[str]:
    """The commands of a page, each in one line, without comments."""
    lines = "".join(block for language, block in commands(text) if language == "bash").replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


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
