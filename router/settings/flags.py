"""FlagParser: a command line parser that reports each mistake in one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from kvcommon.hints import list_flags, suggest_name
from kvcommon.versions import find_version
from router.settings.router_settings import SettingsError

__all__ = ["FlagParser", "parse_port"]


class FlagParser(argparse.ArgumentParser):
    """argparse, but a mistake raises a ``SettingsError`` that names the nearest flag; and it has ``--version``."""

    def __init__(self, **kwargs: Any) -> None:
        """Args: those of ``argparse.ArgumentParser``, by name."""
        super().__init__(allow_abbrev=False, **kwargs)
        self.add_argument(
            "-V", "--version", action="version", version=f"kvrouter {find_version()}", help="print the version and end"
        )

    def error(self, message: str) -> NoReturn:
        """Raise ``SettingsError``."""
        raise SettingsError(message)

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, but report an unknown flag before a missing one."""
        for arg in args:
            flag = arg.partition("=")[0]
            if flag.startswith("--") and flag != "--" and flag not in list_flags(self):
                self._refuse_flag(flag)
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse_flag(unknown[0].partition("=")[0])
        return known

    def _refuse_flag(self, flag: str) -> NoReturn:
        raise SettingsError(f"{flag} is not a flag of this program{suggest_name(flag, list_flags(self))}")


def parse_port(text: str) -> int:
    """Convert a flag's value to a port, for ``type``."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a number from 1 to 65535")
    return int(text)
