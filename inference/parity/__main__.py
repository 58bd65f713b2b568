"""``python -m inference.parity card=wan21``: runs the parity ladder of a card, an export or a library's folder.

Exit code 0 when every row holds, 1 when one breaks, 2 for a mistake in the arguments or the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cards.errors import UserError, unknown_name

OPTIONS = {
    "card": "a registered name (wan21), an export, a run folder, a diffusers or a transformers folder (required)",
    "device": "cpu or cuda (default: cpu)",
    "seed": "seed of the gate's requests (default: 0)",
}
USAGE = "usage: python -m inference.parity card=wan21 [device=cpu] [seed=0]\n\n" + "\n".join(
    f"  {name}=  {meaning}" for name, meaning in OPTIONS.items()
)


def parse(argv: Sequence[str]) -> dict[str, str]:
    """Options from ``key=value`` arguments; raises ``UserError``."""
    values: dict[str, str] = {}
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"got {argument!r}; options are written key=value\n{USAGE}")
        if name not in OPTIONS:
            raise unknown_name("option", name, OPTIONS)
        values[name] = value
    if "card" not in values:
        raise UserError(f"card= is missing: {OPTIONS['card']}\n{USAGE}")
    if not values.setdefault("seed", "0").isdecimal():
        raise UserError(f"seed: got {values['seed']!r}, expected a whole number >= 0")
    if values.setdefault("device", "cpu") not in ("cpu", "cuda"):
        raise UserError(f"device: got {values['device']!r}, expected cpu or cuda")
    return values


def check(options: dict[str, str]) -> bool:
    """Runs the ladder, prints its table and says whether every row holds."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from inference.load import card_of
    from inference.parity.ladder import run_ladder

    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise UserError("device: got cuda, but torch finds no GPU; use device=cpu")
    card = card_of(options["card"])
    table = Table(title=f"Parity of {card.name}", caption=f"card {card.digest[:12]}, device {options['device']}")
    table.add_column("level")
    table.add_column("what", overflow="fold")
    for column in ("max difference", "tolerance"):
        table.add_column(column, justify="right")
    table.add_column("pass")
    console = Console()
    passed = []
    with console.status("loading"):
        for report in run_ladder(card, options["device"], seed=int(options["seed"])):
            passed.append(report.passed)
            verdict = "[green]yes[/]" if report.passed else "[bold red]NO[/]"
            table.add_row(report.level, report.what, f"{report.difference:.1e}", f"{report.tolerance:.0e}", verdict)
    console.print(table)
    console.print(f"{sum(passed)} of {len(passed)} rows hold")
    return all(passed)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    try:
        return 0 if check(parse(arguments)) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
