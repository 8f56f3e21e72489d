"""What users type and read is as it was recorded; ``scripts/public_surface --record`` records a deliberate change."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from tests.support.nursery import run_forked

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "public_surface.json"


def test_what_users_type_and_read_has_not_changed() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "public_surface")]
    done = run_forked(command)
    assert done.returncode == 0, done.stderr[-2000:]
    recorded, now = RECORD.read_text().splitlines(), done.stdout.splitlines()
    changes = list(difflib.unified_diff(recorded, now, "recorded", "now", lineterm="", n=3))
    assert not changes, "\n".join(
        ["a flag, metric, header or path changed; if that is meant, run scripts/public_surface --record", *changes]
    )
