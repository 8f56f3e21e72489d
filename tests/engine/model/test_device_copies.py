"""Copies of a step's numbers to tensors and back. On a GPU, a copy to the device must not wait."""

from __future__ import annotations

import pytest
import torch

from engine.model.device_copies import fetch_numbers, send_numbers, wait_for_device

CPU = torch.device("cpu")


def test_each_row_becomes_a_separate_tensor() -> None:
    sent = send_numbers([[1, 2**62], [], range(3)], CPU)
    assert [row.tolist() for row in sent] == [[1, 2**62], [], [0, 1, 2]]
    assert {row.dtype for row in sent} == {torch.int64}
    [fractions] = send_numbers([[0.1, 1e-300]], CPU, torch.float64)
    assert fractions.tolist() == [0.1, 1e-300]


def test_numbers_are_unchanged_after_the_copy_to_the_host() -> None:
    assert fetch_numbers(torch.tensor([0.1, -5.0], dtype=torch.float64)) == [0.1, -5.0]
    wait_for_device(CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch warns of the mode itself
def test_the_host_waits_for_a_gpu_only_at_the_end() -> None:
    device = torch.device("cuda")
    # Makes everything that is made only once. The first pinned allocation may wait for the device.
    fetch_numbers(torch.cat(send_numbers([[1, 2], [3]], device)).double())
    done = torch.cuda.Event()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(100_000_000)  # the device computes for some time
        done.record()
        rows = send_numbers([[1, 2], [3]], device)
        assert not done.query(), "sending waited"
        assert fetch_numbers(torch.cat(rows).double()) == [1, 2, 3]
        assert done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
