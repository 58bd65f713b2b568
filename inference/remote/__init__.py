"""An engine in a process of its own: what goes over the wire, how weights get there, both ends of it."""
