"""FastDeploy's own storage classes over our client, in the processes and with the command lines that it has.

scripts/test-fastdeploy runs them; without FastDeploy they are skipped. There are stand-ins for what needs a GPU
(paddle's CUDA kernels, the device's memory), for the models and their tokenizer, and for the queues between
FastDeploy's processes. FastDeploy's own are the argument parser, the configuration, the command lines of its children,
the names of blocks, the storage classes, and in form 2.6 the whole of the transfer process's read and write tasks.

link.py        how a test calls such a process
api_server.py  the engine's process: starts the mover; in form v1 looks blocks up itself
mover.py       the process that moves blocks: the transfer process of 2.6, or the worker of v1
instance.py    a running engine with its mover, as a test sees it
"""
