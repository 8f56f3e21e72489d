"""An out-of-memory error becomes one sentence. Other errors are not changed."""

from __future__ import annotations

import pytest
import torch

from engine.model.out_of_memory import explain_out_of_memory, is_out_of_memory
from kvstore_backend import ConfigError

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ..."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("exc", OUT_OF_MEMORY, ids=lambda exc: str(exc)[:30] or "MemoryError")
def test_each_kind_of_out_of_memory_error_becomes_one_sentence(exc: Exception) -> None:
    assert is_out_of_memory(exc)
    with pytest.raises(ConfigError) as caught, explain_out_of_memory("3 blocks; lower it", any_failure=False):
        raise exc
    assert str(caught.value).startswith("there is not enough memory for 3 blocks; lower it: ")
    assert "\n" not in str(caught.value)


def test_another_error_becomes_one_sentence_only_if_any_failure_counts() -> None:
    failure = RuntimeError("no kernel image is available")
    assert not is_out_of_memory(failure)
    with pytest.raises(RuntimeError) as caught, explain_out_of_memory("3 blocks; lower it", any_failure=False):
        raise failure
    assert caught.value is failure
    with (
        pytest.raises(ConfigError, match="there is not enough memory for 3 blocks"),
        explain_out_of_memory("3 blocks; lower it"),
    ):
        raise failure
