"""Where bytes live: one store a file or package.

mooncake.py    MooncakeStore: a client of a Mooncake cluster
ssd_folder.py  the folder of Mooncake's SSD offload, and whether its last owner has left it or died
file/          FileStore: a folder that the processes of one machine share
memory.py      MemoryStore: this process's own memory, for tests and as the fast one of two tiers
"""
