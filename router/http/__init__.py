"""HTTP/1.1: the server that clients talk to, and pooled connections to instances."""
