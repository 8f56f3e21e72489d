"""An instance of FastDeploy, and a test's calls to it: name, write, match and read blocks."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fastdeploy.link import VARIABLE, Caller
from tests.support.processes import Child

__all__ = ["Instance", "start_instances", "write_model"]

_SECONDS = 180.0  # deadline of a call, and of a start: on a busy machine, eight processes import paddle


def write_model(folder: Path, weights: bytes) -> Path:
    """Write a checkpoint that FastDeploy accepts, with two layers and two KV heads."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps(
        {"weight": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return folder


class Instance:
    """An engine and its mover.

    Args:
        form: ``2.6`` or ``v1``.
        folder: a folder for the socket and the logs.
        arguments: the arguments of FastDeploy's API server.
    """

    def __init__(self, form: str, folder: Path, arguments: Sequence[str], environ: dict[str, str]) -> None:
        self.form = form
        server = folder / "fastdeploy" / "entrypoints" / "openai" / "api_server.py"
        server.parent.mkdir(parents=True)
        server.write_text("from tests.fastdeploy.api_server import main\n\nmain()\n")
        (folder / "log").mkdir()
        self._folder = folder
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen()
        self._listener.settimeout(0.5)
        self._callers: dict[str, Caller] = {}
        self._child = Child(
            [sys.executable, server, *arguments],
            folder / "engine.log",
            {
                "FD_PLUGINS": "kvstore",
                "FD_LOG_DIR": "log",
                "TEST_FASTDEPLOY_FORM": form,
                VARIABLE: str(folder / "socket"),
                **environ,
            },
            folder,
        )

    def wait(self) -> None:
        """Wait until both processes have connected."""
        until = time.monotonic() + _SECONDS
        while len(self._callers) < 2:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._child.exit_code is None and time.monotonic() < until:
                    continue
                logs = (self._folder / "engine.log", *self._folder.glob("log/*.log"))
                raise AssertionError(
                    "\n".join(["the instance did not start:", *(log.read_text()[-3000:] for log in logs)])
                ) from None
            connection.settimeout(_SECONDS)
            caller = Caller(connection)
            self._callers[caller.role] = caller

    def close(self) -> None:
        for caller in self._callers.values():
            caller.close()
        self._listener.close()
        self._child.kill()

    def call(self, role: str, method: str, *arguments: object) -> object:
        return self._callers[role](method, *arguments)

    def open(self, pool: dict[str, str]) -> None:
        """Open the storage with these environment variables."""
        for role in ("engine", "mover"):
            self.call(role, "open", pool)

    def name(self, tokens: Sequence[int]) -> list[str]:
        """Return FastDeploy's names of a prompt's full blocks."""
        return list(self._callers["engine"]("name", tokens))

    def write(self, names: Sequence[str], contents: Sequence[str]) -> list[str]:
        """Store blocks; return digests of the stored ones, up to the first that was not stored."""
        return list(self._callers["mover"]("write", names, contents))

    def read(self, names: Sequence[str]) -> list[str]:
        """Look up and read blocks; return digests of those that were read, up to the first missing one."""
        if self.form == "v1":
            names = names[: self._callers["engine"]("match", names)]
        return list(self._callers["mover"]("read", names)) if names else []


@contextlib.contextmanager
def start_instances(
    form: str, folder: Path, lines: dict[str, list[str]], environ: dict[str, str] | None = None
) -> Iterator[dict[str, Instance]]:
    """Start instances with these arguments in parallel, because paddle loads slowly; yield them by name."""
    with contextlib.ExitStack() as stack:
        instances = {}
        for name, arguments in lines.items():
            (folder / name).mkdir()
            instances[name] = Instance(form, folder / name, arguments, environ or {})
            stack.callback(instances[name].close)
        for instance in instances.values():
            instance.wait()
        yield instances
