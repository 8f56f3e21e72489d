"""The docs site: it builds without warnings, loads nothing from other sites, and its pages agree with the code."""

from __future__ import annotations

import ast
import difflib
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


# The commit whose English page a Chinese page follows. This share of the English words may have changed since then.
FOLLOWED = re.compile(r"提交 `([0-9a-f]{7,40})`")
MAX_CHANGED = 0.03

# The parser of its program checks each of our commands on these pages, and each path must exist. Other tests run the
# commands of why_miss.md (tests/engine/serving/test_kvcache.py) and migrate.md (tests/users_words).
PAGES_WITH_COMMANDS = sorted(
    path.relative_to(DOCS)
    for path in DOCS.rglob("*.md")
    if "zh" not in path.parts and path.name not in ("why_miss.md", "migrate.md")
)
# Packages on PyPI that the pages install.
ON_PYPI = {"mooncake-transfer-engine-npu", "nixl==1.5.1"}
DASHBOARD = ROOT / "router" / "console" / "dashboard" / "views"
OURS = re.compile(r"(?:kvrouter|kvstore|python -m)\b")
# A command that searches a log for text.
SEARCHED = re.compile(r"^grep (?:-E )?'([^'^]+)' log_", re.MULTILINE)
ADDRESS = re.compile(r"http://127\.0\.0\.1:(52700|52400|52500)(/[\w/]*)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, and return its folder."""
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


def test_the_site_has_every_page(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not (site / page).exists()} == set()


def test_the_site_loads_nothing_from_other_sites(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)")
    found = {(page.name, url) for page in site.rglob("*.html") for url in loads.findall(page.read_text())}
    assert found == set()


def test_the_reference_lists_flags_and_metrics_of_each_program(site: Path) -> None:
    flags, metrics = ((site / "reference" / f"{name}.html").read_text() for name in ("flags", "metrics"))
    for flag in ("--splitwise-role", "--prefill-policy", "--kvcache-storage-backend"):
        assert flag in flags
    for metric in ("router_time_to_first_token_seconds", "fastdeploy:num_requests_running", "kvstore_call_seconds"):
        assert metric in metrics


def test_some_pages_exist_in_chinese() -> None:
    assert {str(page) for page in CHINESE} >= {"index.md", "migrate.md", "mindie.md", "runbook.md"}


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_a_chinese_page_has_each_heading_and_command_of_the_english_page(page: Path) -> None:
    chinese, english = (DOCS / "zh" / page).read_text(), find_english_page(page).read_text()
    assert list_heading_levels(chinese) == list_heading_levels(english)
    assert list_code_blocks(chinese) == list_code_blocks(english)
    assert list_names(english) - list_names(chinese) == set()


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_a_chinese_page_is_up_to_date(page: Path) -> None:
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("this copy has no history")
    found = FOLLOWED.search((DOCS / "zh" / page).read_text())
    assert found is not None, "the page does not name the commit that it follows"
    original = find_english_page(page).relative_to(ROOT)
    ancestor = subprocess.run(["git", "merge-base", "--is-ancestor", found[1], "HEAD"], cwd=ROOT, check=False)
    assert ancestor.returncode == 0, f"commit {found[1]} is not in this branch"
    changed = share_changed(git("show", f"{found[1]}:{original}"), (ROOT / original).read_text())
    assert changed <= MAX_CHANGED, (
        f"{100 * changed:.0f} % of {original} changed since {found[1]}: "
        f"update docs/zh/{page}, then name the newer commit there"
    )


def test_three_of_a_hundred_words_may_change() -> None:
    words = [str(number) for number in range(100)]
    assert share_changed(" ".join(words), " ".join([*words[:-3], *"abc"])) == pytest.approx(MAX_CHANGED)


def test_the_first_page_has_four_cards(site: Path) -> None:
    page = (site / "index.html").read_text()
    cards = page.partition('<div class="grid cards"')[2].partition("</div>")[0]
    assert re.findall(r"<strong>(\w+)</strong>", cards) == ["Try", "Route", "Pool", "Operate"]
    assert cards.count("<a href=") >= 4


def test_the_site_has_the_dashboards_logo_and_colours(site: Path) -> None:
    (icon,) = re.findall(r"^ICON = \((.*?)^\)", (DASHBOARD / "style.py").read_text(), re.MULTILINE | re.DOTALL)
    assert "".join(re.findall(r"'(.*)'", icon)) == (site / "assets" / "logo.svg").read_text().strip()
    colours = set(re.findall(r"#[0-9a-f]{6}", (site / "assets" / "site.css").read_text()))
    assert colours - set(re.findall(r"#[0-9a-f]{6}", (DASHBOARD / "style.css").read_text())) == set()


def test_the_glossary_has_at_most_sixty_terms_in_order() -> None:
    glossary = (DOCS / "architecture.md").read_text().partition("## Words\n")[2].partition("\n## ")[0]
    terms = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[1:]
    assert 40 <= len(terms) <= 60
    assert terms == sorted(set(terms), key=str.lower)


def test_the_pages_install_only_paths_and_packages_that_exist() -> None:
    pages = [page.read_text() for page in (ROOT / "README.md", *DOCS.rglob("*.md"))]
    for line in re.findall(r"\bpip install ([^`\n]*)", "\n".join(pages)):
        package = [word for word in shlex.split(line.partition("#")[0].rstrip(") ")) if not word.startswith("-")][-1]
        is_path = package.startswith((".", "/path/to/this/repository", "fastdeploy_kvstore-"))
        # FastDeploy's own guide has this command.
        assert is_path or package in ON_PYPI or package == "fastdeploy-gpu", line


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=str)
def test_the_programs_accept_the_commands_on_a_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / page).read_text()
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content)
    served = json.loads((ROOT / "tests" / "public_surface.json").read_text())["HTTP paths"]
    for line in list_command_lines(text):
        if OURS.match(line):
            check_command(shlex.split(line), {})
        for port, path in ADDRESS.findall(line):
            known = served["router" if port == "52700" else "engine"]
            assert path in known or f"{path.rpartition('/')[0]}/{{request_id:path}}" in known, line


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def share_changed(before: str, after: str) -> float:
    """Return the share of words that differ between two texts."""
    return 1 - difflib.SequenceMatcher(None, before.split(), after.split(), autojunk=False).ratio()


