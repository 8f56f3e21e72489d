"""Every reason that is given is one of those that programs may rely on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import kvstore_backend.why_miss
from kvstore_backend.why_miss import REASONS, Verdict

ROOT = Path(__file__).parents[3]


def test_a_verdict_is_told_as_json() -> None:
    told = json.loads(json.dumps(Verdict("hit", "no miss", {"blocks": 3}).to_json()))
    assert told == {"reason": "hit", "sentence": "no miss", "details": {"blocks": 3}}


def test_every_reason_is_listed() -> None:
    files = [*Path(kvstore_backend.why_miss.__file__).parent.glob("*.py"), *(ROOT / "engine/why_miss").glob("*.py")]
    given = {reason for file in files for reason in re.findall(r'Verdict\(\s*"(\w+)"', file.read_text())}
    assert given
    assert given <= REASONS.keys()
