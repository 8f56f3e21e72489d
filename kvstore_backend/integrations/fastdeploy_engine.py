"""Reads the command line, environment, version and weights of FastDeploy's engine, from any of its processes.

The engine looks blocks up. Its child processes (transfer processes or workers) move the blocks. Each kind of process
receives other parts of the settings, in another form. So all of them read the settings that determine KV from the
command line and environment of FastDeploy's API server, which the operator started. The API server is the process
itself or one of its parents.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvstore_backend.backend import ConfigError
from kvstore_backend.integrations.fastdeploy_settings import CAN_CHANGE_KV, CANNOT_CHANGE_KV, IN_OTHER_FIELDS
from kvstore_backend.namespace import find_age, stat_weights

__all__ = [
    "Engine",
    "Weights",
    "WeightsVersion",
    "find_capability",
    "find_engine",
    "find_version",
    "parse_arguments",
]

logger = logging.getLogger(__name__)

_SERVER = re.compile(r"(?:.*/)?fastdeploy[./]entrypoints[./](?:.*[./])?(?:api_server|run_batch)(?:\.py)?")
_ARGUMENTS = sorted({*CANNOT_CHANGE_KV, *CAN_CHANGE_KV, *IN_OTHER_FIELDS})
_PROC = Path("/", "proc")
_SHORT = {"-tp": "--tensor-parallel-size"}


@dataclass(frozen=True)
class Engine:
    """Arguments and environment with which FastDeploy's engine was started.

    Attributes:
        arguments: value of each argument as FastDeploy parses it, by the argument's name with underscores.
        defaults: default of each argument by name; empty if FastDeploy cannot be imported.
        environ: environment of the engine's process at its start. FastDeploy sets further variables later, which depend
            only on the arguments.
        began: time at which the engine's process began, before any of its processes loaded weights, by
            ``time.monotonic`` of this process.
    """

    arguments: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default=math.inf, compare=False)

    @property
    def hands_over_by_storage(self) -> bool:
        """Whether decode reads prefill's blocks from the pool, and fails a request if a block is missing there."""
        return self.environ.get("FD_PD_TRANSFER_VIA_STORAGE", "0") != "0"


def find_engine(proc: Path = _PROC, pid: str = "self") -> Engine:
    """Return the command line and environment of FastDeploy's API server: this process, or one of its parents.

    Raises:
        ConfigError: none of the processes is an API server, or its command line cannot be read or parsed.
    """
    while pid != "0":
        try:
            words = [word.decode(errors="replace") for word in (proc / pid / "cmdline").read_bytes().split(b"\0")[:-1]]
            start = next((i for i, word in enumerate(words) if _SERVER.fullmatch(word)), None)
            if start is not None:
                arguments, defaults = parse_arguments(words[start + 1 :])
                began = time.monotonic() - find_age(proc / pid)
                return Engine(arguments, defaults, _read_environ(proc / pid / "environ"), began)
            status = (proc / pid / "status").read_text()
        except OSError as exc:
            raise ConfigError(f"FastDeploy's command line cannot be read: {exc}") from exc
        found = re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE)
        pid = found[1] if found else "0"
    raise ConfigError(
        "neither this process nor a parent of it is FastDeploy's API server, whose command line has the settings that "
        "determine KV; start FastDeploy with python -m fastdeploy.entrypoints.openai.api_server"
    )


def parse_arguments(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a command line with FastDeploy's own parser; return all arguments and their defaults.

    If FastDeploy cannot be imported, return only the arguments on the command line, and no defaults.

    Raises:
        ConfigError: FastDeploy's parser refuses the command line.
    """
    try:
        from fastdeploy.entrypoints.openai.utils import make_arg_parser
        from fastdeploy.utils import FlexibleArgumentParser
    except ImportError:
        return _read_words(words), {}
    parser = make_arg_parser(FlexibleArgumentParser())
    try:
        arguments = vars(parser.parse_args(list(words)))
    except SystemExit:
        raise ConfigError("FastDeploy's own parser refuses its command line; the parser's message says why") from None
    return arguments, {name: parser.get_default(name) for name in arguments}


def _read_words(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line as argparse does, and add the arguments from the YAML file in ``--config``."""
    given: dict[str, Any] = {}
    name = ""
    for word in words:
        option, equals, value = _SHORT.get(word, word).partition("=")
        if not option.startswith("--"):
            if name:
                given[name] = word if given[name] is True else f"{given[name]} {word}"
            continue
        name = _complete(option[2:].replace("-", "_"))
        given[name] = value if equals else True
        if equals:
            name = ""
    config = given.pop("config", None)
    if config is None:
        return given
    try:
        named = yaml.safe_load(Path(str(config)).read_text())
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"FastDeploy's --config {config} cannot be read: {exc}") from exc
    return {**(named if isinstance(named, dict) else {}), **given}


