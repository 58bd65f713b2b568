"""Parity: what a card promises, checked. A typed gate that training and serving run, not only the tests."""
