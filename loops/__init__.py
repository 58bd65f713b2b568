"""Loops: what to evaluate next, never how.

A loop is ask/tell: ``next`` describes a step as ``ModelCall`` data and ``advance`` takes its result. ``drive`` is the
ten-line reference runner and the oracle in tests; ``inference`` runs the same loops under one budget.
"""
