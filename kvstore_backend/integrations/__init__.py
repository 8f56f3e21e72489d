"""Other engines' contracts, met by our storage: one file or package an engine, loaded by that engine alone.

fastdeploy.py       FastDeploy: a plugin that puts our client in the place of Mooncake's
mindie.py           MindIE: its server's configuration, read and checked as MindIE does
sglang.py           SGLang: a storage tier of its hierarchical cache
vllm/               vLLM: a KV connector
mooncake_client.py  the calls and codes of Mooncake's own client over a StorageBackend, for engines that use those
"""
