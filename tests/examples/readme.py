"""The README's commands, as its reader would copy them."""

from __future__ import annotations

import re

from tests.examples.script import ROOT

README = ROOT / "README.md"


def readme_blocks(language: str) -> list[str]:
    """What stands in the blocks fenced as ``language``."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [block.strip() for block in found]
