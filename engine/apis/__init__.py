"""The HTTP APIs of an instance. Responses and Messages are translated to chat completions.

completion_response.py  responses to chat and plain completions: one object, or a stream of events
completions.py          OpenAI's chat and plain completions: encodes prompts, begins responses
responses.py            OpenAI's Responses API: its objects and its event stream
responses_body.py       request bodies of the Responses API, and their translation to chat
response_store.py       stores responses in memory, for clients that continue or read them
messages.py             Anthropic's Messages API: its bodies, its objects and its event stream
plain_body.py           base class of the bodies of Responses and Messages; server-sent events with a type
"""
