"""Clients that the installed build of Mooncake lacks. PyPI has no build with Redis, so a stand-in replaces it."""

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
def forget_answers() -> Iterator[None]:
    """Forget the answers that an earlier test got."""
    mooncake_joining._accepts_scheme.cache_clear()
    yield
    mooncake_joining._accepts_scheme.cache_clear()


@pytest.fixture
def no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


@pytest.mark.parametrize("master", ["127.0.0.1:15001", "etcd://127.0.0.1:2379"])
@pytest.mark.parametrize("metadata", ["P2PHANDSHAKE", "http://127.0.0.1:15002/metadata"])
@pytest.mark.usefixtures("no_python")
def test_the_usual_addresses_start_no_process(master: str, metadata: str) -> None:
    assert find_missing_backend(MooncakeSettings(master, metadata, protocol="tcp")) is None


def test_this_build_has_etcd_for_metadata_and_no_redis() -> None:
    etcd = MooncakeSettings("127.0.0.1:1", "etcd://127.0.0.1:1;127.0.0.1:2", protocol="tcp")
    assert find_missing_backend(etcd) is None
    missing = find_missing_backend(MooncakeSettings("127.0.0.1:1", "redis://127.0.0.1:1", protocol="tcp"))
    assert missing is not None
    assert missing[0].endswith("this build of Mooncake has no client for Redis there")


@pytest.mark.parametrize("backend", ["redis", "k8s"])
def test_this_build_elects_masters_through_etcd_only(backend: str) -> None:
    missing = find_missing_coordinator(backend, "a flag names it")
    assert missing is not None
    assert missing[0].startswith("a flag names it, and this build of Mooncake has no ")
    assert find_missing_coordinator("etcd", "a flag names it") is None


def test_a_build_with_all_clients_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Failed to create HA backend coordinator' >&2\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert find_missing_backend(MooncakeSettings("redis://h:1", "redis://h:1", protocol="tcp")) is None


def test_the_checking_process_logs_and_tries_once_in_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    before = dict(os.environ)
    find_missing_coordinator("k8s", "a flag names it")
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"MC_LOG_LEVEL=INFO", "MC_STORE_CLIENT_SETUP_RETRIES=1"} <= set(environment)
    assert dict(os.environ) == before


def test_a_check_that_takes_too_long_finds_nothing_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(mooncake_joining, "_SECONDS", 0.2)
    assert find_missing_coordinator("k8s", "a flag names it") is None


@pytest.mark.usefixtures("no_python")
def test_a_check_that_cannot_run_is_reported() -> None:
    for settings in (
        MooncakeSettings("redis://h:1", "P2PHANDSHAKE", protocol="tcp"),
        MooncakeSettings("127.0.0.1:1", "redis://h:1", protocol="tcp"),
    ):
        missing = find_missing_backend(settings)
        assert missing is not None
        assert missing[0].startswith("the check whether this build of Mooncake has a client for Redis failed: no ")
        assert missing[1].startswith("check that /nowhere/python can be run")
