"""The device on which tests of the engine compute. ``scripts/test-gpu`` sets it with ``KVSTORE_TEST_DEVICE``."""

from __future__ import annotations

import os

__all__ = ["TEST_DEVICE", "TORCH_DEVICE"]

TEST_DEVICE = os.environ.get("KVSTORE_TEST_DEVICE", "cpu")
"""``cpu``, ``cuda``, or ``stand-in``: a CPU that runs the code for a GPU (``tests/engine/gpu_form.py``)."""

TORCH_DEVICE = "cuda" if TEST_DEVICE == "cuda" else "cpu"
"""The device of tensors."""
