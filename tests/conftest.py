"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.ascend import AscendMachine
from tests.support.mooncake import MooncakeMaster
from tests.support.mooncake import mooncake_master as running_mooncake_master
from tests.support.small_model import write_few_words

# No test depends on its duration, because the machine may be busy.
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

# A shell that starts the tests with "&" makes them ignore Ctrl-C, and their child processes, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The processes that tests start have their own process groups. On SIGTERM, the tests must end them.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# By default, Mooncake's clients listen at random ports from 15000 on, which the example scripts use for their masters.
os.environ.update(MC_MIN_RPC_PORT="17200", MC_MAX_RPC_PORT="19999")


_STATUS = pytest.StashKey[int]()
# Tests in these folders start several processes, kill some of them, and wait for the others to react.
_CLUSTERS = ("examples", "end_to_end", "faults", "router/sharing", "router/console")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give the tests of clusters the marker ``timing``, because they depend on the speed of other processes."""
    if any(item.path.is_relative_to(Path(__file__).parent / folder) for folder in _CLUSTERS):
        item.add_marker("timing")


def pytest_collection_finish() -> None:
    """Exclude the loaded modules from garbage collection, because they exist until the end."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Store the exit status for ``pytest_unconfigure``."""
    session.config.stash[_STATUS] = exitstatus


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process without the end of the interpreter.

    A daemon thread that is in C++ code then, such as that of torch, would abort the process. Instances end in the same
    way (``engine/api_server.py``).
    """
    if (status := config.stash.get(_STATUS, None)) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Add to the reports of a test whether it has the marker ``timing``."""
    if item.get_closest_marker("timing"):
        item.user_properties.append(("timing", True))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a test that passes to the list of second tries, when ``scripts/test`` runs it a second time."""
    log = os.environ.get("SECOND_TRY_LOG")
    if log and report.when == "call" and report.passed:
        with open(log, "a") as file:
            file.write(f"{report.nodeid}{' timing' if report.user_properties else ''}\n")


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A real Mooncake master that tests share. A test that stops or changes a master starts its own.

    Tests use different namespaces or random prefixes for their keys. Leases last 200 ms, so that a test can remove a
    key soon after it has read it.
    """
    log = tmp_path_factory.mktemp("mooncake") / "master.log"
    with running_mooncake_master(log, "--default_kv_lease_ttl=200") as master:
        yield master


@pytest.fixture(scope="session")
def few_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small checkpoint that generates words."""
    return write_few_words(tmp_path_factory.mktemp("models") / "few")


@pytest.fixture
def ascend_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AscendMachine:
    """Simulate a machine with Ascend cards that is configured as MindIE's guide requires."""
    return AscendMachine(tmp_path / "ascend", monkeypatch)
