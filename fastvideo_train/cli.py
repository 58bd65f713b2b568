"""``key=value`` command lines of the programs that are not Hydra apps: serve and generate.

A program declares its options as a pydantic model: names, types, defaults, one line of help each. Values of string
options are taken as they stand, so a prompt may hold colons, commas, quotes and ``${}``. Knows nothing about models;
importing it loads no heavy library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from cards.errors import UserError, unknown_name

if TYPE_CHECKING:
    import torch

EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number that every library below can hold."""


class Options(BaseModel):
    """Base of a program's options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(model: type[OptionsT], argv: Sequence[str]) -> OptionsT:
    """Options from ``key=value`` arguments; raises ``UserError`` that names every problem at once."""
    values: dict[str, str] = {}
    problems: list[str] = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals or key.startswith("-"):
            name = key.lstrip("-")
            example = f"{name if name in model.model_fields else next(iter(model.model_fields))}=..."
            problems.append(f"got {argument!r}; options are written key=value, for example {example}")
        elif key not in model.model_fields:
            problems.append(str(unknown_name("option", key, model.model_fields)))
        elif key in values:
            problems.append(f"{key} is given twice: {values[key]!r} and {value!r}")
        else:
            values[key] = value
    missing = [name for name, field in model.model_fields.items() if field.is_required() and name not in values]
    problems += [f"{name}= is missing: {model.model_fields[name].description}" for name in missing]
    try:
        options = model.model_validate(values)
    except ValidationError as error:
        for row in error.errors():
            name = str(row["loc"][0])
            if row["type"] != "missing":
                problems.append(f"{name}: got {row['input']!r}; {row['msg'].lower()}")
        options = None
    if problems or options is None:
        raise UserError("\n".join(problems))
    return options


def usage(model: type[Options], command: str, purpose: str, example: str) -> str:
    """Text of ``--help``: each option with its values, default and meaning."""
    rows = [(f"{name}={_values(field)}", _meaning(field)) for name, field in model.model_fields.items()]
    width = max(len(left) for left, _ in rows)
    lines = [f"  {left:<{width}}  {right}" for left, right in rows]
    return f"{purpose}\n\nusage: {command} key=value ...\n\n" + "\n".join(lines) + f"\n\nexample:\n  {example}\n"


def _values(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    kind = kinds[0] if kinds else annotation
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return {str: "TEXT", int: "INT", float: "NUMBER", bool: "true|false"}[kind]


def _meaning(field: FieldInfo) -> str:
    description = field.description if field.description is not None else ""
    if field.is_required():
        return f"{description} (required)"
    return description if field.default is None else f"{description} (default: {field.default})"


def run_program(body: Callable[[Sequence[str]], int], help_text: Callable[[], str], argv: Sequence[str] | None) -> int:
    """Exit code of a program: a ``UserError`` becomes one message on stderr and 2, ``--help`` prints the usage."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text())
        return EXIT_OK
    try:
        return body(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def check_place(out: str) -> Path:
    """The path of a file to write; raises ``UserError`` for a folder and for a place that cannot be written."""
    path = Path(out).expanduser()
    if path.is_dir():
        raise UserError(f"out: {out!r} is a folder, expected a file name")
    parent = path.absolute().parent
    ancestor = next(place for place in (parent, *parent.parents) if place.exists())
    if not ancestor.is_dir():
        raise UserError(f"out: {ancestor} is a file, so {out!r} cannot be written below it; give another folder")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UserError(f"out: no permission to write in {ancestor}; give another folder")
    return path


def pick_device(name: str) -> torch.device:
    """``auto`` is the first accelerator, else the CPU; raises ``UserError`` for a device that is not there."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    have = ["cpu"]
    if accelerator is not None:
        have += [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count()))]
    if name not in have:
        raise UserError(f"device: got {name!r}; this machine has {', '.join(have)}. Use one of them or device=auto")
    return torch.device(name)
