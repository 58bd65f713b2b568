"""Parallelism plans: how the modules of the roles are placed and which Lightning strategy runs them."""
