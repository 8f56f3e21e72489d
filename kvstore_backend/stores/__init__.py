"""Stores: the places in which the bytes of blocks are stored.

mooncake.py          MooncakeStore: a client of a Mooncake cluster
mooncake_joining.py  opens Mooncake's native client: loads the library, checks the servers, joins the cluster
mooncake_admin.py    reads a Mooncake master's HTTP interface, and lists the masters in etcd
holdings.py          Holdings: lists, measures, pins and removes the values of a pool, for operator commands
ssd_folder.py        the folder of Mooncake's SSD offload: a client that restarts waits until the master has forgotten
                     the earlier one, because otherwise the folder's blocks would be lost
file/                FileStore: a folder that the processes of one machine share
memory.py            MemoryStore: memory of this process, for tests and as a fast tier
"""
