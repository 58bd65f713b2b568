"""One file a route family; each offers a ``router``."""
