"""Operator commands on the blocks of a pool.

ls.py         kvstore ls: a pool's namespaces, or a prefix
clear.py      kvstore clear: removes the named blocks
why_miss.py   kvstore why-miss: why two configurations do not share blocks, or where two prompts diverge
pin.py        kvstore pin, unpin: protects blocks from eviction for a time
asking.py     HTTP requests to instances and routers
pool.py       which pool: arguments, and its opened holdings
scope.py      which blocks of the pool: namespaces, or those of a prefix; and what a pool holds
"""
