"""Cards for people: ``python -m fastvideo_train.card show|diff|lineage <folder>...``.

Knows how a card is printed; what a lineage and a difference are is told by ``fastvideo_train.lineage``. Loads no
weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cards.errors import UserError, unknown_name
from fastvideo_train.cli import EXIT_OK, run_program

if TYPE_CHECKING:
    from rich.table import Table

    from cards.card import ModelCard

    Placed = tuple[str, ModelCard]

SHORT = 12
"""Digits of a digest that a table shows."""
WIDE = 4096
"""Characters a line where no terminal bounds it."""
BEFORE, AFTER = "before_", "after_"
"""Prefixes of a recipe's metrics."""
USAGE = """Show a card, the differences of two, or where one comes from.

usage: python -m fastvideo_train.card show <folder>... [json=true]
       python -m fastvideo_train.card diff <expected> <got> [json=true]
       python -m fastvideo_train.card lineage <folder> [<folder>...] [json=true]

  <folder>     export, run folder, plain diffusers folder or card name
  show         name, digest, parents, method, loops, components, metrics, parity, sampling
  diff         fields that the second says otherwise than the first
  lineage      the first one's chain of digests, nearest first; the others, the runs beside it and the registered cards
               give names to its parents
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after one message for a mistake in the command."""
    return run_program(_card, lambda: USAGE, argv)


def _card(argv: Sequence[str]) -> int:
    commands: dict[str, Callable[[list[Placed], bool], None]] = {"show": _show, "diff": _diff, "lineage": _lineage}
    if not argv:
        raise UserError(f"got no command, expected one of: {', '.join(commands)}")
    command, *rest = argv
    if command not in commands:
        raise unknown_name("command", command, commands)
    places, as_json = _arguments(rest)
    if command == "diff" and len(places) != 2:
        raise UserError(f"diff: got {len(places)} folder(s), expected two: the card that is expected, then the other")
    if not places:
        raise UserError(f"{command}: got no folder, expected an export, a run or diffusers folder, or a card name")
    commands[command](_load(places), as_json)
    return EXIT_OK


def _arguments(rest: Sequence[str]) -> tuple[list[str], bool]:
    """(folders, whether JSON is wanted); a folder may have "=" in its name."""
    places: list[str] = []
    as_json = False
    for argument in rest:
        key, equals, value = argument.partition("=")
        if not argument.startswith("-") and (not equals or Path(argument).exists()):
            places.append(argument)
        elif argument in ("json=true", "json=false"):
            as_json = value == "true"
        elif key == "json":
            raise UserError(f"json: got {value!r}, expected true or false")
        else:
            raise UserError(f"got {argument!r}: no such folder, and the only option is json=true")
    return places, as_json


def _load(places: Sequence[str]) -> list[Placed]:
    """The cards of all places; raises ``UserError`` that names every one that has none."""
    from inference.load import card_of  # loads torch: after the checks that need none

    cards: list[Placed] = []
    problems: list[str] = []
    for place in places:
        try:
            cards.append((place, card_of(place)))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return cards


