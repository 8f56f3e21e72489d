"""FastDeploy's own storage classes with our client, in FastDeploy's processes with its command lines.

scripts/test-fastdeploy runs these tests. Without FastDeploy they are skipped. FastDeploy's own are the argument parser,
the configuration, the command lines of the child processes, the names of blocks, the storage classes, and in form 2.6
all of the transfer process's read and write tasks. Paddle's CUDA kernels, the device's memory, the models, their
tokenizer, and the queues between FastDeploy's processes are simulated.

link.py        calls from a test to such a process
api_server.py  the engine's process: starts the mover, and in form v1 looks up blocks
mover.py       the process that moves blocks: the transfer process of 2.6, or the worker of v1
instance.py    a running engine with its mover, and the calls of a test
"""
