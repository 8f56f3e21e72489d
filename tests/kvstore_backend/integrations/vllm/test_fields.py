"""vLLM's settings and the namespace: every field is classified, and each counted field changes the namespace.

``vllm_fields.json`` has the fields of the vLLM for which ``fields.py`` was written, so these tests run without vLLM.
If the installed vLLM has other fields, the first test fails. Then classify them in ``fields.py``, and record them with
``python -m tests.kvstore_backend.integrations.vllm.test_fields``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backend.integrations.vllm.fields import (
    FIELDS,
    classify,
    collect_fields,
    describe_config,
)

RECORDED = Path(__file__).with_name("vllm_fields.json")
FIELDS_OF: dict[str, dict[str, str | None]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
"""The fields of each class, with the name of the class that a field contains."""
NESTED = [(kind, name) for kind in FIELDS for name in FIELDS[kind].nested.split()]
COUNTED = [(kind, name) for kind in FIELDS for name in FIELDS[kind].counted.split()]
LEFT_OUT = [(kind, name) for kind in FIELDS for names in FIELDS[kind].left_out.values() for name in names.split()]


def read_fields() -> dict[str, dict[str, str | None]]:
    """Return the fields of the installed vLLM in the form of ``FIELDS_OF``."""
    from vllm.config import VllmConfig

    found: dict[str, dict[str, str | None]] = {}

    def add(kind: Any) -> None:
        hints, held = typing.get_type_hints(kind), dict[str, Any]()
        for field in dataclasses.fields(kind):
            is_nested = field.name in FIELDS.get(kind.__name__, ((), "")).nested.split()  # type: ignore[union-attr]
            held[field.name] = next(iter(list_classes(hints[field.name])), None) if is_nested else None
        found[kind.__name__] = {name: each.__name__ if each else None for name, each in held.items()}
        for each in filter(None, held.values()):
            if each.__name__ not in found:
                add(each)

    add(VllmConfig)
    return found


def list_classes(hint: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from list_classes(argument)


@functools.cache
def make_kind(name: str, more: str = "", default: object = None) -> Any:
    """Return a class with the fields of vLLM's class of this name, and the field ``more``, with defaults."""
    fields: list[Any] = []
    for field, held in FIELDS_OF[name].items():
        fields.append((field, Any, dataclasses.field(default_factory=make_kind(held)) if held else None))
    fields += [(more, Any, default)] if more else []
    return dataclasses.make_dataclass(name, fields)


def find_path(kind: str) -> tuple[str, ...]:
    """Return the names of the fields from ``VllmConfig`` to a class."""
    if kind == "VllmConfig":
        return ()
    (above, field), *_ = [key for key in NESTED if FIELDS_OF[key[0]][key[1]] == kind]
    return (*find_path(above), field)


def make_changed(kind: str, field: str, value: object) -> Any:
    """Return vLLM's settings with one changed field."""
    config = found = make_kind("VllmConfig")()
    for name in find_path(kind):
        found = getattr(found, name)
    setattr(found, field, value)
    return config


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_the_recorded_fields_are_those_of_the_installed_vllm() -> None:
    assert read_fields() == FIELDS_OF, "classify new fields in fields.py, then record them (see above)"


def test_every_field_of_vllms_settings_is_classified_once() -> None:
    found = sorted([*NESTED, *COUNTED, *LEFT_OUT])
    recorded = sorted((kind, name) for kind in FIELDS_OF for name in FIELDS_OF[kind])
    assert not set(recorded) - set(found), (
        "these fields can change the bytes of blocks: classify them in integrations/vllm/fields.py as counted, or with "
        "the reason why they cannot"
    )
    assert found == recorded, "a field is classified twice, or vLLM no longer has it"


def test_the_table_has_the_same_classes_as_vllm() -> None:
    assert FIELDS.keys() == FIELDS_OF.keys()


def test_a_counted_field_changes_the_namespace() -> None:
    whole = collect_fields(make_kind("VllmConfig")())
    for kind, field in COUNTED:
        one, other = (collect_fields(make_changed(kind, field, value)) for value in ("one", "other"))
        assert len({json.dumps(each, sort_keys=True) for each in (whole, one, other)}) == 3, (kind, field)


def test_a_field_that_is_left_out_does_not_change_the_namespace() -> None:
    assert collect_fields(make_kind("VllmConfig")()) == {}
    assert [key for key in LEFT_OUT if collect_fields(make_changed(*key, "other"))] == []