def _print(*renderables: Any) -> None:
    """Tables as wide as they need to be where nobody's terminal bounds them."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDE)
    for renderable in renderables:
        console.print(renderable, markup=False) if isinstance(renderable, str) else console.print(renderable)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "digest")
    return table


def _row(table: Table, *cells: object) -> None:
    """Cells as they stand: a "[" in them is no markup."""
    from rich.text import Text

    table.add_row(*(Text(str(cell)) for cell in cells))


# -- show


def metrics_table(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """Metric -> ``before``, ``after`` and, where both are known, ``change``; ``value`` of one that is neither."""
    table: dict[str, dict[str, float]] = {}
    for name, value in sorted(metrics.items()):
        for prefix, column in ((BEFORE, "before"), (AFTER, "after")):
            if name.startswith(prefix):
                table.setdefault(name.removeprefix(prefix), {})[column] = value
                break
        else:
            table.setdefault(name, {})["value"] = value
    for row in table.values():
        if "before" in row and "after" in row:
            row["change"] = row["after"] - row["before"]
    return table


def _show(cards: list[Placed], as_json: bool) -> None:
    if as_json:
        _print_json([_summary(place, card) for place, card in cards])
        return
    for place, card in cards:
        _print(*_tables(place, card))


def _summary(place: str, card: ModelCard) -> dict[str, Any]:
    """The card as JSON: its own fields beside its digest, its metrics by when they were taken."""
    data = card.model_dump(mode="json")
    metrics = metrics_table(card.recipe.metrics)
    return {"place": place, "digest": card.digest, **data, "metrics": metrics}


def _tables(place: str, card: ModelCard) -> list[Table]:
    recipe, s, parity, precision = card.recipe, card.sampling, card.parity, card.precision
    about = _table(f"{card.name} ({place})", "", "")
    for name, value in (
        ("digest", card.digest),
        ("parents, nearest first", "\n".join(recipe.parents) if recipe.parents else "none"),
        ("method", recipe.method),
        ("data", recipe.data if recipe.data else "not said"),
        ("family, size", f"{card.family}, {card.size}"),
        ("source", f"{card.source.kind} {card.source.location}".rstrip()),
        ("tasks", ", ".join(card.programs)),
        ("precision", f"serve {precision.serve}, train {precision.train}, text padding {precision.text_padding}"),
        ("parity", f"{', '.join(parity.levels)}, {parity.output_determinism.replace('_', ' ')}"),
        ("tolerances", ", ".join(f"{level} {value:g}" for level, value in parity.tolerances.items())),
        ("sampling", f"{s.frames} frames of {s.width}x{s.height} at {s.fps:g} fps, {s.steps} steps"),
    ):
        _row(about, name, value)
    loops = _table("Loops", "loop", "kind", "semantics", "solver", "shift", "ladder", "guidance", "components")
    for lid, loop in card.loops.items():
        diffusion = loop.kind.startswith(("diffusion_", "chunk_"))
        ladder, guidance = loop.schedule.ladder, loop.guidance
        sampler = (
            loop.solver,
            f"{loop.schedule.shift:g}",
            "any grid" if ladder is None else ", ".join(f"{sigma:g}" for sigma in ladder),
            f"{guidance.scale:g} {guidance.policy} ({guidance.convention})",
        )
        bound = ", ".join(f"{part}: {cid}" for part, cid in loop.components.items())
        _row(loops, lid, loop.kind, loop.semantics, *(sampler if diffusion else ("-",) * 4), bound)
    parts = _table("Components", "component", "class", "dtype", "trained", "weights")
    for cid, component in card.components.items():
        weights = recipe.weights.get(cid)
        name = f"{component.library}.{component.class_name}"
        trained = "yes" if component.trainable else ""
        _row(parts, cid, name, component.dtype, trained, "as the source" if weights is None else weights[:SHORT])
    metrics = _table("Metrics", "metric", "before", "after", "change", "value")
    for name, row in metrics_table(recipe.metrics).items():
        _row(metrics, name, *(f"{row[c]:.4g}" if c in row else "" for c in ("before", "after", "change", "value")))
    return [about, loops, parts, *([metrics] if recipe.metrics else [])]


# -- diff


def _diff(cards: list[Placed], as_json: bool) -> None:
    from fastvideo_train.lineage import differences

    (left, expected), (right, got) = cards
    found = differences(expected, got)
    if as_json:
        _print_json(
            {
                "expected": {"place": left, "digest": expected.digest},
                "got": {"place": right, "digest": got.digest},
                "differences": [asdict(difference) for difference in found],
            }
        )
        return
    if not found:
        _print(f"{left} and {right} are the same card: {expected.digest}")
        return
    table = _table(f"{left} -> {right}", "field", f"expected ({left})", f"got ({right})")
    _row(table, "digest", expected.digest[:SHORT], got.digest[:SHORT])
    for difference in found:
        _row(table, difference.field, _said(difference.expected), _said(difference.got))
    _print(table)


def _said(value: Any) -> str:
    return "-" if value is None else json.dumps(value)


# -- lineage


def _lineage(cards: list[Placed], as_json: bool) -> None:
    from fastvideo_train.lineage import chain, known_cards

    place, card = cards[0]
    links = chain(card, known_cards(cards))
    if as_json:
        _print_json([asdict(link) for link in links])
        return
    table = _table(f"Lineage of {place}, nearest first", "digest", "name", "method", "metrics", "found in")
    for link in links:
        rows = metrics_table(dict(link.metrics))
        metrics = [
            f"{name} {' -> '.join(f'{row[c]:.4g}' for c in ('before', 'after', 'value') if c in row)}"
            for name, row in rows.items()
        ]
        if link.name is None:
            _row(table, link.digest, "not at hand")
            continue
        numerics = "" if link.numerics is None else f" ({link.numerics})"
        _row(table, link.digest, f"{link.name}{numerics}", link.method, "\n".join(metrics), link.place)
    _print(table)
    digests = {link.digest for link in links}
    strangers = [other for other, stranger in cards[1:] if stranger.digest not in digests]
    if strangers:
        _print(f"not in this lineage: {', '.join(strangers)}")


if __name__ == "__main__":
    sys.exit(main())
