"""USERS_WORDS.md, taken apart: what it has our users type, as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["COMMANDS", "MINDIE_FILE", "MOONCAKE_FILE", "SNIPPETS", "command", "translate"]

_TEXT = Path(__file__).with_name("USERS_WORDS.md").read_text()
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MODULES = {
    "fastdeploy.entrypoints.openai.api_server": "engine.api_server",
    "fastdeploy.router.launch": "router.launch",
}

_JSON, _LINES = _FENCED.findall(_TEXT)
SNIPPETS = [each.strip() for each in re.findall(r"`([^`\n]+)`", _FENCED.sub("", _TEXT))]
"""What stands between back-quotes within its sentences."""

COMMANDS = [line.partition("      # ")[0].strip() for line in _LINES.splitlines()]
"""The lines of FastDeploy's guide, from the master to the last curl, without their remarks."""

MOONCAKE_FILE: dict[str, Any] = json.loads(_JSON)
MINDIE_FILE: dict[str, Any] = json.loads(next(each for each in SNIPPETS if each.startswith('{"local_hostname"')))


def command(*parts: str) -> str:
    """The one line that has all these parts in it."""
    found: list[str] = [line for line in [*COMMANDS, *SNIPPETS] if all(part in line for part in parts)]
    (line,) = found
    return line


def translate(line: str, ports: Mapping[int, int], model: str) -> list[str]:
    """The words of a line with our module names, ports that are free here, and a model that is here."""
    for theirs, ours in _MODULES.items():
        line = line.replace(theirs, ours)
    for port, free in ports.items():
        line = line.replace(str(port), str(free))
    return shlex.split(line.replace("${MODEL_NAME}", model))
