"""The device that tests of the engine compute on, as ``KVSTORE_TEST_DEVICE`` says; ``scripts/test-gpu`` sets it."""

from __future__ import annotations

import os

__all__ = ["TEST_DEVICE", "TORCH_DEVICE"]

TEST_DEVICE = os.environ.get("KVSTORE_TEST_DEVICE", "cpu")
"""``cpu``, ``cuda``, or ``stand-in``: a CPU that computes in the GPU's form (``tests/engine/gpu_form.py``)."""

TORCH_DEVICE = "cuda" if TEST_DEVICE == "cuda" else "cpu"
"""Where tensors are."""
