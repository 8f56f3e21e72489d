"""APIs other than completions. Each is a thin translation to chat requests.

completions.py     chat and plain completions: prompts in, JSON objects and event streams out
responses.py       OpenAI's Responses API: its objects and its stream of typed events
responses_body.py  its requests: checked, and translated to chat requests
response_store.py  stored responses, which clients continue and read again; in memory and bounded
messages.py        Anthropic's Messages API: its requests, messages and stream of typed events
plain_body.py      the request fields that both share, and those that they pass to chat
typed_events.py    server-sent events that name their type, used by both
"""
