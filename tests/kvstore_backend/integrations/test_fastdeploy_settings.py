"""Each setting of FastDeploy is classified: it can change KV bytes, or the table has the reason why it cannot."""

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

INSTRUCTION = (
    "not in kvstore_backend/integrations/fastdeploy_settings.py: read the use of the setting in FastDeploy. If it can "
    "change the bytes of a block with the same tokens, or in doubt, add it to _DECIDING (or _DECIDING_VARIABLES), else "
    "to _REASONS (or _VARIABLE_REASONS) with the reason"
)
TABLE = Path(__file__).parents[3] / "scripts" / "watch-fastdeploy.yaml"
WATCHED = {
    group["kind"]: [*group.get("names", ()), *group.get("optional", ())] for group in yaml.safe_load(TABLE.read_text())
}
RECORDED = {
    "arguments": [flag[2:].replace("-", "_") for flag in WATCHED["flag of the API server"] if flag.startswith("--")],
    "variables": WATCHED["variable"],
}
"""The arguments of FastDeploy's API server, and the variables in its ``envs.py``."""

PRINT_SETTINGS = """
from fastdeploy import envs
from fastdeploy.entrypoints.openai.utils import make_arg_parser
from fastdeploy.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
print("arguments", *(action.dest for action in parser._actions))
print("variables", *envs.environment_variables)
"""


def list_installed(kind: str, folder: Path) -> list[str]:
    """List settings of the installed FastDeploy, in a process of its own, because FastDeploy writes logs."""
    environ = {**os.environ, "FD_LOG_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", PRINT_SETTINGS], env=environ, cwd=folder, capture_output=True, text=True, check=True
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
def test_every_setting_is_classified_once(source: str, kind: str, known: list[str], tmp_path: Path) -> None:
    if source == "installed" and find_spec("fastdeploy") is None:
        pytest.skip("FastDeploy is not installed here")
    assert len(known) == len({*known})
    unknown = {*(RECORDED[kind] if source == "recorded" else list_installed(kind, tmp_path))} - {*known}
    assert not unknown, f"{', '.join(sorted(unknown))}: {INSTRUCTION}"


def test_arguments_in_other_fields_name_a_field_of_the_namespace() -> None:
    assert {*IN_OTHER_FIELDS.values()} <= {*Namespace.__dataclass_fields__}


def test_neutral_variables_of_fastdeploy_have_one_of_its_prefixes() -> None:
    assert all(name.startswith(VARIABLE_PREFIXES) for name in NEUTRAL_VARIABLES if name[:3] in ("FD_", "FLA"))
