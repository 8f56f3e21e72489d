"""Auth: the API keys of clients, the token of operators, and one for instances that only register.

All are sent as ``Authorization: Bearer ...``. Secrets are looked up by a keyed hash with a key of this process, so
that neither a look-up's time nor a dump of memory says anything about them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from pathlib import Path

from router.access.cache_salt import CacheSalts
from router.http import ApiError, Headers, Refused
from router.settings import PRIORITIES, ApiKey, RouterSettings, parse_priority, read_keys, read_token

__all__ = ["Auth"]

_SCHEME = b"bearer "


class Auth:
    """Knows the clients' keys, the admin token and the registration token, as the settings' files had them at start."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            SettingsError: a file cannot be read, or has nothing usable in it.
        """
        self._salt = secrets.token_bytes(32)
        keys: dict[str, ApiKey] = {}
        if settings.api_keys_file:
            keys = read_keys(Path(settings.api_keys_file), "server.api-keys-file")
        self._clients = {self._hash_secret(entry.key.encode()): name for name, entry in keys.items()}
        self._priorities = {name: entry.priority for name, entry in keys.items()}
        self.token_rates = {
            name: entry.tokens_per_sec for name, entry in keys.items() if entry.tokens_per_sec is not None
        }
        """Tokens a second of the clients that have a limit of their own."""
        self.cache_salts = (
            CacheSalts({name: entry.key for name, entry in keys.items()}) if settings.cache_salt_per_key else None
        )
        """Where clients' caches are to be kept apart."""
        self._admin = self._read_token(settings.admin_token_file, "server.admin-token-file")
        self._registration = self._read_token(settings.register_token_file, "server.register-token-file")
        self.danger = ""
        """What a stranger could do, in one sentence; ``""`` where that is nothing."""
        if self._admin is None and not _is_loopback(settings.host):
            mischief = "register an instance and read what is sent to it" if self._registration is None else \
                "drain its instances and see where they are"  # fmt: skip
            self.danger = f"whoever reaches {settings.host} can {mischief}; set --admin-token-file, or --host 127.0.0.1"

    def __repr__(self) -> str:
        return f"<Auth {len(self._clients)} clients, admin {'by token' if self._admin else 'open'}>"

    @property
    def has_admin_token(self) -> bool:
        """Whether there is an admin token, so that not everyone may change the instances."""
        return self._admin is not None

    def identify_client(self, headers: Headers) -> str:
        """The name of the client that holds the key sent; ``""`` for everyone where there are no keys.

        Raises:
            Refused: 401: no key was sent, or one that nobody holds.
        """
        if not self._clients:
            return ""
        sent = _find_bearer_token(headers)
        if sent is None:
            message = "this router serves those who hold an API key; send it as 'Authorization: Bearer KEY'"
            raise Refused(ApiError(401, message, "missing_api_key"))
        name = self._clients.get(self._hash_secret(sent))
        if name is None:
            raise Refused(ApiError(401, "the API key sent is none of this router's", "invalid_api_key"))
        return name

    def find_priority(self, client: str, headers: Headers) -> int:
        """The priority of a request: the client's, or a lower one that its header ``X-Priority`` asks for.

        Where there are no keys, the header says it.

        Raises:
            Refused: 400: the header says none.
        """
        own = self._priorities.get(client)
        for name, value in headers:
            if name == b"x-priority":
                asked = parse_priority(value.decode("latin-1"))
                if asked is None:
                    message = f"the header X-Priority must be a whole number from {PRIORITIES[0]} to {PRIORITIES[-1]}"
                    raise Refused(ApiError(400, message, "invalid_header", "X-Priority"))
                return asked if own is None else min(asked, own)
        return own or 0

    def check_admin(self, headers: Headers) -> None:
        """Let pass who holds the admin token; everyone where there is none.

        Raises:
            Refused: 401: it was not sent, or is another one.
        """
        if self._admin is None:
            return
        sent = _find_bearer_token(headers)
        if sent is None:
            message = "this takes the router's admin token; send it as 'Authorization: Bearer TOKEN'"
            raise Refused(ApiError(401, message, "missing_admin_token"))
        if not secrets.compare_digest(self._hash_secret(sent), self._admin):
            raise Refused(ApiError(401, "the token sent is not the router's admin token", "invalid_admin_token"))

    def check_registration(self, headers: Headers) -> None:
        """Let pass who may register an instance: who holds the admin token, or the one for instances if there is one.

        Raises:
            Refused: 401: neither was sent.
        """
        if self._registration is None:
            self.check_admin(headers)
            return
        sent = _find_bearer_token(headers)
        if sent is None:
            message = "this takes the router's registration token; send it as 'Authorization: Bearer TOKEN'"
            raise Refused(ApiError(401, message, "missing_register_token"))
        digest = self._hash_secret(sent)
        if not any(token and secrets.compare_digest(digest, token) for token in (self._registration, self._admin)):
            message = "the token sent is neither the router's registration token nor its admin token"
            raise Refused(ApiError(401, message, "invalid_register_token"))

    def _read_token(self, path: str, setting: str) -> bytes | None:
        """The hash of the token in a file; None where no file is named."""
        return self._hash_secret(read_token(Path(path), setting).encode()) if path else None

    def _hash_secret(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._salt, digest_size=32).digest()


def _find_bearer_token(headers: Headers) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == _SCHEME:
            return value[7:].strip()
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
