"""The commands of the README."""

from __future__ import annotations

import re

from tests.examples.script import ROOT

README = ROOT / "README.md"


def readme_blocks(language: str) -> list[str]:
    """Return the code blocks of a language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [block.strip() for block in found]
