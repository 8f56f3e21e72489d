"""The commands and names in USERS_WORDS.md, which our users type."""

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
"""The texts in back-quotes in its sentences."""

COMMANDS = [line.partition("      # ")[0].strip() for line in _LINES.splitlines()]
"""The commands of FastDeploy's guide, from the master to the last curl, without comments."""

MOONCAKE_FILE: dict[str, Any] = json.loads(_JSON)
MINDIE_FILE: dict[str, Any] = json.loads(next(each for each in SNIPPETS if each.startswith('{"local_hostname"')))


def command(*parts: str) -> str:
    """Return the one command that contains all these parts."""
    found: list[str] = [line for line in [*COMMANDS, *SNIPPETS] if all(part in line for part in parts)]
    (line,) = found
    return line


def translate(line: str, ports: Mapping[int, int], model: str) -> list[str]:
    """Return the words of a command with our module names, free ports and a local model."""
    for theirs, ours in _MODULES.items():
        line = line.replace(theirs, ours)
    for port, free in ports.items():
        line = line.replace(str(port), str(free))
    return shlex.split(line.replace("${MODEL_NAME}", model))
