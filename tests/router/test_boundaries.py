"""The walls between the router and the rest of the house."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import router

FILES = sorted(Path(router.__file__).parent.rglob("*.py"))
OTHER_ROOMS = {"engine", "kvstore_backend", "mooncake", "torch", "transformers"}
# server.py reads with httptools what clients send. register.py, the sidecar for servers that cannot register
# themselves, is a program of its own, not on a request's way.
SPEAKERS = {"upstream.py", "connection.py", "server.py", "register.py"}
HTTP_CLIENTS = {"httptools", "httpx", "aiohttp", "requests", "urllib", "http"}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_router_imports_no_other_room(file: Path) -> None:
    assert not {name.split(".")[0] for name in imported(file)} & OTHER_ROOMS


@pytest.mark.parametrize("file", [f for f in FILES if f.name not in SPEAKERS], ids=lambda file: file.name)
def test_only_upstream_speaks_http_to_instances(file: Path) -> None:
    assert not {name.split(".")[0] for name in imported(file)} & HTTP_CLIENTS


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_sidecar_is_no_part_of_the_router(file: Path) -> None:
    assert "router.register" not in imported(file)


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name != "settings"], ids=lambda file: file.name)
def test_only_settings_reads_the_environment(file: Path) -> None:
    assert "environ" not in file.read_text()
    assert "getenv" not in file.read_text()


def test_starting_the_router_loads_no_torch() -> None:
    code = "import router.launch, sys; print(sorted({'torch', 'mooncake', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