def test_a_missing_configuration_equals_one_with_default_fields() -> None:
    assert collect_fields(make_changed("VllmConfig", "lora_config", None)) == {}


class TestLaterVersions:
    """Fields and classes that are not in the table."""

    def test_an_unknown_field_counts_unless_it_has_its_default(self) -> None:
        kind = make_kind("CacheConfig", "invented", 1)
        assert classify("CacheConfig", "invented") == ""
        assert collect_fields(kind()) == {}
        assert collect_fields(kind(invented=2)) == {"CacheConfig.invented": 2}

    def test_an_unknown_field_without_default_counts(self) -> None:
        kind = dataclasses.make_dataclass("CacheConfig", [("invented", Any)])
        assert collect_fields(kind(None)) == {"CacheConfig.invented": None}
        assert collect_fields(kind(0)) == {"CacheConfig.invented": 0}

    def test_none_counts_unless_it_is_the_default(self) -> None:
        assert collect_fields(make_kind("CacheConfig", "invented", 1)(invented=None)) == {"CacheConfig.invented": None}

    def test_all_fields_of_an_unknown_class_count(self) -> None:
        invented = dataclasses.make_dataclass("InventedConfig", [("depth", int, 3)])
        kind = make_kind("VllmConfig", "invented_config")
        assert collect_fields(kind()) == {}
        assert collect_fields(kind(invented_config=invented())) == {
            "VllmConfig.invented_config": {"": "InventedConfig", "depth": 3}
        }

    def test_every_value_counts_if_the_default_cannot_be_made(self) -> None:
        def fail() -> object:
            raise ValueError("not here")

        kind = dataclasses.make_dataclass("CacheConfig", [("invented", Any, dataclasses.field(default_factory=fail))])
        made: Any = object.__new__(kind)
        for value in (1, None):
            made.invented = value
            assert collect_fields(made) == {"CacheConfig.invented": value}

    @pytest.mark.parametrize("field_info", [{"default": 4, "default_factory": None}, {"default_factory": lambda: 4}])
    def test_a_default_in_pydantics_field_info_is_found(self, field_info: dict[str, Any]) -> None:
        held = SimpleNamespace(**field_info)
        kind = dataclasses.make_dataclass("CacheConfig", [("invented", Any)])
        dataclasses.fields(kind)[0].default = held
        assert collect_fields(kind(4)) == {}
        assert collect_fields(kind(5)) == {"CacheConfig.invented": 5}


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Inner:
    depth: int = 3


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (1.5, 1.5),
        (True, True),
        (Color.RED, "RED"),
        ({1: (Color.RED, 2)}, {"1": ["RED", 2]}),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({2, 1}), [1, 2]),
        (Inner(), {"": "Inner", "depth": 3}),
        (Path, "pathlib.Path"),
        (Path("/a"), repr(Path("/a"))),
    ],
)
def test_values_are_described_as_json(value: object, described: object) -> None:
    (found,) = collect_fields(make_changed("ModelConfig", "hf_overrides", value)).values()
    assert found == described


def test_names_of_fields_have_their_class_except_for_the_model() -> None:
    changed = make_changed("ModelConfig", "dtype", "float16")
    changed.cache_config.cache_dtype = "fp8"
    assert collect_fields(changed) == {"dtype": "float16", "CacheConfig.cache_dtype": "fp8"}


def test_a_special_value_replaces_the_value_of_a_field() -> None:
    changed = make_changed("ModelConfig", "seed", 7)
    assert collect_fields(changed, {"ModelConfig.seed": None}) == {}
    assert collect_fields(changed, {"ModelConfig.seed": "x"}) == {"seed": "x"}


class TestConfigurationsOfModels:
    """``hf_config`` counts by its contents."""

    def test_none_is_described_as_none(self) -> None:
        assert describe_config(None) is None

    def test_only_the_origin_of_a_configuration_does_not_count(self) -> None:
        def describe(**content: object) -> object:
            return describe_config(SimpleNamespace(to_dict=lambda: content))

        plain = describe(rope=1, text={"_name_or_path": "/a"}, more=[{"name_or_path": "b"}])
        assert plain == describe(
            rope=1, text={"_name_or_path": "/c"}, more=[{}], transformers_version="5", _name_or_path="x"
        )
        assert plain != describe(rope=2, text={}, more=[{}])
        assert plain != describe(rope=1, text={"x": 1}, more=[{}])
        assert plain != describe(rope=1, text={}, more=[])
        assert isinstance(plain, str)
        assert len(plain) == 32


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(read_fields(), indent=1) + "\n")
