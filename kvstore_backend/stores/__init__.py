"""Stores of bytes: one file or package each.

mooncake.py        MooncakeStore: a client of a Mooncake cluster
holdings.py        Holdings: the values of a pool, for operator commands, read in the way of each store
mooncake_admin.py  a Mooncake master's HTTP interface, and the masters that etcd knows
mooncake_build.py  the parts that this machine's build of Mooncake lacks
ssd_folder.py      the folder of Mooncake's SSD offload, and when its last owner left it
file/              FileStore: a folder that the processes of one machine share
memory.py          MemoryStore: this process's own memory, for tests and as the fast one of two tiers
"""
