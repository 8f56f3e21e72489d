"""Other APIs than completions, each a thin translation onto chat.

completions.py     chat and plain completions over generations: prompts in, JSON objects and event streams out
responses.py       OpenAI's Responses API: its objects and its stream of typed events
responses_body.py  its requests, checked, and as requests of chat
response_store.py  responses that are kept to be continued and read again, in memory and bounded
messages.py        Anthropic's Messages API: its requests, messages and stream of typed events
plain_body.py      the part of a request that both share: which fields they know, which they pass on to chat
typed_events.py    server-sent events that name their type, as both have them
"""
