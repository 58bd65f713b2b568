"""The serving runtime: requests in, artifacts out, with the engine that runs the steps of all loops under one budget.

Imports cards and loops, never methods. This file stays free of heavy imports; import the modules directly, for
example ``inference.media`` for reading and writing videos.
"""
