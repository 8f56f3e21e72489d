"""Checks of a machine with Ascend cards; files and variables stand in for the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_backend.cli import ascend
from kvstore_backend.cli.report import Finding
from tests.support.ascend import AscendMachine


def check(subject: str, *, needs_buffers: bool = True) -> Finding:
    (finding,) = (each for each in ascend.check_machine(needs_buffers=needs_buffers) if each.subject == subject)
    return finding


def test_a_machine_that_has_everything_passes(ascend_machine: AscendMachine) -> None:
    findings = list(ascend.check_machine(needs_buffers=True))
    assert [each.level for each in findings] == ["ok"] * 4
    assert findings[0].text == "mooncake-transfer-engine-npu 0.3.13"


def test_a_build_without_ascend_is_reported(ascend_machine: AscendMachine) -> None:
    ascend_machine.install("mooncake-transfer-engine-non-cuda")
    finding = check("ascend build")
    assert finding.level == "fail"
    assert "pip install mooncake-transfer-engine-npu" in finding.remedy


def test_a_build_that_may_support_ascend_is_a_warning(ascend_machine: AscendMachine) -> None:
    ascend_machine.install("mooncake-transfer-engine")
    assert check("ascend build").level == "warn"


def test_a_library_that_the_loader_does_not_find_is_reported(ascend_machine: AscendMachine) -> None:
    (ascend_machine.libraries / "libmooncake_store.so").unlink()
    finding = check("LD_LIBRARY_PATH")
    assert finding.level == "fail"
    assert finding.text == "no folder in this variable contains libmooncake_store.so"


def test_the_remedy_for_libraries_next_to_the_package_is_a_command(
    ascend_machine: AscendMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert check("LD_LIBRARY_PATH").remedy == (
        f"export LD_LIBRARY_PATH={ascend_machine.libraries}:$LD_LIBRARY_PATH, before the server is started"
    )


@pytest.mark.parametrize("content", [None, ""])
def test_a_missing_or_empty_network_file_is_reported(ascend_machine: AscendMachine, content: str | None) -> None:
    if content is None:
        ascend_machine.hccn_file.unlink()
    else:
        ascend_machine.hccn_file.write_text(content)
    assert check("hccn.conf").level == "fail"


@pytest.mark.parametrize(
    ("value", "level"), [("4:8", "ok"), ("", "fail"), ("0:0", "fail"), ("4", "fail"), ("4x8", "fail")]
)
def test_buffers_are_a_number_and_a_size(
    ascend_machine: AscendMachine, monkeypatch: pytest.MonkeyPatch, value: str, level: str
) -> None:
    monkeypatch.setenv("ASCEND_BUFFER_POOL", value)
    assert check("ASCEND_BUFFER_POOL").level == level


def test_an_engine_other_than_mindie_may_do_without_buffers(
    ascend_machine: AscendMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASCEND_BUFFER_POOL")
    assert check("ASCEND_BUFFER_POOL", needs_buffers=False).level == "warn"


def test_the_network_file_has_the_path_that_its_tool_uses() -> None:
    assert Path("/etc/hccn.conf") == ascend.HCCN_FILE
