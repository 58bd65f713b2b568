"""Where the repository's own files lie, in a checkout and in an installed wheel. Knows nothing of runs and outputs."""

from __future__ import annotations

from pathlib import Path

from cards.errors import UserError


def conf_dir() -> Path:
    """Absolute path of Hydra's configuration folder.

    A wheel carries it inside the package; a checkout has it beside the package. The wheel's place is looked at first:
    a ``conf`` beside an installed package would be a stranger's.
    """
    package = Path(__file__).resolve().parent
    places = (package / "conf", package.parent / "conf")
    for place in places:
        if (place / "train.yaml").is_file():
            return place
    raise UserError(
        f"no configuration folder: expected a train.yaml in {places[0]} (installed) or {places[1]} (checkout). "
        "Reinstall the package, or restore conf/ in the checkout."
    )
