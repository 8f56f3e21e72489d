"""Processes on loopback: mooncake_master, vLLM instances, our router. Each ends with the ``Cluster``."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn


def _show_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print the traceback of an error, but not of Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _show_error
from engine.make_model import default_folder, make_model  # noqa: E402  # it takes a moment, in which Ctrl-C may come

__all__ = [
    *("MODEL", "START_S", "Cluster", "Connector", "Master", "Process", "fail", "metric", "namespaces", "scratch"),
    *("find_model", "make_parser", "wait_for_interrupt"),
]

Connector = Literal["kvstore", "nixl"]

START_S = 900.0
STOP_S = 20.0
MODEL = "m"  # the name that requests use


def make_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that these programs share: ``--connector`` and ``--model``.

    Args:
        text: the program's docstring; its first line becomes the description.
    """
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--connector", choices=("kvstore", "nixl"), default="kvstore", help="default: kvstore, ours")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a checkpoint; default: the small one of this project"
    )
    return parser


def find_model(folder: Path | None) -> Path:
    """Return ``folder``; for None, the folder of this project's small checkpoint, which is made if it is missing."""
    if folder is None:
        folder = default_folder()
        make_model(folder)
    return folder


def fail(sentence: str) -> NoReturn:
    """End the program with status 1 and this message."""
    sys.exit(f"NOT VERIFIED: {sentence}")


