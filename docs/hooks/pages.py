"""Pages that mkdocs makes from other sources: the start page from README.md, the reference from the code.

The site has no files outside ``docs/``. A link to the README becomes a link to its page; of any other link to such a
file the words stay.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from engine.telemetry.metrics import EngineMetrics
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.metered import MeteredBackend
from router.access import Admission, Auth
from router.console import COMMANDS
from router.fleet import Registry
from router.settings import RouterSettings
from router.telemetry import Audit, RouterMetrics

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "kvrouter, or python -m router.launch": ("router.console", ""),
    **{f"kvrouter {command}": ("router.console", command) for command in COMMANDS},
    "python -m router.register": ("router.register", ""),
    "python -m engine.api_server": ("engine.args", ""),
    "python -m engine.make_model": ("engine.make_model", ""),
    **{f"kvstore {command}": ("kvstore_backend.cli", command) for command in ("doctor", "bench", "stats", "master")},
}
"""The module of each program, and its command."""
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s:]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: add the generated pages."""
    pages = {
        "start.md": write_start(),
        "reference/flags.md": write_flags(),
        "reference/metrics.md": write_metrics(),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs: replace the links of a page that lead out of the site."""

    def replace_link(link: re.Match[str]) -> str:
        is_picture, words, target, anchor = link.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(page.file.src_uri), target))
        if not target or files.get_file_from_path(path) is not None:
            return link.group()
        if path in ("../README.md", "README.md"):
            start = os.path.relpath("start.md", os.path.dirname(page.file.src_uri))
            return f"{is_picture}[{words}]({start}{anchor or ''})"
        if not (ROOT / "docs" / path).exists() and not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} has a link to {target}, which does not exist")
        return words

    return _LINK.sub(replace_link, markdown)


def write_start() -> str:
    """The README, with a title for the site."""
    text = (ROOT / "README.md").read_text().replace("(docs/", "(")
    return text.replace("# fastdeploy-kvstore\n", "# Try it, route, operate\n", 1)


def write_flags() -> str:
    """The flags of every program, from its own help."""
    sections = [f"## {name}\n\n```text\n{ask_for_help(*program)}```\n" for name, program in PROGRAMS.items()]
    return "# Flags\n\nWhat each program prints for `--help`.\n\n" + "\n".join(sections)


def ask_for_help(module: str, command: str) -> str:
    """What the program prints."""
    os.environ["COLUMNS"] = "100"
    program = importlib.import_module(module)
    main = getattr(program, "main", None) or program.parse_args
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([*filter(None, [command]), "--help"])
    return printed.getvalue().replace(str(ROOT) + "/", "")


def write_metrics() -> str:
    """The metrics of the router, of an instance and of its pool."""
    settings = RouterSettings(access_log="off")
    audit = Audit(settings)
    admission = Admission(settings, Auth(settings).token_rates)
    pool = CollectorRegistry()
    MeteredBackend(MemoryStore(1), pool)
    return "# Metrics\n\n" + "\n".join(
        [
            *("## The router\n", "`GET /metrics` at its port.\n"),
            write_table(RouterMetrics(Registry(splitwise=True), admission, audit).collect()),
            *("\n## An instance of our engine\n", "`GET /metrics` at its metrics port.\n"),
            write_table(EngineMetrics().registry.collect()),
            *("\n## The pool, as an instance sees it\n", "In addition to those of the instance, if it has a pool.\n"),
            write_table(pool.collect()),
        ]
    )


def write_table(families: Iterable[Metric]) -> str:
    """A line for each metric."""
    rows = [f"| `{family.name}` | {family.type} | {family.documentation} |" for family in families]
    return "\n".join(["| name | kind | meaning |", "|---|---|---|", *sorted(rows), ""])
