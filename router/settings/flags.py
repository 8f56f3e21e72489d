"""FlagParser: parses a command line, and reports each mistake in one sentence."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from kvcommon.addresses import parse_address
from kvcommon.hints import list_flags, suggest_name
from kvcommon.versions import find_version
from router.settings.router_settings import SettingsError

__all__ = ["FlagParser", "parse_port", "parse_url"]


class FlagParser(argparse.ArgumentParser):
    """An ``argparse.ArgumentParser`` with ``--version``, in which a mistake raises a ``SettingsError``.

    The message for an unknown flag names the most similar flag.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Create a parser with the arguments of ``argparse.ArgumentParser``."""
        super().__init__(allow_abbrev=False, **kwargs)
        self.add_argument(
            "-V", "--version", action="version", version=f"kvrouter {find_version()}", help="print the version and end"
        )

    def error(self, message: str) -> NoReturn:
        """Raise ``SettingsError`` with ``message``. ``argparse`` calls this for a mistake in the command line."""
        raise SettingsError(message)

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse like ``argparse``, but report an unknown flag before a missing flag."""
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
    """Convert a flag's value to a port number. ``add_argument`` takes this function as its parameter ``type``."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, a number from 1 to 65535")
    return int(text)


def parse_url(text: str) -> str:
    """Convert a flag's value, ``HOST:PORT`` or a URL, to a URL. ``add_argument`` takes this function as ``type``."""
    try:
        return parse_address(text).url
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
