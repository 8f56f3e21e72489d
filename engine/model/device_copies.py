"""Copies numbers of a step from the host to the device, and results back to the host.

For a GPU the host memory of these copies is pinned. A copy from memory that is not pinned would wait until the device
has finished all earlier work.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

__all__ = ["fetch_numbers", "send_numbers", "send_tensor", "wait_for_device"]

_TYPECODES = {torch.int64: "q", torch.float64: "d"}


def send_numbers(
    rows: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64
) -> list[torch.Tensor]:
    """Send rows of numbers to the device, all in one copy. The host does not wait for the copy.

    Args:
        rows: the rows; they may have different lengths, and at least one is not empty.
        device: the device to copy to.
        dtype: int64 or float64.

    Returns:
        One tensor for each row.
    """
    numbers: array[float] = array(_TYPECODES[dtype])
    for row in rows:
        numbers.extend(row)
    sent = send_tensor(torch.frombuffer(numbers, dtype=dtype), device)
    return list(sent.split([len(row) for row in rows]))


def send_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a host tensor to the device. The host does not wait for the copy."""
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def fetch_numbers(numbers: torch.Tensor) -> list[float]:
    """Wait until the device has computed ``numbers``, ``[n]``, and return them as a list."""
    if numbers.is_cuda:
        arrived = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        arrived.copy_(numbers, non_blocking=True)
        wait_for_device(numbers.device)
        numbers = arrived
    fetched: list[float] = numbers.tolist()
    return fetched


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all work of this thread's current stream."""
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        done.synchronize()
