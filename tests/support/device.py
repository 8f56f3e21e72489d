"""The device that tests of the engine compute on: a CPU, or a GPU where ``scripts/test-gpu`` says so."""

from __future__ import annotations

import os

__all__ = ["TEST_DEVICE"]

TEST_DEVICE = os.environ.get("KVSTORE_TEST_DEVICE", "cpu")
"""``cpu`` or ``cuda``."""
