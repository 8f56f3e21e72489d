"""Fixtures of an operator's commands."""

from __future__ import annotations

import pytest

from kvstore_backend.cli import main
from tests.kvstore_backend.cli.operator.pools import Commands, Ended


@pytest.fixture
def kvstore(capsys: pytest.CaptureFixture[str]) -> Commands:
    """``kvstore ARGUMENTS``, in this process."""

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as exc:
            status = int(exc.code or 0)
        return Ended(status, *capsys.readouterr())

    return run
