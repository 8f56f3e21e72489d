"""The way of one request: selection, attempts, the response, resumption."""
