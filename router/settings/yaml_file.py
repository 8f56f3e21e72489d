"""read_yaml: reads an operator's YAML file, and reports each mistake in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

__all__ = ["YamlFileError", "read_yaml"]

# Length of the largest 64-bit number.
_MAX_DIGITS = 20


class YamlFileError(Exception):
    """A YAML file cannot be read or is not valid. The caller puts the file's name in front of the message."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, and a number with too many digits. PyYAML's own loader accepts both."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise YamlFileError(f"line {key.start_mark.line + 1}: {key.value!r} is given twice")
                names.add(key.value)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_DIGITS:
            raise YamlFileError(
                f"line {node.start_mark.line + 1} has a whole number of {len(node.value)} digits; "
                f"at most {_MAX_DIGITS} are allowed"
            )
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; None if it is empty.

    Raises:
        YamlFileError: the file cannot be read, is not YAML, or has the same key twice in one map.
    """
    try:
        return yaml.load(path.read_text(), Loader=_Loader)
    except OSError as exc:
        raise YamlFileError(exc.strerror) from exc
    except (UnicodeDecodeError, yaml.YAMLError) as exc:
        raise YamlFileError(f"it is not YAML: {' '.join(str(exc).split())}") from exc
    except RecursionError:
        raise YamlFileError("its maps and lists are nested too deeply") from None
    except (ValueError, LookupError, AttributeError) as exc:  # for example a date with month 13
        raise YamlFileError(f"a value in it cannot be read: {exc}") from exc
