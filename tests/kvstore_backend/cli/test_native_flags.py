"""The flags of the installed mooncake_master, and their values on a command line."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.cli.master import list_native_flags, parse_native_flags

NATIVE = {"enable_offload": True, "client_ttl": False, "allocation_strategy": False}
OWN = ["--port", "--lease"]


def test_the_program_lists_its_flags_and_switches() -> None:
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
    flags = list_native_flags(program)
    assert flags["enable_offload"]
    assert flags["enable_metadata_cleanup_on_timeout"]
    assert not flags["client_ttl"]
    assert not flags["eviction_high_watermark_ratio"]
    assert len(flags) > 80


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PoolUnavailable, match=r"--help cannot be run"):
        list_native_flags(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--client_ttl=20", {"client_ttl": "20"}),
        ("--client_ttl 20 --enable_offload", {"client_ttl": "20", "enable_offload": "true"}),
        ("--client-ttl 20", {"client_ttl": "20"}),
        ("--noenable_offload", {"enable_offload": "false"}),
        ("--enable_offload=false --allocation_strategy=a=b", {"enable_offload": "false", "allocation_strategy": "a=b"}),
        ("", {}),
    ],
)
def test_values_are_read_as_the_program_reads_them(line: str, values: dict[str, str]) -> None:
    assert parse_native_flags(line.split(), NATIVE, OWN) == values


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--client_tll=20",
            "--client_tll is not a flag of kvstore master, nor of mooncake_master; did you mean --client_ttl?",
        ),
        ("--prot=1", "--prot is not a flag of kvstore master, nor of mooncake_master; did you mean --port?"),
        ("--zzz", "--zzz is not a flag of kvstore master, nor of mooncake_master: kvstore master --help and"),
        ("--client_ttl --enable_offload", "--client_ttl of mooncake_master needs a value"),
        ("--client_ttl", "--client_ttl of mooncake_master needs a value"),
        ("-client_ttl=20", "'-client_ttl=20' is not a flag of kvstore master; each flag begins with two dashes"),
        ("20", "'20' is not a flag of kvstore master"),
    ],
)
def test_an_invalid_flag_gets_one_sentence(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_native_flags(line.split(), NATIVE, OWN)
    assert str(caught.value).startswith(sentence)
