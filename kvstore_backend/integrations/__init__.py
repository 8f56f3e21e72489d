"""Other engines' contracts, met by our storage: one file or package an engine, loaded by that engine alone.

fastdeploy.py       FastDeploy: a plugin that puts our client in the place of Mooncake's
fastdeploy_engine.py    FastDeploy's engine as its processes see it: command line, environment, version, weights
fastdeploy_settings.py  which of FastDeploy's settings decide on the bytes of a block
mindie.py           MindIE: its server's configuration, read and checked as MindIE does
settings.py         settings of an engine that decide on the bytes of its blocks, in the namespace and its manifest
sglang.py           SGLang: a storage tier of its hierarchical cache
sglang_settings.py  which of SGLang's settings decide on the bytes of a page
vllm/               vLLM: a KV connector
mooncake_client.py  the calls and codes of Mooncake's own client over a StorageBackend, for engines that use those
"""
