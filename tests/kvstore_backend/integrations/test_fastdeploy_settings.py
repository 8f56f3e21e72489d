"""Each setting of FastDeploy's is judged: it decides on KV bytes, or it cannot change them, and the table says why."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from kvstore_backend.integrations.fastdeploy_settings import (
    CAN_CHANGE_KV,
    CANNOT_CHANGE_KV,
    IN_OTHER_FIELDS,
    KV_VARIABLES,
    NEUTRAL_VARIABLES,
    VARIABLE_PREFIXES,
)
from kvstore_backend.namespace import Namespace

WHAT_TO_DO = (
    "not in kvstore_backend/integrations/fastdeploy_settings.py: read what it does in FastDeploy and list it in "
    "_DECIDING (or _DECIDING_VARIABLES), or, if it cannot change the bytes of a block whose tokens are the same, in "
    "_REASONS (or _VARIABLE_REASONS) with why; if in doubt, the first"
)
TABLE = Path(__file__).parents[3] / "scripts" / "watch-fastdeploy.yaml"
WATCHED = {
    group["kind"]: [*group.get("names", ()), *group.get("optional", ())] for group in yaml.safe_load(TABLE.read_text())
}
RECORDED = {
    "arguments": [flag[2:].replace("-", "_") for flag in WATCHED["flag of the API server"] if flag.startswith("--")],
    "variables": WATCHED["variable"],
}
"""Of FastDeploy's API server, and of its ``envs.py``."""

LOOK = """
from fastdeploy import envs
from fastdeploy.entrypoints.openai.utils import make_arg_parser
from fastdeploy.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
print("arguments", *(action.dest for action in parser._actions))
print("variables", *envs.environment_variables)
"""


def installed(kind: str, folder: Path) -> list[str]:
    """What the installed FastDeploy has, in a process of its own, which it writes its logs from."""
    environ = {**os.environ, "FD_LOG_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", LOOK], env=environ, cwd=folder, capture_output=True, text=True, check=True
    )
    (line,) = (line for line in run.stdout.splitlines() if line.startswith(kind))
    return line.split()[1:]


@pytest.mark.parametrize("source", ["recorded", "installed"])
@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("arguments", [*CAN_CHANGE_KV, *CANNOT_CHANGE_KV, *IN_OTHER_FIELDS]),
        ("variables", [*KV_VARIABLES, *NEUTRAL_VARIABLES]),
    ],
)
def test_every_setting_of_fastdeploys_is_judged_once(source: str, kind: str, known: list[str], tmp_path: Path) -> None:
    if source == "installed" and find_spec("fastdeploy") is None:
        pytest.skip("FastDeploy is not installed here")
    assert len(known) == len({*known})
    unknown = {*(RECORDED[kind] if source == "recorded" else installed(kind, tmp_path))} - {*known}
    assert not unknown, f"{', '.join(sorted(unknown))}: {WHAT_TO_DO}"


def test_arguments_that_are_told_otherwise_name_a_field_of_the_namespace() -> None:
    assert {*IN_OTHER_FIELDS.values()} <= {*Namespace.__dataclass_fields__}


def test_variables_with_fastdeploys_beginnings_need_no_list() -> None:
    assert all(name.startswith(VARIABLE_PREFIXES) for name in NEUTRAL_VARIABLES if name[:3] in ("FD_", "FLA"))