def list_command_lines(text: str) -> list[str]:
    """Return the shell commands on a page, each in one line, without comments."""
    lines = (
        "".join(block for language, block in list_code_blocks(text) if language == "bash")
        .replace("\\\n", " ")
        .splitlines()
    )
    return [line for line in lines if line.strip()]


def find_english_page(page: Path) -> Path:
    """Return the path of the English page. That of the first page is the README."""
    return ROOT / "README.md" if str(page) == "index.md" else DOCS / page


def list_heading_levels(text: str) -> list[int]:
    """Return the levels of the headings in a page, in their order."""
    return [len(level) for level in HEADING.findall(COMMANDS.sub("", text))]


def list_code_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each code block, without comments, which are translated."""
    return [(language, re.sub(r" *#.*", "", block)) for language, block in COMMANDS.findall(text)]


def list_names(text: str) -> set[str]:
    """Return the flags, files and names in the sentences of a page."""
    return set(CODE.findall(COMMANDS.sub("", text)))


def list_texts_in_code() -> list[str]:
    """Return all string constants in the packages, with x for each value in an f-string."""
    texts = []
    for package in ("router", "kvstore_backend", "engine", "kvcommon"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return texts


def test_the_texts_for_which_the_runbook_searches_logs_are_in_the_code() -> None:
    texts = list_texts_in_code()
    searched = SEARCHED.findall((DOCS / "runbook.md").read_text())
    assert len(searched) >= 5
    for pattern in searched:
        for each in [pattern] if "(" in pattern else pattern.split("|"):
            assert any(re.search(each, text) for text in texts), each
