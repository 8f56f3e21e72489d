"""Copies of a step's numbers from the host to the device and back: one copy each way, and a single wait.

With a GPU the host's side of both copies is pinned, so that the host does not wait for them: a copy from memory that is
not pinned waits for all work that the device still has.
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
    """Send these rows of numbers to the device as tensors, in one copy that the host does not wait for.

    Args:
        rows: of any lengths, not all of them empty.
        device: the device to copy to.
        dtype: int64 or float64.
    """
    numbers: array[float] = array(_TYPECODES[dtype])
    for row in rows:
        numbers.extend(row)
    sent = send_tensor(torch.frombuffer(numbers, dtype=dtype), device)
    return list(sent.split([len(row) for row in rows]))


def send_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a host tensor to the device, by a copy that the host does not wait for."""
    if device.type == "cuda" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def fetch_numbers(numbers: torch.Tensor) -> list[float]:
    """Fetch the numbers ``[n]`` to the host, once the device has computed them: the end of a step."""
    if numbers.is_cuda:
        arrived = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        arrived.copy_(numbers, non_blocking=True)
        wait_for_device(numbers.device)
        numbers = arrived
    fetched: list[float] = numbers.tolist()
    return fetched


def wait_for_device(device: torch.device) -> None:
    """Wait until this thread's stream of the device has finished all its work."""
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        done.synchronize()
