"""examples/vllm: its message without vLLM. Its README describes runs with vLLM."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.examples.script import ROOT


@pytest.mark.parametrize("script", ["run.py", "run_pd.py", "run_kills.py"])
def test_without_vllm_one_sentence_says_how_to_install_it(script: str) -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / "vllm" / script],
        # The master that starts first answers without the proxy that a user has for the internet.
        env={**os.environ, "VLLM": "/nonexistent", "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("NOT VERIFIED: VLLM=/nonexistent: there is no such program; ")
    assert ended.stderr.count("\n") == 1
