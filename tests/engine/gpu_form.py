"""Runs the engine's code for GPUs on a CPU, so that tests cover this code without a GPU.

This code has another implementation of attention, the unpacked weights of transformers, staging buffers between the
engine and the pool, and working sets of offloaded sequences, because a GPU cannot read host memory.
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
    """Use the attention for GPUs on each device."""
    monkeypatch.setattr(paged, "form_for", lambda device: _GPU_FORM)
    monkeypatch.setattr(places, "causal_lower_right", _make_bias)


def run_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use all the code for GPUs. Call this before an engine is made."""
    attend_as_on_gpu(monkeypatch)
    for module in (retrieval, model_runner):
        monkeypatch.setattr(module, "reads_host_memory", lambda device: False)
    monkeypatch.setattr(model_runner, "pack_linears", lambda model: None)
    monkeypatch.setattr("engine.core.PoolConnector", functools.partial(PoolConnector, staged=True))


def _make_bias(num_tokens: int, context: int) -> torch.Tensor:
    """Make the bias of torch, which fails under a ``TorchDispatchMode``."""
    with _disable_current_modes():
        return causal_lower_right(num_tokens, context)
