"""HTTP/1.1: the server that clients talk to, and pooled connections to instances.

server.py      uvicorn's protocol, with a shorter way for the data plane
body.py        a request's body: parsed once, extended without serialising it again
api_error.py   errors in OpenAI's shape
exchange.py    one request to one instance and its response
pool.py        pooled connections to instances
connection.py  one connection to an instance: bytes -> pieces of a response
message.py     the parts of an HTTP message
errors.py      the errors of an exchange
usage.py       the token counts in a response, found without parsing it
"""
