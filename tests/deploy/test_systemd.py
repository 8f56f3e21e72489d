"""The units in ``deploy/systemd``, checked by systemd and by the parsers of the programs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_lines import check_command

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
# Each unit with its example of an environment file.
UNITS = (
    ("kvstore-master.service", "master.env"),
    ("kvrouter.service", "router.env"),
    ("kvstore-instance@.service", "instance-prefill.env"),
    ("kvstore-instance@.service", "instance-decode.env"),
)
# Maximum of systemd's exposure level of a unit: 10 is "UNSAFE", 0 means no rights.
MAX_EXPOSURE = 3.0


@pytest.mark.parametrize(("unit", "environment"), UNITS)
def test_the_programs_accept_their_flags_and_environment(unit: str, environment: str) -> None:
    environ = read_environment(SYSTEMD / environment)
    commands = read_settings(unit, "ExecStart") + read_settings(unit, "ExecStop")
    assert commands
    for command in commands:
        check_command(expand_command(command.lstrip("-"), environ), environ)


@pytest.mark.parametrize("environment", sorted(path.name for path in SYSTEMD.glob("*.env")))
def test_the_examples_in_comments_are_valid(environment: str) -> None:
    unit = next(unit for unit, name in UNITS if name == environment)
    environ = read_environment(SYSTEMD / environment)
    examples = re.findall(r"(\w+)=(\"[^\"]*\"|[^\s,]+)", "".join(comments(SYSTEMD / environment)))
    for name, value in examples:
        if not name.endswith("_FILE") or "TOKEN" in name:
            changed = {**environ, name: value.strip('"')}
            for command in read_settings(unit, "ExecStart") + read_settings(unit, "ExecStop"):
                check_command(expand_command(command.lstrip("-"), changed), changed)


def test_the_drain_of_an_instance_can_have_the_routers_token() -> None:
    for environment in ("instance-prefill.env", "instance-decode.env"):
        (flags,) = re.findall(r'DRAIN_FLAGS="(.*)"', "".join(comments(SYSTEMD / environment)))
        environ = {**read_environment(SYSTEMD / environment), "DRAIN_FLAGS": flags}
        (drain,) = read_settings("kvstore-instance@.service", "ExecStop")
        assert expand_command(drain, environ)[-2:] == ["--token-file", "/etc/kvstore/register"]


def test_a_stop_leaves_time_for_running_requests() -> None:
    (drain,) = read_settings("kvstore-instance@.service", "ExecStop")
    (limit,) = read_settings("kvstore-instance@.service", "TimeoutStopSec")
    wait = re.search(r"--wait (\d+)", drain)
    assert wait is not None
    assert float(limit) >= float(wait[1]) + 15
    (start,) = read_settings("kvrouter.service", "ExecStart")
    (limit,) = read_settings("kvrouter.service", "TimeoutStopSec")
    assert float(limit) >= sum(map(float, re.findall(r"--shutdown-\w+-secs (\d+)", start))) + 5


@pytest.mark.parametrize("unit", dict.fromkeys(unit for unit, _ in UNITS))
def test_systemd_accepts_the_units(unit: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (Debian's systemd)")
    own = tmp_path / unit.replace("@.", "@prefill.")
    own.write_text((SYSTEMD / unit).read_text().replace("/opt/kvstore/bin", str(Path(sys.executable).parent)))
    done = subprocess.run([analyze, "verify", "--man=no", own], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    command: list[str | Path] = [
        analyze,
        "security",
        "--offline=true",
        f"--threshold={MAX_EXPOSURE * 10:.0f}",
        "--no-pager",
        own,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250 and measures no unit that is not installed")
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


def read_settings(unit: str, name: str) -> list[str]:
    """Return the values of a setting, in their order."""
    return re.findall(rf"^{name}=(.*)$", (SYSTEMD / unit).read_text(), re.MULTILINE)


def read_environment(path: Path) -> dict[str, str]:
    """Return the variables of an environment file."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: "".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}


def comments(path: Path) -> list[str]:
    """Return the comments of an environment file."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.startswith("#")]


def expand_command(command: str, environ: dict[str, str]) -> list[str]:
    """Expand variables as systemd does: ``${NAME}`` is one word, ``$NAME`` may be several words."""
    words: list[str] = []
    for word in command.split():
        if re.fullmatch(r"\$\w+", word):
            words += environ[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: environ[found[1]], word))
    return words
