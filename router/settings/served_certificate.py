"""ServedCertificate: the certificate that the router shows to clients, loaded again when its files have changed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from router.settings.router_settings import SettingsError
from router.settings.secret_file import stamp_file
from router.settings.tls_files import load_certificate

__all__ = ["ServedCertificate"]

_log = logging.getLogger("router.settings.served_certificate")

CHECK_SECONDS = 2.0

# For each file: modification time and inode; None if it does not exist.
_Stamp = list[tuple[int, int] | None]


class ServedCertificate:
    """Loads the certificate of one port, and loads it again after each renewal."""

    def __init__(self, context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
        """
        Args:
            context: the TLS context of the port, into which the certificate is loaded.
            certfile, keyfile: the files of the certificate and of its key; ``""`` if the first contains the key.

        Raises:
            SettingsError: the certificate or its key cannot be used.
        """
        self._context = context
        self._certfile, self._keyfile = certfile, keyfile
        self._loaded = self._stamp_files()
        load_certificate(context, certfile, keyfile)

    async def keep_current(self) -> None:
        """Load the certificate again whenever its files have changed, until this task is cancelled.

        If the new certificate cannot be used, an error is logged, and the previous certificate stays.
        """
        seen = self._loaded
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            stamp = self._stamp_files()
            if stamp == seen != self._loaded:  # no change since the last check, so both files are written
                self._loaded = stamp
                self._load_again()
            seen = stamp

    def _load_again(self) -> None:
        try:
            # The pair is loaded into another context first. With only half of it, the port could serve no client.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._context):
                load_certificate(context, self._certfile, self._keyfile)
        except SettingsError as exc:
            _log.error("the renewed certificate cannot be used, so the previous certificate stays in use: %s", exc)
        else:
            _log.info("the certificate in %s was renewed", self._certfile)

    def _stamp_files(self) -> _Stamp:
        return [stamp_file(Path(name)) for name in (self._certfile, self._keyfile) if name]
