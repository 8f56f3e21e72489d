"""Fixtures that tests of every room share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support.ascend import AscendMachine
from tests.support.mooncake import MooncakeMaster
from tests.support.mooncake import mooncake_master as running_mooncake_master
from tests.support.small_model import write_few_words

# No test asserts on a clock: the machine may be busy.
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

# Whoever started the tests with "&" has them ignore Ctrl-C, and every script and server that they start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# What the tests start is in process groups of its own, and ends with its test where somebody ends all of them, too.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# Mooncake's clients listen at random ports from 15000 on, where the masters of the example scripts have theirs.
os.environ.update(MC_MIN_RPC_PORT="17200", MC_MAX_RPC_PORT="19999")


# Their tests start whole clusters of processes, kill some of them, and look at what the others do in time.
_CLUSTERS = ("examples", "end_to_end", "faults", "router/sharing", "router/console")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of clusters as dependent on how fast other processes run."""
    if any(item.path.is_relative_to(Path(__file__).parent / folder) for folder in _CLUSTERS):
        item.add_marker("timing")


def pytest_collection_finish() -> None:
    """What is loaded by now stays to the end: the collector need not look through it again and again."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the reports of a test say whether it has the marker ``timing``."""
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
    """One real Mooncake master for all tests that do it no harm; a test that kills one starts its own.

    Tests share its pool: keep keys apart by namespaces or random prefixes. Leases last 200 ms, so that what was
    read can be removed within a test.
    """
    log = tmp_path_factory.mktemp("mooncake") / "master.log"
    with running_mooncake_master(log, "--default_kv_lease_ttl=200") as master:
        yield master


@pytest.fixture(scope="session")
def few_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that answers in words."""
    return write_few_words(tmp_path_factory.mktemp("models") / "few")


@pytest.fixture
def ascend_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AscendMachine:
    """Stands in for a machine with Ascend cards on which everything is as MindIE's guide wants it."""
    return AscendMachine(tmp_path / "ascend", monkeypatch)
