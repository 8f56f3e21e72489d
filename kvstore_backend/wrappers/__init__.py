"""One concern each, each a backend around another backend."""
