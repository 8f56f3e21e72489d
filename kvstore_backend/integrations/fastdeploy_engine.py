"""FastDeploy's engine as each of its processes can see it: command line, environment, version, and weights.

The engine looks blocks up, and its children move them: transfer processes, or workers. They receive different parts of
the settings, in different forms. So all of them read the settings that determine KV from one place: FastDeploy's API
server, which the operator started. It is the process itself or an ancestor of it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvstore_backend.backend import ConfigError
from kvstore_backend.integrations.fastdeploy_settings import CANNOT_CHANGE_KV, DECIDE_ON_KV, TOLD_OTHERWISE
from kvstore_backend.namespace import stat_weights

__all__ = ["Engine", "Weights", "WeightsVersion", "find_engine", "find_version", "parse_arguments"]

logger = logging.getLogger(__name__)

_SERVER = re.compile(r"(?:.*/)?fastdeploy[./]entrypoints[./](?:.*[./])?(?:api_server|run_batch)(?:\.py)?")
_ARGUMENTS = sorted({*CANNOT_CHANGE_KV, *DECIDE_ON_KV, *TOLD_OTHERWISE})
_PROC = Path("/", "proc")
_SHORT = {"-tp": "--tensor-parallel-size"}


@dataclass(frozen=True)
class Engine:
    """Arguments and environment with which the engine was started.

    Attributes:
        arguments: values as FastDeploy reads them, by names with underscores.
        defaults: the defaults of these arguments, as far as they are known.
        environ: environment of the engine's process when it was started; later changes follow from the arguments.
    """

    arguments: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def hands_over_by_storage(self) -> bool:
        """Whether decode reads prefill's blocks from the pool, and fails a request if they are missing."""
        return self.environ.get("FD_PD_TRANSFER_VIA_STORAGE", "0") != "0"


def find_engine(proc: Path = _PROC, pid: str = "self") -> Engine:
    """Find the engine that this process is, or that started it.

    Raises:
        ConfigError: there is no engine, or it cannot be read.
    """
    while pid != "0":
        try:
            words = [word.decode(errors="replace") for word in (proc / pid / "cmdline").read_bytes().split(b"\0")[:-1]]
            start = next((i for i, word in enumerate(words) if _SERVER.fullmatch(word)), None)
            if start is not None:
                arguments, defaults = parse_arguments(words[start + 1 :])
                return Engine(arguments, defaults, _read_environ(proc / pid / "environ"))
            status = (proc / pid / "status").read_text()
        except OSError as exc:
            raise ConfigError(f"FastDeploy's command line cannot be read: {exc}") from exc
        found = re.search(r"^PPid:\s*(\d+)$", status, re.MULTILINE)
        pid = found[1] if found else "0"
    raise ConfigError(
        "neither this process nor one above it is FastDeploy's API server, whose command line has the settings that "
        "determine KV: start FastDeploy with python -m fastdeploy.entrypoints.openai.api_server"
    )


def parse_arguments(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a command line with FastDeploy's own parser; return its arguments and their defaults.

    Without FastDeploy, return the given arguments and no defaults.

    Raises:
        ConfigError: FastDeploy would not accept the command line.
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
        raise ConfigError("FastDeploy's own parser does not take its command line; its message says why") from None
    return arguments, {name: parser.get_default(name) for name in arguments}


def _read_words(words: Sequence[str]) -> dict[str, Any]:
    """Parse arguments as argparse does, from a command line and the YAML file that it names."""
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
    """Return the only argument that begins with ``name``; return an unknown name unchanged."""
    found = [name] if name in _ARGUMENTS else [each for each in _ARGUMENTS if each.startswith(name)]
    return found[0] if len(found) == 1 else name


def _read_environ(path: Path) -> dict[str, str]:
    pairs = (entry.decode(errors="replace").partition("=") for entry in path.read_bytes().split(b"\0") if entry)
    return {name: text for name, _, text in pairs}


def find_version() -> str:
    """Return the version of the FastDeploy that this process has loaded, and a digest that differs for each build.

    A build has a ``version.txt``; without it, as in a source tree, the digest covers the cache manager's files.
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


@dataclass(frozen=True)
class WeightsVersion:
    """Version of a model's weights: ``text`` differs whenever the weights do.

    Attributes:
        text: text for the namespace.
        step: text with which FastDeploy 2.6 begins its keys after ``prefix``; empty: there is no ``version.yaml``.
    """

    text: str
    step: str


class Weights:
    """Reader of ``version.yaml`` in a model's folder, which a trainer writes; it reads the file again after a change.

    Args:
        folder: the model's folder.
        may_change: whether weights can be updated while the instance runs; then the file must exist, and it must change
            whenever the files of weights do.

    Raises:
        ConfigError: weights may change, and the file is missing or has no version.
    """

    def __init__(self, folder: str | Path, *, may_change: bool) -> None:
        self._may_change = may_change
        self._folder = Path(folder)
        self._file = self._folder / "version.yaml"
        self._seen: tuple[int, ...] | None = ()
        self._version: WeightsVersion | None = None
        self._named: WeightsVersion | None = None  # the last version that was read
        self._files: dict[str, tuple[int, ...]] | None = None  # state of the files of weights at that time
        self._is_told = False  # whether the log has reported that they have changed since
        if self.read() is None:
            raise ConfigError(
                f"--dynamic-load-weight lets weights change, and {self._file} does not say which they are, so that KV "
                'of old weights would be read: write one there, as FastDeploy wants it ("version: RL-STEP1-...")'
            )

    def read(self) -> WeightsVersion | None:
        """Return the version that the folder names now; None: it is not known, so no block can be used.

        It is not known, for example, after files of weights were written and before the version changes: it is not
        visible whether the model has loaded them.
        """
        try:
            stat = self._file.stat()
            seen: tuple[int, ...] | None = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        except OSError:
            seen = None
        files = self._stat_files() if self._may_change else None
        if seen != self._seen:
            self._version, self._seen = self._parse(), seen
            if self._version not in (None, self._named):
                self._named, self._files, self._is_told = self._version, files, False
        if self._version is None or files == self._files:
            return self._version
        if not self._is_told:
            logger.warning(
                "The weights in %s have changed, and %s has not: the pool is not used until it names others",
                self._folder,
                self._file.name,
            )
        self._is_told = True
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
