"""Errors that a user can act on.

Knows nothing about where they are raised. The command line prints a ``UserError`` as one message without a
traceback and exits with code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in the input: the message says what was got, what was expected and what to do."""


def unknown_name(kind: str, got: str, names: Iterable[str]) -> UserError:
    """``UserError`` for a miss in a table of names: lists them all and suggests the closest."""
    valid = sorted(names)
    close = difflib.get_close_matches(got, valid, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UserError(f"unknown {kind} {got!r}; expected one of: {', '.join(valid)}.{hint}")
