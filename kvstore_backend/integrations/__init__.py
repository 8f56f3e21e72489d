"""Adapters that let other engines use our storage: one file or package per engine, loaded only by that engine.

fastdeploy.py       FastDeploy: a plugin that replaces Mooncake's client by ours
fastdeploy_engine.py    FastDeploy's engine as its processes see it: command line, environment, version, weights
fastdeploy_settings.py  FastDeploy's settings that determine the bytes of a block
mindie.py           MindIE: its server's configuration, read and checked as MindIE does
settings.py         settings of an engine that determine the bytes of its blocks, in the namespace and its manifest
sglang.py           SGLang: a storage tier of its hierarchical cache
sglang_settings.py  SGLang's settings that determine the bytes of a page
vllm/               vLLM: a KV connector
mooncake_client.py  the calls and codes of Mooncake's own client over a StorageBackend, for engines that use those
"""
