"""``python -m tests.faults.joiner KIND SETTINGS``: joins a pool as one kind of client, and stores its first values.

Then it prints ``started``, and waits until it is killed. If a step fails, it ends with a traceback.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from typing import Any

import pytest

from kvstore_backend.backend import Status
from kvstore_backend.config import load_config
from kvstore_backend.integrations.fastdeploy import activate
from kvstore_backend.pool import open_backend
from tests.kvstore_backend.integrations.fastdeploy_double import OneClass, SchedulerAndWorker, engine_of, start_under
from tests.support.memory import Memory

__all__ = ["KINDS"]

_BLOCKS = 8
_BLOCK_BYTES = 128 << 10


def _join_as_pool(settings: dict[str, Any]) -> object:
    """Join as our own backend. Each put block must be read back."""
    backend = open_backend(load_config("mooncake", explicit=settings, environ={}), background=False)
    for _ in range(_BLOCKS):
        key, source, target = secrets.token_hex(8), Memory(secrets.token_bytes(_BLOCK_BYTES)), Memory(_BLOCK_BYTES)
        assert backend.put([key], [source.value]) == [Status.OK], f"a put failed: {backend.health()}"
        assert backend.get([key], [target.value]) == [Status.OK], f"a get failed: {backend.health()}"
        assert target.content == source.content
    return backend


def _activate() -> None:
    """Replace Mooncake's client by ours, as in a child of an engine that serves ``KVSTORE_MODEL``."""
    os.environ["FD_PLUGINS"] = "kvstore"
    start_under(engine_of(os.environ["KVSTORE_MODEL"]), pytest.MonkeyPatch())
    activate()


def _join_as_fastdeploy(settings: dict[str, Any]) -> object:
    """Join as FastDeploy's older storage class with our client. The class asserts that its warm-up succeeds."""
    _activate()
    return OneClass(settings)


def _join_as_newer_fastdeploy(settings: dict[str, Any]) -> object:
    """Join as FastDeploy's two newer classes with our client."""
    _activate()
    return SchedulerAndWorker(settings)


def _join_without_memory(settings: dict[str, Any]) -> object:
    """Join as FastDeploy's older class, without memory for the pool."""
    _activate()
    return OneClass(settings, segment=0)


KINDS = {
    "pool": _join_as_pool,
    "fastdeploy": _join_as_fastdeploy,
    "fastdeploy-newer": _join_as_newer_fastdeploy,
    "fastdeploy-without-memory": _join_without_memory,
    "mooncake": OneClass,  # the same warm-up with Mooncake's own client, for comparison
}

if __name__ == "__main__":
    joined = KINDS[sys.argv[1]](json.loads(sys.argv[2]))
    print("started", flush=True)
    signal.pause()
