"""Other engines' contracts, met by our storage: one file an engine, loaded by that engine alone.

``mooncake_client.py`` is no engine's: it has the calls of Mooncake's own client, for engines that use that.
"""
