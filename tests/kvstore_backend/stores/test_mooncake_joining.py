"""What the installed build of Mooncake lacks; a build with Redis is a stand-in, as PyPI has none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_backend.config import MooncakeSettings
from kvstore_backend.stores import mooncake_joining
from kvstore_backend.stores.mooncake_joining import find_missing_backend, find_missing_coordinator


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    """Nothing is known from another test."""
    mooncake_joining._accepts_scheme.cache_clear()
    yield
    mooncake_joining._accepts_scheme.cache_clear()


@pytest.fixture
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


@pytest.mark.parametrize("master", ["127.0.0.1:15001", "etcd://127.0.0.1:2379"])
@pytest.mark.parametrize("metadata", ["P2PHANDSHAKE", "http://127.0.0.1:15002/metadata"])
@pytest.mark.usefixtures("nobody_asked")
def test_the_usual_addresses_cost_no_process(master: str, metadata: str) -> None:
    assert find_missing_backend(MooncakeSettings(master, metadata, protocol="tcp")) is None


def test_this_build_has_etcd_for_metadata_and_no_redis() -> None:
    etcd = MooncakeSettings("127.0.0.1:1", "etcd://127.0.0.1:1;127.0.0.1:2", protocol="tcp")
    assert find_missing_backend(etcd) is None
    missing = find_missing_backend(MooncakeSettings("127.0.0.1:1", "redis://127.0.0.1:1", protocol="tcp"))
    assert missing is not None
    assert missing[0].endswith("this build of Mooncake has no client for Redis there")


@pytest.mark.parametrize("backend", ["redis", "k8s"])
def test_this_build_elects_masters_through_etcd_only(backend: str) -> None:
    missing = find_missing_coordinator(backend, "it is said so")
    assert missing is not None
    assert missing[0].startswith("it is said so, and this build of Mooncake has no ")
    assert find_missing_coordinator("etcd", "it is said so") is None


def test_a_build_that_has_them_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Failed to create HA backend coordinator' >&2\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert find_missing_backend(MooncakeSettings("redis://h:1", "redis://h:1", protocol="tcp")) is None


def test_the_asked_process_logs_and_tries_once_and_our_environment_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    before = dict(os.environ)
    find_missing_coordinator("k8s", "it is said so")
    asked = (tmp_path / "environment").read_text().splitlines()
    assert {"MC_LOG_LEVEL=INFO", "MC_STORE_CLIENT_SETUP_RETRIES=1"} <= set(asked)
    assert dict(os.environ) == before


def test_an_answer_that_takes_too_long_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(mooncake_joining, "_SECONDS", 0.2)
    assert find_missing_coordinator("k8s", "it is said so") is None


@pytest.mark.usefixtures("nobody_asked")
def test_where_mooncake_cannot_be_asked_that_is_said() -> None:
    for settings in (
        MooncakeSettings("redis://h:1", "P2PHANDSHAKE", protocol="tcp"),
        MooncakeSettings("127.0.0.1:1", "redis://h:1", protocol="tcp"),
    ):
        missing = find_missing_backend(settings)
        assert missing is not None
        assert missing[0].startswith("the check whether this build of Mooncake has a client for Redis failed: no ")
        assert missing[1].startswith("check that /nowhere/python can be run")