class Process:
    """One program in its own process group. Its output goes to a log file."""

    def __init__(self, argv: Sequence[str | Path], log: Path, env: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def wait_ready(self, url: str) -> None:
        """Wait until ``url`` answers with success; end this program if the process ends first, or at the deadline."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=2):
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.2)
        tail = self.log.read_text(errors="replace").splitlines()[-15:]
        fail("\n".join([*tail, f"{self.log.stem} did not become ready; these are the last lines of {self.log}"]))

    def send(self, signal_number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal_number)

    def kill(self) -> None:
        """Send SIGKILL to the whole process group, and wait for the end of the process."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def cpu_seconds(self) -> float:
        """Return the CPU time that the processes of the group have used so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()  # from the third, the state, on (man 5 proc)
                if int(fields[3]) == self._process.pid:  # the session
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Send SIGTERM to the process, and SIGKILL to the group at its end or at the deadline."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()


class Master:
    """A ``mooncake_master`` process, which can be killed, suspended and started again at the same address."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._rpc, self._metrics = free_ports(2)
        self.pool = f"mooncake://127.0.0.1:{self._rpc}?protocol=tcp&local_hostname=127.0.0.1&global_segment_size=512MiB"
        self._process: Process | None = None

    def start(self) -> None:
        """Start the master, with an empty pool, and wait until it is ready."""
        installed = Path(sys.executable).with_name("mooncake_master")
        program = str(installed) if installed.exists() else shutil.which("mooncake_master")
        if program is None:
            fail("mooncake_master is not installed; pip install '/path/to/this/repository[mooncake]' first")
        flags = (f"--rpc_port={self._rpc}", "--metrics_host=127.0.0.1", f"--metrics_port={self._metrics}")
        self._process = Process([program, "--rpc_address=127.0.0.1", *flags], self._log, {})
        self._process.wait_ready(f"http://127.0.0.1:{self._metrics}/health")

    def count_keys(self) -> int:
        """Return the number of keys that the master knows: blocks, and manifests of namespaces."""
        return int(metric(self._metrics, "master_key_count"))

    def send(self, signal_number: int) -> None:
        """Send a signal: ``SIGKILL`` kills the master, ``SIGSTOP`` suspends it, ``SIGCONT`` resumes it."""
        assert self._process is not None
        self._process.send(signal_number)

    def stop(self) -> None:
        """Stop the master, if it was started."""
        if self._process is not None:
            self._process.send(signal.SIGCONT)
            self._process.stop()


class Cluster:
    """A context manager that starts processes, and stops all of them at its end, the master last.

    Args:
        folder: the folder for logs and files.
        model: the folder of the checkpoint.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.master = Master(folder / "master.log")
        self._model = model
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Cluster:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1"  # everything here talks to this machine
        try:
            self.master.start()
        except BaseException:  # also Ctrl-C
            self.master.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.stop()
        self.master.stop()

    def start_vllm(
        self,
        name: str,
        *flags: str,
        connector: Connector | None = "kvstore",
        port: int | None = None,
        **options: object,
    ) -> int:
        """Begin to start an instance and return its port; ``wait_ready`` waits for the instance.

        Args:
            name: the name of the instance and of its log.
            flags: further flags of ``vllm serve``.
            connector: ours, vLLM's own, or none.
            port: the port of an instance that ran before; default: a free port.
            options: further members of ``kv_connector_extra_config``.
        """
        free, side_channel = free_ports(2)
        port = port or free
        argv = [_vllm(), "serve", self._model, "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", port]
        argv += ["--max-model-len", "4096", "--max-num-seqs", "8", "--dtype", "float32", "--enforce-eager"]
        argv += ["--num-gpu-blocks-override", "1024"]  # 1 GiB with this project's small model
        argv += ["--shutdown-timeout", "10"]  # without it, vLLM kills its workers before they can leave the pool
        transfer: dict[str, object] = {}
        if connector == "kvstore":
            transfer["kv_connector"] = "KVStoreConnector"
            transfer["kv_connector_module_path"] = "kvstore_backend.integrations.vllm"
            transfer["kv_connector_extra_config"] = {"pool": self.master.pool, **options}
        elif connector == "nixl":
            transfer = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
        if transfer:
            argv += ["--kv-transfer-config", json.dumps({**transfer, "kv_role": "kv_both"})]
        # One compute thread for each instance, because several instances share this machine's cores.
        env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        # NixlConnector on CPU uses TCP and shared memory; each instance describes its blocks at its own port.
        env |= {"UCX_TLS": "tcp,self,sm", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel)
        self._processes[name] = Process([*map(str, argv), *flags], self.folder / f"{name}.log", env)
        return port

    def start_router(self, roles: Mapping[int, str], connector: Connector = "kvstore") -> int:
        """Start our router with a register file that names the instances, and return its port.

        Args:
            roles: for each instance's port, its role; all ``mixed``, or each ``prefill`` or ``decode``.
            connector: the instances' connector; the router needs it to send requests to a pair.
        """
        (port,) = free_ports(1)
        kind = f"engine: vllm, kv_connector: {connector}"
        lines = [
            f"  - {{role: {role}, host_ip: 127.0.0.1, port: {instance}, {kind}}}\n" for instance, role in roles.items()
        ]
        (self.folder / "instances.yaml").write_text("instances:\n" + "".join(lines))
        (self.folder / "router.yaml").write_text(f"manager:\n  register-path: {self.folder / 'instances.yaml'}\n")
        argv = [sys.executable, "-m", "router.launch", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--config_path", str(self.folder / "router.yaml")]
        argv += ["--splitwise"] * ("prefill" in roles.values())
        self._processes["router"] = Process(argv, self.folder / "router.log", {})
        self._processes["router"].wait_ready(f"http://127.0.0.1:{port}/health_generate")  # all instances answer it
        return port

    def wait_ready(self, name: str, port: int) -> None:
        """Wait until a started process is ready."""
        self._processes[name].wait_ready(f"http://127.0.0.1:{port}/health")

    def cpu_seconds(self, name: str) -> float:
        """Return the CPU time that a started program and its children have used so far."""
        return self._processes[name].cpu_seconds()

    def stop(self, name: str) -> None:
        """Stop one process."""
        self._processes.pop(name).stop()

    def kill(self, name: str) -> None:
        """Kill one program and its children with SIGKILL."""
        self._processes.pop(name).kill()


def metric(port: int, name: str, *labels: str) -> float:
    """Return the sum of a metric's samples that have all of ``labels`` (such as ``operation="load"``)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line)]
    return sum(float(line.rpartition(" ")[2]) for line in samples if all(label in line for label in labels))


def namespaces(port: int) -> set[str]:
    """Return the namespaces in an instance's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return set(re.findall(r'kvstore_blocks_total\{.*?namespace="(\w+)"', answer.read().decode()))


def free_ports(count: int) -> list[int]:
    """Return ports that no server uses now, below the range that systems give to outgoing connections."""
    with contextlib.ExitStack() as sockets:
        ports: list[int] = []
        for port in random.sample(range(20000, 32000), 1000):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                sockets.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports


def wait_for_interrupt() -> None:
    """Wait until Ctrl-C."""
    print("(Ctrl-C stops everything)")
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def _vllm() -> str:
    """Return the program ``vllm``: the path in the variable VLLM, or in this Python's folder, or on the PATH."""
    named = os.environ.get("VLLM")
    if named and not shutil.which(named):
        fail(f"VLLM={named}: there is no such program; give the path of vLLM, as in VLLM=/path/to/bin/vllm")
    installed = Path(sys.executable).with_name("vllm")
    program = named or (str(installed) if installed.exists() else shutil.which("vllm"))
    if program is None:
        fail("vLLM is not installed here; set VLLM to the path of vllm in an environment that also has this project")
    return program


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Make an empty folder for logs, which stays at the end; end the program if another run uses the folder."""
    folder = Path(__file__).with_name(f"log_{name}")
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as opened:
        lock = os.open(folder, os.O_RDONLY)
        opened.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another run writes its logs to {folder}: end it first, with Ctrl-C")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield folder
