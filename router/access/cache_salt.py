"""CacheSalts: a ``cache_salt`` for each client, so that none can find out another's prompts by timing.

A salt is a hash of the holder's name, keyed with a secret that is derived from its API key: who does not have the key
cannot guess it, it is the same in all processes and after each start that read the same file, and no further secret
has to be kept. A client with a new key begins with an empty cache. A client's own salt is mixed in, and not refused, so
that one who serves several users goes on to keep these apart, and can reach nobody else's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["CacheSalts"]

_SALT_BYTES = 16


class CacheSalts:
    """Derives the salts of clients."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """
        Args:
            keys: the API keys, by their holders' names.
        """
        self._secrets: dict[str, bytes] = {}
        self.update(keys)

    def update(self, keys: Mapping[str, str]) -> None:
        """Take the keys that there are now; a request of a client that has none any more may still be on its way."""
        self._secrets |= {
            name: hashlib.blake2b(key.encode(), person=b"cache_salt").digest() for name, key in keys.items()
        }

    def derive(self, client: str, own: str = "") -> str:
        """The salt of a request.

        Args:
            own: the salt that the client sent; ``""`` if it sent none.
        """
        # Neither can imitate the other: the name's length is said.
        name = client.encode()
        text = b"%d:%s:%s" % (len(name), name, own.encode(errors="surrogatepass"))
        return hashlib.blake2b(text, key=self._secrets[client], digest_size=_SALT_BYTES).hexdigest()
