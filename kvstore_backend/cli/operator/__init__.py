"""Commands of ``kvstore`` with which an operator lists, removes, pins and compares blocks of a pool.

ls.py         kvstore ls: lists the namespaces of a pool, or the blocks of a prefix
clear.py      kvstore clear: removes blocks
why_miss.py   kvstore why-miss: compares two configurations, or two prompts, that do not share blocks
pin.py        kvstore pin, unpin: protects blocks from eviction for a time
asking.py     sends HTTP requests to instances and routers
pool.py       reads the arguments that select the pool, and gives access to the pool's values
scope.py      reads the arguments that select blocks, and lists the namespaces of a pool
"""
