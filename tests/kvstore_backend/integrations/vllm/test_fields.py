"""vLLM's settings and the namespace: every field is classified, and those that count make instances strangers.

``vllm_fields.json`` has the fields of the vLLM that the table was made for, so that this runs where vLLM is not
installed, too. With another vLLM installed the first test fails where it has other fields: classify them in
``fields.py`` and record them with ``python -m tests.kvstore_backend.integrations.vllm.test_fields``.
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
"""Of each class its fields, and which class a field holds."""
NESTED = [(kind, name) for kind in FIELDS for name in FIELDS[kind].nested.split()]
COUNTED = [(kind, name) for kind in FIELDS for name in FIELDS[kind].counted.split()]
LEFT_OUT = [(kind, name) for kind in FIELDS for names in FIELDS[kind].left_out.values() for name in names.split()]


def read_fields() -> dict[str, dict[str, str | None]]:
    """As ``FIELDS_OF``, of the installed vLLM."""
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
    """A class with the fields of vLLM's of this name, and ``more``, all of them at their defaults."""
    fields: list[Any] = []
    for field, held in FIELDS_OF[name].items():
        fields.append((field, Any, dataclasses.field(default_factory=make_kind(held)) if held else None))
    fields += [(more, Any, default)] if more else []
    return dataclasses.make_dataclass(name, fields)


def find_path(kind: str) -> tuple[str, ...]:
    """The fields that lead from the whole to a class."""
    if kind == "VllmConfig":
        return ()
    (above, field), *_ = [key for key in NESTED if FIELDS_OF[key[0]][key[1]] == kind]
    return (*find_path(above), field)


def make_changed(kind: str, field: str, value: object) -> Any:
    """All of vLLM's settings with one changed."""
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
        "these may change the bytes of blocks; say in integrations/vllm/fields.py that they are counted, or why they "
        "cannot"
    )
    assert found == recorded, "classified twice, or no field of vLLM's any more"


def test_the_table_has_no_class_that_vllm_has_not() -> None:
    assert FIELDS.keys() == FIELDS_OF.keys()


def test_instances_that_differ_in_a_counted_field_are_strangers() -> None:
    whole = collect_fields(make_kind("VllmConfig")())
    for kind, field in COUNTED:
        one, other = (collect_fields(make_changed(kind, field, value)) for value in ("one", "other"))
        assert len({json.dumps(each, sort_keys=True) for each in (whole, one, other)}) == 3, (kind, field)


def test_instances_that_differ_in_a_field_that_is_left_out_share_blocks() -> None:
    assert collect_fields(make_kind("VllmConfig")()) == {}
    assert [key for key in LEFT_OUT if collect_fields(make_changed(*key, "other"))] == []


def test_a_class_that_is_not_there_is_one_whose_fields_are_at_their_defaults() -> None:
    assert collect_fields(make_changed("VllmConfig", "lora_config", None)) == {}


class TestLaterVersions:
    """Fields and classes that the table does not know."""

    def test_an_unknown_field_counts_where_it_is_not_at_its_default(self) -> None:
        kind = make_kind("CacheConfig", "invented", 1)
        assert classify("CacheConfig", "invented") == ""
        assert collect_fields(kind()) == {}
        assert collect_fields(kind(invented=2)) == {"CacheConfig.invented": 2}

    def test_an_unknown_field_without_default_counts(self) -> None:
        kind = dataclasses.make_dataclass("CacheConfig", [("invented", Any)])
        assert collect_fields(kind(None)) == {"CacheConfig.invented": None}
        assert collect_fields(kind(0)) == {"CacheConfig.invented": 0}

    def test_none_counts_where_it_is_not_the_default(self) -> None:
        assert collect_fields(make_kind("CacheConfig", "invented", 1)(invented=None)) == {"CacheConfig.invented": None}

    def test_all_of_an_unknown_class_counts(self) -> None:
        invented = dataclasses.make_dataclass("InventedConfig", [("depth", int, 3)])
        kind = make_kind("VllmConfig", "invented_config")
        assert collect_fields(kind()) == {}
        assert collect_fields(kind(invented_config=invented())) == {
            "VllmConfig.invented_config": {"": "InventedConfig", "depth": 3}
        }

    def test_a_default_that_cannot_be_made_equals_nothing(self) -> None:
        def fail() -> object:
            raise ValueError("not here")

        kind = dataclasses.make_dataclass("CacheConfig", [("invented", Any, dataclasses.field(default_factory=fail))])
        made: Any = object.__new__(kind)
        for value in (1, None):
            made.invented = value
            assert collect_fields(made) == {"CacheConfig.invented": value}

    @pytest.mark.parametrize("stand_in", [{"default": 4, "default_factory": None}, {"default_factory": lambda: 4}])
    def test_a_default_that_pydantic_holds_is_found(self, stand_in: dict[str, Any]) -> None:
        held = SimpleNamespace(**stand_in)
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
def test_values_are_described_so_that_json_can_hold_them(value: object, described: object) -> None:
    (found,) = collect_fields(make_changed("ModelConfig", "hf_overrides", value)).values()
    assert found == described


def test_names_are_short_for_the_model_and_else_have_their_class() -> None:
    changed = make_changed("ModelConfig", "dtype", "float16")
    changed.cache_config.cache_dtype = "fp8"
    assert collect_fields(changed) == {"dtype": "float16", "CacheConfig.cache_dtype": "fp8"}


def test_a_special_value_takes_the_place_of_a_fields_own() -> None:
    changed = make_changed("ModelConfig", "seed", 7)
    assert collect_fields(changed, {"ModelConfig.seed": None}) == {}
    assert collect_fields(changed, {"ModelConfig.seed": "x"}) == {"seed": "x"}


class TestConfigurationsOfModels:
    """``hf_config`` counts by what is in it."""

    def test_one_without_a_dictionary_is_described_as_any_value(self) -> None:
        assert describe_config(None) is None

    def test_its_origin_does_not_count_and_all_else_does(self) -> None:
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
