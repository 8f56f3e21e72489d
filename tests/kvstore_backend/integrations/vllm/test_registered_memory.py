"""vLLM's connector transfers only registered memory, as RDMA requires."""

from __future__ import annotations

import contextlib

import pytest

from kvstore_backend.integrations.vllm.route import Route
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.kvstore_backend.integrations.vllm.test_halves import Instance, make_request
from tests.support.strict_registration import StrictStore


@pytest.mark.parametrize("route", ["direct", "staged"])
def test_blocks_are_saved_from_and_loaded_into_registered_memory(route: Route) -> None:
    strict = StrictStore(MemoryStore(1 << 20))
    store = CheckedBackend(strict)
    with (
        contextlib.closing(Instance(store, route=route)) as first,
        contextlib.closing(Instance(store, route=route)) as second,
    ):
        first.compute(make_request(), [7, 3, 5, 1, 2, 9])
        second.load(make_request(name="b"), [4, 8, 11, 10, 6, 0])
        assert all(second.has(make_request(), index, block) for index, block in enumerate([4, 8, 11, 10, 6]))
    assert not strict.registered.complaints
