"""The text of ``deploy/container/Containerfile``. ``scripts/container`` builds and runs it, which takes minutes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.command_lines import check_command

ROOT = Path(__file__).parents[2]
IMAGES = ("router", "engine", "tools")


class Stage(NamedTuple):
    """A stage of the file, which begins with FROM."""

    base: str
    instructions: list[tuple[str, str]]

    def last(self, word: str) -> str:
        """Return the argument of the last instruction with this name."""
        return [argument for name, argument in self.instructions if name == word][-1]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    text = (ROOT / "deploy/container/Containerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, text.splitlines()):
        word, _, argument = line.partition(" ")
        if word == "FROM":
            base, _, name = argument.partition(" AS ")
            assert base == "${BASE}" or base in found, f"{name}: {base} is no stage before it"
            found[name] = Stage(base, [])
        elif found:
            found[name].instructions.append((word, argument.strip()))
    return found


def test_no_image_runs_as_root(stages: dict[str, Stage]) -> None:
    for name in IMAGES:
        assert stages[name].last("USER") == "10001:10001"
        assert stages[name].last("STOPSIGNAL") == "SIGTERM"


def test_an_image_contains_no_build_tools(stages: dict[str, Stage]) -> None:
    for name in IMAGES:
        assert stages[name].base in ("system", "mooncake")
        assert stages[name].last("COPY") == f"--from={name}-environment /opt/kvstore /opt/kvstore"
    for name in ("system", "mooncake"):
        assert not any("pip" in argument or "COPY" in word for word, argument in stages[name].instructions)


def test_copied_files_exist_and_are_not_ignored(stages: dict[str, Stage]) -> None:
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    assert "*" in ignored
    copied = []
    for stage in stages.values():
        for word, argument in stage.instructions:
            if word == "COPY" and not argument.startswith("--from"):
                copied += argument.split()[:-1]
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


def test_the_project_has_the_installed_extras(stages: dict[str, Stage]) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name in IMAGES:
        (extras,) = re.findall(r'\$\{wheel}\[([^]]+)]"', stages[f"{name}-environment"].last("RUN"))
        for extra in extras.replace("$MOONCAKE", "mooncake").split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_programs_of_images_accept_their_flags(stages: dict[str, Stage]) -> None:
    router = stages["router"]
    check_command([*json.loads(router.last("ENTRYPOINT")), *json.loads(router.last("CMD"))], {})
    assert json.loads(stages["engine"].last("ENTRYPOINT")) == ["python", "-m", "engine.api_server"]


def test_an_image_contains_no_secret(stages: dict[str, Stage]) -> None:
    words = [argument for stage in stages.values() for word, argument in stage.instructions if word in ("ARG", "ENV")]
    assert not re.search(r"TOKEN|PASSWORD|SECRET|API_?KEY", " ".join(words))
