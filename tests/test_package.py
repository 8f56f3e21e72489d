"""The contents of the wheel and the sdist, which are built as in ``scripts/package``. That script also installs them,
which takes minutes."""

from __future__ import annotations

import ast
import email
import email.message
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "kvcommon", "kvstore_backend", "router")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it; return their folder."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout, so the list of the project's files is unknown")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in list_project_files():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = dist.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.message_from_string(read(wheel, "METADATA"))


def test_the_wheel_contains_exactly_the_files_of_the_packages(wheel: zipfile.ZipFile) -> None:
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == {name for name in list_project_files() if name.partition("/")[0] in PACKAGES}
    assert {f"{package}/py.typed" for package in PACKAGES} <= found


def test_the_wheel_has_the_licence_and_the_programs(wheel: zipfile.ZipFile) -> None:
    assert read(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    programs = read(wheel, "entry_points.txt")
    assert "kvrouter = router.console:main" in programs
    assert "fd-router = router.launch:fd_router" in programs
    assert "kvstore = kvstore_backend.cli:main" in programs
    assert "[fastdeploy.tool_parser_plugins]" in programs


def test_the_metadata_is_valid_for_a_package_index(metadata: email.message.Message, dist: Path) -> None:
    checked: list[str | Path] = [sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()]
    done = subprocess.run(checked, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier", ())))
    assert pythons == ["3.10", "3.11", "3.12", "3.13"]
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_only_the_extra_of_the_engine_requires_torch(metadata: email.message.Message) -> None:
    with_torch = [line for line in metadata.get_all("Requires-Dist", ()) if line.startswith(("torch", "transformers"))]
    assert with_torch
    assert all('extra == "engine"' in line for line in with_torch)


def test_the_sdist_has_all_files_for_a_build_and_no_tests(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md", "constraints.txt"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", ".ci/"))]
    assert {name for name in list_project_files() if name.startswith("deploy/")} <= names


@pytest.mark.parametrize("package", PACKAGES)
def test_no_named_tuple_has_a_second_base_class(package: str) -> None:
    """Python 3.10 cannot import such a class, but newer versions can, and mypy accepts it."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and len(node.bases) > 1:
                assert "NamedTuple" not in map(ast.unparse, node.bases), f"{path}: {node.name}"


def list_project_files() -> list[str]:
    """Return the project's files: those in git, and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def read(wheel: zipfile.ZipFile, name: str) -> str:
    """Return the text of a file in the wheel's metadata."""
    (found,) = (each for each in wheel.namelist() if each.endswith(f".dist-info/{name}"))
    return wheel.read(found).decode()
