"""Adapters that let other engines use the pool. Each engine loads only its own adapter.

fastdeploy.py       FastDeploy: a plugin that replaces Mooncake's client by a client of the pool
fastdeploy_engine.py    reads the command line, environment, version and weights of FastDeploy's engine
fastdeploy_settings.py  lists the settings of FastDeploy that can change the bytes of a block, and those that cannot
mindie.py           MindIE: reads and checks the configuration of its server, as MindIE does
settings.py         digests the settings of an engine for the namespace, and lists them in the manifest
sglang.py           SGLang: a storage backend for its hierarchical cache
sglang_settings.py  lists the settings of SGLang that can change the bytes of a page, and those that cannot
vllm/               vLLM: a KV connector
mooncake_client.py  a client of the pool with the calls and codes of Mooncake's own client, for engines that use it
"""
