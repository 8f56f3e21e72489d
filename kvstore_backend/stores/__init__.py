"""Stores of bytes: one file or package each.

mooncake.py          MooncakeStore: a client of a Mooncake cluster
mooncake_joining.py  opens its native client: the library, the servers that it needs, its setup
mooncake_admin.py    a Mooncake master's HTTP interface, and the masters that etcd knows
holdings.py          Holdings: the values of a pool, for operator commands, read in the way of each store
ssd_folder.py        the folder of Mooncake's SSD offload, and when its last owner left it
file/                FileStore: a folder that the processes of one machine share
memory.py            MemoryStore: this process's own memory, for tests and as the fast one of two tiers
"""
