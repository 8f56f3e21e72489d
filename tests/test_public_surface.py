"""Flags, metrics, headers and paths do not change unnoticed; ``scripts/public_surface --record`` records a change."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from tests.support.nursery import run_forked

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "public_surface.json"


def test_the_public_surface_equals_the_record() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "public_surface")]
    done = run_forked(command)
    assert done.returncode == 0, done.stderr[-2000:]
    recorded, now = RECORD.read_text().splitlines(), done.stdout.splitlines()
    changes = list(difflib.unified_diff(recorded, now, "recorded", "now", lineterm="", n=3))
    assert not changes, "\n".join(
        ["a flag, metric, header or path changed; if this is intended, run scripts/public_surface --record", *changes]
    )
