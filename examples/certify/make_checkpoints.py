"""Writes two small random checkpoints into the folder given as argument: ``model`` and ``other/model``.

They have the same shape and the same folder name, but other weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine import make_model

for number, name in enumerate(("model", "other/model")):
    make_model.SEED += number
    make_model.make_model(Path(sys.argv[1]) / name)
