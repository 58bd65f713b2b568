"""Print what `make demo` made: ``python scripts/demo_summary.py outputs/demo``.

Reads the run's summary.json and nothing else; fails when one of the files that the demo promises is not there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(run: Path) -> int:
    """Print the reward before and after and the paths of the report, the export and the video; exit status."""
    path = run / "summary.json"
    if not path.is_file():
        print(f"no {path}: expected the folder of a finished run; run `make demo`", file=sys.stderr)
        return 2
    summary = json.loads(path.read_text())
    before, after = (summary["eval"][when]["all_correct"] for when in ("before", "after"))
    files = {"report": run / "report.html", "export": Path(summary["export"]), "video": run / "demo.mp4"}
    print(f"{summary['method']}, seed {summary['seed']}: {summary['steps']} steps in {summary['seconds'] / 60:.1f} min")
    print(f"reward (held-out ShapeEval, all correct): {before:.3f} before -> {after:.3f} after ({after - before:+.3f})")
    for label, file in files.items():
        print(f"{label:<7} {file}")
    missing = [str(file) for file in files.values() if not file.exists()]
    if missing:
        print(f"missing: {', '.join(missing)}; see the output above for the step that failed", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/demo_summary.py <run folder>")
    sys.exit(main(Path(sys.argv[1])))
