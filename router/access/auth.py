"""Who is asking: API keys of clients, and the token of those who may change the router's instances.

Both are sent as ``Authorization: Bearer ...``. Secrets are looked up by a keyed hash with a key of this process, so
that neither a look-up's time nor a dump of memory says anything about them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
from pathlib import Path

import yaml

from router.http.api_error import ApiError, Refused
from router.http.message import Headers
from router.settings import RouterSettings, SettingsError

__all__ = ["Auth", "read_token"]

_log = logging.getLogger("router.access.auth")

_SCHEME = b"bearer "


class Auth:
    """Knows the clients' keys and the admin token, as the settings' files had them at start."""

    def __init__(self, settings: RouterSettings) -> None:
        """
        Raises:
            SettingsError: a file cannot be read, or has nothing usable in it.
        """
        self._salt = secrets.token_bytes(32)
        self._clients = {}
        if settings.api_keys_file:
            keys = _read_keys(Path(settings.api_keys_file), "server.api-keys-file")
            self._clients = {self._digest(key.encode()): name for name, key in keys.items()}
        self._admin: bytes | None = None
        if settings.admin_token_file:
            self._admin = self._digest(read_token(Path(settings.admin_token_file), "server.admin-token-file").encode())
        elif not _is_loopback(settings.host):
            _log.warning(
                "whoever reaches %s can register an instance and read what is sent to it; "
                "set --admin-token-file, or --host 127.0.0.1",
                settings.host,
            )

    def __repr__(self) -> str:
        return f"<Auth {len(self._clients)} clients, admin {'by token' if self._admin else 'open'}>"

    @property
    def has_admin_token(self) -> bool:
        """Whether there is an admin token, so that not everyone may change the instances."""
        return self._admin is not None

    def client(self, headers: Headers) -> str:
        """The name of the client that holds the key sent; ``""`` for everyone where there are no keys.

        Raises:
            Refused: 401: no key was sent, or one that nobody holds.
        """
        if not self._clients:
            return ""
        sent = _bearer(headers)
        if sent is None:
            message = "this router serves those who hold an API key; send it as 'Authorization: Bearer KEY'"
            raise Refused(ApiError(401, message, "missing_api_key"))
        name = self._clients.get(self._digest(sent))
        if name is None:
            raise Refused(ApiError(401, "the API key sent is none of this router's", "invalid_api_key"))
        return name

    def check_admin(self, headers: Headers) -> None:
        """Let pass who holds the admin token; everyone where there is none.

        Raises:
            Refused: 401: it was not sent, or is another one.
        """
        if self._admin is None:
            return
        sent = _bearer(headers)
        if sent is None:
            message = "this takes the router's admin token; send it as 'Authorization: Bearer TOKEN'"
            raise Refused(ApiError(401, message, "missing_admin_token"))
        if not secrets.compare_digest(self._digest(sent), self._admin):
            raise Refused(ApiError(401, "the token sent is not the router's admin token", "invalid_admin_token"))

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._salt, digest_size=32).digest()


def _bearer(headers: Headers) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == _SCHEME:
            return value[7:].strip()
    return None


def _read_keys(path: Path, setting: str) -> dict[str, str]:
    """Names and keys of a file with ``name: key`` or one key a line; holders without a name are ``key1`` and so on."""
    lines = _lines(path, setting)
    if not any(":" in line for line in lines):
        pairs = [(f"key{number}", key.strip()) for number, key in enumerate(lines, start=1)]
    else:
        pairs = _pairs("\n".join(lines), path, setting)
    names: dict[str, str] = {}
    holders: dict[str, str] = {}
    for name, key in pairs:
        if not key or any(character.isspace() for character in key):
            raise SettingsError(f"{setting} {path}: the key of {name!r} is empty or has a space in it")
        if name in names:
            raise SettingsError(f"{setting} {path}: the name {name!r} stands there twice")
        if key in holders:
            raise SettingsError(f"{setting} {path}: {holders[key]!r} and {name!r} have the same key")
        names[name], holders[key] = key, name
    return names


def _pairs(text: str, path: Path, setting: str) -> list[tuple[str, str]]:
    # Composed, not loaded: loading would make a number of key 1234, and drop a name that stands there twice. What YAML
    # says of a fault quotes the line it is in, and so the key; hence it is not repeated here.
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if isinstance(node, yaml.MappingNode) and all(
        isinstance(part, yaml.ScalarNode) for entry in node.value for part in entry
    ):
        return [(name.value, key.value) for name, key in node.value]
    raise SettingsError(f"{setting} {path} must have lines 'name: key', or one key a line and no ':' anywhere")


def read_token(path: Path, setting: str) -> str:
    """The token in a file of its own.

    Raises:
        SettingsError: the file cannot be read, or has anything beside one word; it names ``setting``.
    """
    lines = _lines(path, setting)
    if len(lines) != 1 or len(lines[0].split()) != 1:
        raise SettingsError(f"{setting} {path} must have the token as its only line, with no space in it")
    return lines[0].strip()


def _lines(path: Path, setting: str) -> list[str]:
    """The lines of the file that are neither empty nor a comment, at least one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"{setting} {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{setting} {path} is not text in UTF-8") from exc
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise SettingsError(f"{setting} {path} is empty")
    return lines


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
