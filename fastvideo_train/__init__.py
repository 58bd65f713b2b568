"""fastvideo_train composes, launches, saves and exports; the maths and the engine live in the planes below it.

Importing it is cheap and checks one thing: that the planes (``cards``, ``loops``, ``inference``, ``methods``) are the
ones beside this package. They are top-level packages with common names, so another distribution, or a folder of that
name in the working directory, could take their place without a word.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

PLANES = ("cards", "loops", "inference", "methods")


class ShadowedPackageError(ImportError):
    """Another package is found where one of the planes is expected."""


def _found(package: str) -> Path | None:
    """Folder (or file) that ``import package`` would use now; ``None`` when there is none. Imports nothing."""
    loaded = sys.modules.get(package)
    spec = find_spec(package) if loaded is None else getattr(loaded, "__spec__", None)
    if spec is None:
        file = getattr(loaded, "__file__", None)
        origin = None if file is None else Path(file)
    elif spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    else:
        origin = None if spec.origin is None else Path(spec.origin)
    return origin.parent if origin is not None and origin.name == "__init__.py" else origin


def refuse_shadowed(root: Path) -> None:
    """Raise ``ShadowedPackageError`` unless each plane that can be found lies in ``root``, where this package lies."""
    for package in PLANES:
        found, expected = _found(package), root / package
        if found is not None and found.resolve() != expected.resolve():
            raise ShadowedPackageError(
                f"another package shadows {package!r}: got {found}, expected {expected}. "
                f"Uninstall or rename the other one, or put {root} first on PYTHONPATH "
                f"(and do not start from a folder that holds its own {package!r}).",
                name=package,
                path=str(found),
            )


refuse_shadowed(Path(__file__).resolve().parent.parent)
