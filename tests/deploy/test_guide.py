"""``docs/deploy.md``: the files, images, flags and extras in its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deploy.md").read_text()
# Commands of other programs: the first words, and the check of the rest.
TOOLS = (
    *("scripts/", "python3", "/opt/kvstore/bin/pip", "podman", "docker", "kind", "kubectl", "curl", "cp", "mkdir"),
    *("systemctl", "systemd-sysusers"),
)


def list_commands() -> list[list[str]]:
    """Return the words of each command on the page."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").replace(" && ", "\n").splitlines()
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("command", list_commands(), ids=" ".join)
def test_the_files_and_flags_in_a_command_exist(command: list[str]) -> None:
    assert command[0].startswith(TOOLS)
    for word in command:
        if word.startswith(("deploy/", "scripts/")):
            assert list(ROOT.glob(word)), word
    if "pip" in command[0]:
        project = (ROOT / "pyproject.toml").read_text()
        for extra in re.findall(r"\[([^]]+)]", command[-1])[0].split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
        version = re.search(r'^version = "(.*)"', project, re.MULTILINE)
        assert version is not None
        assert f"fastdeploy_kvstore-{version[1]}-py3" in command[-1]
    if "--target" in command:
        target = command[command.index("--target") + 1]
        assert f" AS {target}\n" in (ROOT / "deploy/container/Containerfile").read_text()
        assert command[command.index("-t") + 1] == f"kvstore-{target}:0.1.0"
    if command[0] == "systemctl":
        for unit in command[3:] if "--now" in command else ():
            name, at, instance = unit.partition("@")
            assert (ROOT / f"deploy/systemd/{name}{at}.service").exists()
            assert not at or (ROOT / f"deploy/systemd/instance-{instance}.env").exists()


def test_the_page_lists_all_components() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.partition("| component |")[2].partition("**Probes")[0], re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "deploy/kubernetes/components").iterdir())


def test_the_secret_has_the_files_that_the_manifests_read() -> None:
    (command,) = (words for words in list_commands() if "secret" in words)
    files = {word.partition("=")[2] for word in command if word.startswith("--from-file")}
    component = (ROOT / "deploy/kubernetes/components/tokens/kustomization.yaml").read_text()
    assert set(re.findall(r"/etc/kvstore/([\w-]+)", component)) == files


def test_the_workflow_runs_the_commands_of_the_project_with_few_rights() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
                assert step["with"]["persist-credentials"] is False
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == pythons
    assert {"run": ".ci/run"} in workflow["jobs"]["tests"]["steps"]
    assert "secrets." not in text
