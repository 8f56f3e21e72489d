"""scripts/setup: it does nothing if everything is installed, and prints one sentence if it cannot continue."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.examples.script import ROOT

TOOLS = ("bash", "env", "dirname", "mkdir", "flock", "cat", "tail", "sha256sum", "grep", "head", "id")


@pytest.fixture
def bare_checkout(tmp_path: Path) -> Path:
    """A checkout with only scripts/setup, and a folder ``bin`` with the tools of a machine without Python."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", checkout / "scripts" / "setup")
    shutil.copy(ROOT / "pyproject.toml", checkout / "pyproject.toml")
    shutil.copy(ROOT / "constraints.txt", checkout / "constraints.txt")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return checkout


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "setup"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_second_run_does_nothing() -> None:
    if not (ROOT / ".venv").exists():
        pytest.skip("this checkout has not been set up; scripts/test does that")
    set_up(ROOT)
    again = set_up(ROOT)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_without_python_the_message_says_what_to_install(bare_checkout: Path) -> None:
    ended = set_up(bare_checkout, PATH=str(bare_checkout.parent / "bin"))
    assert ended.returncode == 1
    assert "no Python 3.10 to 3.13 found; on Debian: apt-get install python3 python3-venv" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_cdpath_does_not_change_the_folder_of_the_setup(bare_checkout: Path) -> None:
    ended = subprocess.run(
        ["scripts/setup"],
        cwd=bare_checkout,
        env={"PATH": str(bare_checkout.parent / "bin"), "CDPATH": ".:/"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "no Python 3.10 to 3.13 found" in ended.stderr
    assert sorted(path.name for path in bare_checkout.parent.iterdir()) == ["bin", "checkout"]
    assert (bare_checkout / ".cache").is_dir()


def test_the_setup_overrides_pips_user_setting(bare_checkout: Path) -> None:
    asked = bare_checkout.parent / "asked"
    python = bare_checkout.parent / "bin" / "python3"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in "-m venv "*) echo "$PIP_USER" >{asked}; exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    set_up(bare_checkout, PATH=f"{python.parent}:{os.environ['PATH']}", PIP_USER="1")
    assert asked.read_text() == "0\n"


def test_a_python_without_venv_is_refused_if_it_cannot_be_installed(bare_checkout: Path) -> None:
    tools = bare_checkout.parent / "bin"
    # A Python like Debian's, without ensurepip. `tools` has no apt-get.
    python = tools / "python3"
    python.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    ended = set_up(bare_checkout, PATH=str(tools))
    assert ended.returncode == 1
    assert "cannot make virtual environments" in ended.stderr
    assert "sudo apt-get install python3-venv" in ended.stderr
    assert ended.stderr.count("\n") == 1


def somebody_elses_venv(folder: Path) -> Path:
    """Make an environment like that of `uv venv`: without pip and without the stamp file of scripts/setup."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text("uv = 0.9\n")
    return folder


def listing(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_an_environment_of_another_program_is_not_changed(bare_checkout: Path) -> None:
    venv = somebody_elses_venv(bare_checkout / ".venv")
    before = listing(venv)
    ended = set_up(bare_checkout)
    assert listing(venv) == before
    assert ended.returncode == 1
    assert f"{venv} is not made by scripts/setup and is left as it is: move it away" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_environment_behind_a_link_is_not_changed(bare_checkout: Path) -> None:
    venv = somebody_elses_venv(bare_checkout.parent / "elsewhere")
    (venv / ".setup-stamp").write_text("of another checkout")
    (bare_checkout / ".venv").symlink_to(venv)
    before = listing(venv)
    ended = set_up(bare_checkout)
    assert listing(venv) == before
    assert ended.returncode == 1
    assert f"{bare_checkout}/.venv is a symbolic link and is left as it is: move it away" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_incomplete_environment_is_created_again(bare_checkout: Path) -> None:
    venv = bare_checkout / ".venv"
    venv.mkdir()
    (venv / ".setup-stamp").touch()
    (venv / "half").touch()
    python = bare_checkout.parent / "bin" / "python3"
    made = bare_checkout.parent / "made"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in "-m venv "*) ls -A {venv} >{made}; exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    ended = set_up(bare_checkout, PATH=f"{bare_checkout.parent / 'bin'}:{os.environ['PATH']}")
    assert "failed: making .venv" in ended.stderr
    assert made.read_text() == ".setup-stamp\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("name", [".venv", ".venv/bin/python"])
def test_git_ignores_an_environment_also_behind_a_link(name: str) -> None:
    ended = subprocess.run(["git", "check-ignore", "-q", "--no-index", name], cwd=ROOT, check=False)
    if ended.returncode == 128:
        pytest.skip("this is no clone")
    assert ended.returncode == 0


def test_the_installed_versions_are_those_of_the_constraints() -> None:
    differing = []
    for constraint in constraints():
        try:
            installed = Version(importlib.metadata.version(constraint.name)).public
        except importlib.metadata.PackageNotFoundError:
            continue  # for another version of Python
        if not constraint.specifier.contains(installed):
            differing.append(f"{constraint}, but {installed} is installed")
    assert not differing


def test_the_constraints_have_all_required_packages_except_torch() -> None:
    required = {
        canonicalize_name(requirement.name)
        for requirement in map(Requirement, importlib.metadata.requires("fastdeploy-kvstore") or ())
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in EXTRAS)
    }
    named = {canonicalize_name(constraint.name) for constraint in constraints()}
    assert required - named == {"torch"}


def test_the_constraints_have_no_local_versions() -> None:
    """A local version, such as that of a build for CPUs, cannot be installed on other machines."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = re.compile(r'[\w.-]+==[\w.]+( ; python_version (>=|==) "3\.1[0-3]")?')
    assert [line for line in lines if not line.startswith("#") and not pinned.fullmatch(line)] == []


EXTRAS = ("mooncake", "engine", "dev")


def constraints() -> list[Requirement]:
    """Return the constraints for this Python."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return [each for each in found if each.marker is None or each.marker.evaluate()]
