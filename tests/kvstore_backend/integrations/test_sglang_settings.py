"""Each setting of SGLang is classified: it can change KV bytes, or the table has the reason why it cannot."""

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
from tests.kvstore_backend.integrations.sglang_module import FIELDS, is_installed, read_installed_fields

INSTRUCTION = (
    "not in kvstore_backend/integrations/sglang_settings.py: read the use of the field in SGLang. If it can change the "
    "bytes of a page with the same tokens, or in doubt, add it to _DECIDING, else to _REASONS with the reason"
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
def test_every_field_of_sglangs_server_is_classified_once(fields: list[str] | None) -> None:
    known = [*CAN_CHANGE_KV, *CANNOT_CHANGE_KV, *IN_OTHER_FIELDS]
    assert len(known) == len({*known})
    unknown = {*(fields or read_installed_fields())} - {*known}
    assert not unknown, f"{', '.join(sorted(unknown))}: {INSTRUCTION}"


def test_the_table_has_no_field_that_sglang_does_not_have() -> None:
    assert {*CAN_CHANGE_KV, *CANNOT_CHANGE_KV, *IN_OTHER_FIELDS} == {*FIELDS}


def test_settings_with_names_of_files_can_change_kv() -> None:
    assert FILE_SETTINGS <= CAN_CHANGE_KV


def test_settings_with_names_that_end_in_path_or_file_count_by_the_files_content() -> None:
    names = {name for name in CAN_CHANGE_KV if name.endswith(("_path", "_paths", "_file"))}
    assert names <= FILE_SETTINGS, "add it to _FILES in kvstore_backend/integrations/sglang_settings.py"


def test_settings_in_other_fields_name_a_field_of_the_namespace() -> None:
    assert {*IN_OTHER_FIELDS.values()} <= {*Namespace.__dataclass_fields__}


def test_every_reason_is_the_end_of_a_sentence() -> None:
    assert all(reason.split()[0] in ("it", "only", "of") for reason in CANNOT_CHANGE_KV.values())


def test_neutral_variables_are_variables_of_sglang() -> None:
    assert all(name.startswith("SGLANG_") and len(name) > len("SGLANG_") for name in NEUTRAL_VARIABLES)
