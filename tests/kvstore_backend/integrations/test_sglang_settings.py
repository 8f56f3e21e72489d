"""Each setting of SGLang's is judged: it decides on KV bytes, or it cannot change them, and the table says why."""

from __future__ import annotations

import pytest

from kvstore_backend.integrations.sglang_settings import (
    CAN_CHANGE_KV,
    CANNOT_CHANGE_KV,
    FILE_SETTINGS,
    IN_OTHER_FIELDS,
    NEUTRAL_VARIABLES,
)
from kvstore_backend.namespace import Namespace
from tests.kvstore_backend.integrations.sglang_module import FIELDS, installed_fields, is_installed

WHAT_TO_DO = (
    "not in kvstore_backend/integrations/sglang_settings.py: read what it does in SGLang and list it in _DECIDING, or, "
    "if it cannot change the bytes of a page whose tokens are the same, in _REASONS with why; if in doubt, the first"
)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(FIELDS, id="recorded"),
        pytest.param(
            None,
            id="installed",
            marks=pytest.mark.skipif(not is_installed(), reason="SGLang is not installed here"),
        ),
    ],
)
def test_every_field_of_sglangs_server_is_judged_once(fields: list[str] | None) -> None:
    known = [*CAN_CHANGE_KV, *CANNOT_CHANGE_KV, *IN_OTHER_FIELDS]
    assert len(known) == len({*known})
    unknown = {*(fields or installed_fields())} - {*known}
    assert not unknown, f"{', '.join(sorted(unknown))}: {WHAT_TO_DO}"


def test_the_table_names_no_field_that_sglang_does_not_have() -> None:
    assert {*CAN_CHANGE_KV, *CANNOT_CHANGE_KV, *IN_OTHER_FIELDS} == {*FIELDS}


def test_settings_that_name_files_decide_on_kv() -> None:
    assert FILE_SETTINGS <= CAN_CHANGE_KV


def test_settings_whose_names_end_as_those_of_files_count_by_their_content() -> None:
    names = {name for name in CAN_CHANGE_KV if name.endswith(("_path", "_paths", "_file"))}
    assert names <= FILE_SETTINGS, "add it to _FILES in kvstore_backend/integrations/sglang_settings.py"


def test_settings_that_are_told_otherwise_name_a_field_of_the_namespace() -> None:
    assert {*IN_OTHER_FIELDS.values()} <= {*Namespace.__dataclass_fields__}


def test_every_reason_ends_the_sentence_that_it_cannot_change_kv_bytes() -> None:
    assert all(reason.split()[0] in ("it", "only", "of") for reason in CANNOT_CHANGE_KV.values())


def test_neutral_variables_are_sglangs() -> None:
    assert all(name.startswith("SGLANG_") and len(name) > len("SGLANG_") for name in NEUTRAL_VARIABLES)
