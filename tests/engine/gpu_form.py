"""The engine on a CPU with the code that a GPU runs, so that its tests hold for a GPU's path where there is none.

That path has another form of attention, weights as transformers has them, blocks that pass to the pool through
buffers, and working sets of offloaded sequences, as a GPU cannot read host memory.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from engine.model import model_runner
from engine.model.attention import paged, places, retrieval
from engine.pool.pool_connector import PoolConnector

__all__ = ["attend_as_on_gpu", "run_as_on_gpu"]

_GPU_FORM = paged.form_for(torch.device("cuda"))
assert paged.form_for(torch.device("cpu")) != _GPU_FORM


def attend_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of attention that a GPU has, wherever tensors lie."""
    monkeypatch.setattr(paged, "form_for", lambda device: _GPU_FORM)
    monkeypatch.setattr(places, "causal_lower_right", _make_bias)


def run_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the GPU's path; before an engine is made."""
    attend_as_on_gpu(monkeypatch)
    for module in (retrieval, model_runner):
        monkeypatch.setattr(module, "reads_host_memory", lambda device: False)
    monkeypatch.setattr(model_runner, "pack_linears", lambda model: None)
    monkeypatch.setattr("engine.core.PoolConnector", functools.partial(PoolConnector, staged=True))


def _make_bias(num_tokens: int, context: int) -> torch.Tensor:
    """torch's own, which cannot be made under a watch."""
    with _disable_current_modes():
        return causal_lower_right(num_tokens, context)
