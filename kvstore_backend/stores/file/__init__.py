"""Store in a folder that several processes share.

store.py   FileStore: stores each value in a file, and reads it again
ledger.py  Ledger: limits the size of the folder, evicts values, and removes the files of killed writers
folder.py  lists the files in a folder, and checks whether a folder can be used as a pool
"""

from kvstore_backend.stores.file.store import FileStore

__all__ = ["FileStore"]
