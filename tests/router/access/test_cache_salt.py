"""CacheSalts: a client has the same salt in all processes, and no other client has it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from router import app
from router.access.cache_salt import CacheSalts
from router.fleet import EngineKind
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest


def test_a_clients_salt_is_equal_in_all_processes_and_different_from_others() -> None:
    salts = CacheSalts({"alice": "sk-1", "bob": "sk-2"})
    again = CacheSalts({"bob": "sk-2", "carol": "sk-3", "alice": "sk-1"})
    assert salts.derive("alice") == again.derive("alice") == "459d157f91134eeeb14fbc7ce40ef51e"
    different = [salts.derive(client, own) for client in ("alice", "bob") for own in ("", "x", "alice", "\ud800")]
    assert len(set(different)) == len(different)


def test_the_salt_depends_on_the_key() -> None:
    assert CacheSalts({"alice": "sk-1"}).derive("alice") != CacheSalts({"alice": "sk-2"}).derive("alice")


class TestInstancesWithoutSalts:
    """An instance that may not support salts is logged with ``--cache-salt-per-key``."""

    @pytest.fixture
    def router(self, make_router: MakeRouter, tmp_path: Path) -> RouterUnderTest:
        keys = tmp_path / "keys"
        keys.write_text("alice: sk-1\n")
        return make_router(api_keys_file=str(keys), cache_salt_per_key=True)

    def test_there_is_a_reason_for_each_kind_of_engine(self) -> None:
        assert set(app._UNSALTED) == set(EngineKind)

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({}, "FastDeploy has no cache_salt"),
            ({"engine": "fastdeploy"}, "FastDeploy has no cache_salt"),
            ({"engine": "sglang"}, "SGLang separates salts only since its pull request 23300 (2026)"),
            ({"engine": "openai"}, "it is not known whether its engine uses cache_salt"),
            ({"engine": "vllm", "cache_salt": False}, "its registration says so"),
        ],
    )
    def test_an_instance_that_may_not_support_salts_is_logged_once(
        self,
        router: RouterUnderTest,
        stand_in: MakeStandIn,
        caplog: pytest.LogCaptureFixture,
        fields: dict[str, Any],
        reason: str,
    ) -> None:
        instance = stand_in()
        for _ in range(3):
            instance.register(router.url, **fields)
        (warning,) = list_warnings(caplog)
        start = (
            f"--cache-salt-per-key may have no effect at mixed instance {instance.key}, so clients may share its cache"
        )
        assert warning.startswith(f"{start}: {reason}. ")

    @pytest.mark.parametrize(
        "fields", [{"cache_salt": True}, {"engine": "vllm"}, {"engine": "sglang", "cache_salt": 1}]
    )
    def test_an_instance_that_supports_salts_is_not_logged(
        self, router: RouterUnderTest, stand_in: MakeStandIn, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
    ) -> None:
        stand_in().register(router.url, **fields)
        assert list_warnings(caplog) == []

    def test_a_registration_that_replaces_another_is_logged(
        self, router: RouterUnderTest, stand_in: MakeStandIn, caplog: pytest.LogCaptureFixture
    ) -> None:
        instance = stand_in()
        instance.register(router.url, cache_salt=True)
        instance.register(router.url)
        assert len(list_warnings(caplog)) == 1

    def test_an_instance_of_the_register_file_is_logged_at_the_start(
        self, make_router: MakeRouter, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "keys").write_text("alice: sk-1\n")
        listed = tmp_path / "register.yaml"
        listed.write_text("instances: [{role: mixed, host_ip: 127.0.0.1, port: 1}]\n")
        make_router(api_keys_file=str(tmp_path / "keys"), cache_salt_per_key=True, register_path=str(listed))
        assert len(list_warnings(caplog)) == 1

    def test_only_one_of_several_processes_logs_it(
        self, make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "keys").write_text("alice: sk-1\n")
        instance = stand_in()
        make_router(instance, api_keys_file=str(tmp_path / "keys"), cache_salt_per_key=True, workers=2)
        assert len(list_warnings(caplog)) == 1

    def test_without_salts_no_instance_is_logged(
        self, make_router: MakeRouter, stand_in: MakeStandIn, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_router(stand_in())
        assert list_warnings(caplog) == []


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text for text in warnings if "--cache-salt-per-key" in text]
