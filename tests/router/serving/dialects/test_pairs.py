"""Pairs of each dialect through the router: which are made, how alone ones are asked, and through all faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.router.serving.dialects.pair_fleet import DIALECTS, Ended, PairFleet, ask_all, make_body, path_of
from tests.router.serving.fault_report import REPORTS, Report
from tests.router.serving.test_fault_table import CUTS_STREAMS, FAULTS, PATIENT_PROBES, PROBES, UNREACHABLE
from tests.support.toy_model import answer_text

StartPairs = Callable[..., PairFleet]

REQUESTS = 64


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_of_two(
    start_pairs: StartPairs, monkeypatch: pytest.MonkeyPatch, dialect: str, role: str, fault: str
) -> None:
    if fault in UNREACHABLE:
        monkeypatch.setattr("router.http.pool.CONNECT_SECONDS", 1.0)
    fleet = start_pairs(dialect, prefill=2, decode=2, **(PROBES if "hangs" in fault else PATIENT_PROBES))
    failing = fleet.of(role)[0]
    with FAULTS[fault](failing):
        ended = ask_all(fleet, REQUESTS)
        with contextlib.suppress(TimeoutError, AssertionError):
            fleet.wait_for_end()
        row = Report(f"{dialect}, one of two {role}: {fault}", REQUESTS, 0, 0, 0, fleet.left)
        judge(row, ended, may_cut=(role, fault) in CUTS_STREAMS)
        row.violations = len(fleet.strict.violations)
        REPORTS.append(row)
    assert fleet.strict.violations == []
    assert (row.lost, row.wrong, row.left_running) == (0, 0, 0), [one for one in ended if one.error]
    assert failing.received or fault in UNREACHABLE
    if (role, fault) not in CUTS_STREAMS:
        assert row.served == REQUESTS


def judge(row: Report, ended: list[Ended], may_cut: bool) -> None:
    """Count what the clients got."""
    for number, one in enumerate(ended):
        path = path_of(number)
        if one.status == 200 and not one.error:
            right = one.text == answer_text(path, make_body(path, number))
            row.served += right
            row.wrong += not right
        elif may_cut and one.begun:
            row.wrong += (one.status, one.error) != (200, "decode_failed")
        else:
            row.lost += 1