def _complete(name: str) -> str:
    """Return the only argument that begins with ``name``, an abbreviation; ``name`` itself if not exactly one does."""
    found = [name] if name in _ARGUMENTS else [each for each in _ARGUMENTS if each.startswith(name)]
    return found[0] if len(found) == 1 else name


def _read_environ(path: Path) -> dict[str, str]:
    pairs = (entry.decode(errors="replace").partition("=") for entry in path.read_bytes().split(b"\0") if entry)
    return {name: text for name, _, text in pairs}


def find_version() -> str:
    """Return FastDeploy's version and a digest of its build, as text that differs between builds.

    The digest is of the build's ``version.txt``. In a source tree without this file, the digest is of the files of
    FastDeploy's cache manager.
    """
    module = sys.modules.get("fastdeploy")
    if module is None or not getattr(module, "__file__", None):
        return "of no known version"
    folder = Path(str(module.__file__)).parent
    try:
        content = (folder / "version.txt").read_bytes()
    except OSError:
        files = sorted((folder / "cache_manager").rglob("*.py"))
        content = b"\0".join(file.read_bytes() for file in files)
    version = getattr(module, "__version__", "Unknown")
    return f"{version} {hashlib.sha256(content).hexdigest()[:8]}"


def find_capability() -> str:
    """Return the compute capability of this process's GPU, such as ``9.0``; empty if Paddle knows none.

    Each process of FastDeploy that has a client calls this function of Paddle itself when it imports its kernels.
    """
    try:
        properties = sys.modules["paddle"].device.cuda.get_device_properties()
        return f"{properties.major}.{properties.minor}"
    except (KeyError, AttributeError, ValueError, RuntimeError, OSError):  # no Paddle, another kind of device, or none
        return ""


@dataclass(frozen=True)
class WeightsVersion:
    """Version of a model's weights.

    Attributes:
        text: text for the namespace, which is different for different weights.
        step: the first two parts of the version, such as ``RL-STEP1``. FastDeploy 2.6 writes them into its keys, after
            the text ``prefix``. Empty if ``version.yaml`` is missing or has no version.
    """

    text: str
    step: str


class Weights:
    """Reads the version of a model's weights from ``version.yaml`` in the model's folder, which a trainer writes.

    Args:
        folder: the model's folder.
        may_change: whether the weights can be updated while the instance runs. Then ``version.yaml`` must exist, and it
            must change whenever the files of the weights change.

    Raises:
        ConfigError: the weights may change, and ``version.yaml`` is missing or has no version.
    """

    def __init__(self, folder: str | Path, *, may_change: bool) -> None:
        self._may_change = may_change
        self._folder = Path(folder)
        self._file = self._folder / "version.yaml"
        self._seen: tuple[int, ...] | None = ()
        self._version: WeightsVersion | None = None
        self._last: WeightsVersion | None = None  # the last version that was read
        self._files: dict[str, tuple[int, ...]] | None = None  # sizes and times of the weights' files at that time
        self._is_logged = False  # whether a warning was logged that the files have changed since
        if self.read() is None:
            raise ConfigError(
                f"--dynamic-load-weight allows new weights, but {self._file} has no version of the weights, so KV "
                "of old weights would be read; write the version into this file, as FastDeploy requires "
                '("version: RL-STEP1-...")'
            )

    def read(self) -> WeightsVersion | None:
        """Return the version of the weights in the folder now; None if the version is not known.

        While the version is not known, no block can be used. This is the case if the files of the weights have changed
        but ``version.yaml`` has not, because the model may or may not have loaded the new files.
        """
        try:
            stat = self._file.stat()
            seen: tuple[int, ...] | None = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError:
            seen = None
        files = self._stat_files() if self._may_change else None
        if seen != self._seen:
            self._version, self._seen = self._parse(), seen
            if self._version not in (None, self._last):
                self._last, self._files, self._is_logged = self._version, files, False
        if self._version is None or files == self._files:
            return self._version
        if not self._is_logged:
            logger.warning(
                "The weights in %s have changed, but the version in %s has not; the pool is not used until the version "
                "changes",
                self._folder,
                self._file.name,
            )
        self._is_logged = True
        return None

    def _stat_files(self) -> dict[str, tuple[int, ...]] | None:
        try:
            return stat_weights(self._folder)
        except OSError:
            return None

    def _parse(self) -> WeightsVersion | None:
        try:
            content = self._file.read_bytes()
        except OSError:
            return None if self._may_change else WeightsVersion("", "")
        digest = hashlib.sha256(content).hexdigest()[:12]
        try:
            version = str(yaml.safe_load(content)["version"])
        except (ValueError, TypeError, KeyError, yaml.YAMLError):
            return None if self._may_change else WeightsVersion(digest, "")
        return WeightsVersion(f"{version} {digest}", "-".join(version.split("-")[:2]))
