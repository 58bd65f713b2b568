"""Caches that are correct by key: the key carries every field that can change the output."""
