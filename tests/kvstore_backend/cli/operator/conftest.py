"""Fixtures of an operator's commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvstore_backend.cli import main
from kvstore_backend.cli.operator import clear
from tests.kvstore_backend.cli.operator.pools import Commands, Result
from tests.support.strict_registration import use_strict_stores


@pytest.fixture(autouse=True)
def _registered_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All stores of a test and its commands move only registered memory, as Mooncake does over RDMA."""
    opened = use_strict_stores(monkeypatch)
    yield
    assert [each.complaints for each in opened if each.complaints] == []
    assert [each.regions for each in opened if each.regions] == [], "memory that stayed registered"


@pytest.fixture(autouse=True)
def no_wait_for_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kvstore clear`` does not wait for instances, because these tests have none."""
    monkeypatch.setattr(clear, "_SETTLE_SECONDS", 0.0)


@pytest.fixture
def kvstore(capsys: pytest.CaptureFixture[str]) -> Iterator[Commands]:
    """Runs ``kvstore ARGUMENTS`` in this process; restores the log level, which commands change."""
    logger = logging.getLogger("kvstore_backend")
    level = logger.level

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as exc:
            status = int(exc.code or 0)
        return Result(status, *capsys.readouterr())

    yield run
    logger.setLevel(level)
