"""Weights & Biases: online when logged in, offline otherwise, never a prompt, never a line of its own on the terminal.

Knows whether W&B can be reached with a name, and how Lightning's ``WandbLogger`` is started quietly under the run's
folder. ``wandb`` is imported when a run starts, not before. An offline run costs about a second to start (measured:
0.4 s import, 0.5 s start) and 1 ms a step; ``wandb sync <run>/wandb/offline-run-*`` uploads it later.
"""

from __future__ import annotations

import logging
import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from cards.errors import UserError, unknown_name
from inference.media import write_bytes_atomic

log = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled"]
KINDS = ("csv", "none", "wandb")
MODES = ("auto", "online", "offline", "disabled")
PUBLIC_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # the service's old and new address
STEP_AXIS = "trainer/global_step"  # Lightning's name for it
START_SECONDS = 30.0  # how long an online start may take before the run goes on offline
_KEYS = ("kind", "mode", "project", "name", "entity", "group", "tags")
_ENVIRONMENT = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}


class Tracker:
    """One W&B run; rank 0 only. ``mode`` says what it became: online or offline."""

    def __init__(self, logger: Any, mode: Mode) -> None:
        self.logger = logger  # Lightning's WandbLogger, its run started
        self.mode = mode

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one step; ``trainer/global_step`` is the x axis."""
        self.logger.log_metrics(dict(metrics), step)

    def log_videos(self, step: int, key: str, paths: Sequence[str | Path], captions: Sequence[str]) -> None:
        """Clips from mp4 files, shown together under ``key``."""
        if len(paths) != len(captions):
            raise ValueError(f"got {len(paths)} videos and {len(captions)} captions; expected one each")
        if paths:
            formats = ["mp4"] * len(paths)
            self.logger.log_video(key, [str(path) for path in paths], step, caption=list(captions), format=formats)

    def finish(self) -> None:
        """Write what is still in memory and end the run."""
        self.logger.experiment.finish()


def make_tracker(logger: Mapping[str, Any], *, run_dir: str | Path, config: Any) -> Tracker | None:
    """The tracker that a node of conf/logger/ asks for; None when it asks for files only.

    Args:
        logger: ``kind`` (wandb, csv, none); for wandb also ``mode, project, name, entity, group, tags``.
        run_dir: W&B's files go to ``<run_dir>/wandb``.
        config: the resolved configuration, shown with the run.
    """
    for key in logger:
        if key not in _KEYS:
            raise unknown_name("logger key", str(key), _KEYS)
    kind = str(logger.get("kind"))
    if kind not in KINDS:
        raise unknown_name("logger kind", kind, KINDS)
    if kind != "wandb":
        return None
    mode = resolve_mode(str(logger.get("mode", "auto")))
    if mode == "disabled":
        return None
    where = {key: logger[key] for key in ("project", "name", "entity", "group", "tags") if logger.get(key) is not None}
    try:
        return Tracker(wandb_logger(run_dir, mode=mode, config=config, **where), mode)
    except Exception as error:  # no network, or a key that is no longer good: a run must not die of its logger
        if mode == "offline":
            raise
        import wandb

        wandb.teardown()  # the half-started run holds its id
        log.warning("W&B cannot be reached, so this run is kept offline (`wandb sync` uploads it later): %s", error)
        return Tracker(wandb_logger(run_dir, mode="offline", config=config, **where), "offline")


def resolve_mode(asked: str = "auto", environ: Mapping[str, str] = os.environ) -> Mode:
    """What W&B will do: the configuration's word, else ``WANDB_MODE``'s, else online when logged in, else offline.

    Raises:
        UserError: the configuration asks for online and nobody is logged in; or a mode that does not exist.
    """
    if asked not in MODES:
        raise unknown_name("logger mode", asked, MODES)
    if asked == "online" and not logged_in(environ):
        raise UserError("logger.mode: got online, but W&B has no key here; run `wandb login`, or leave mode=auto")
    wanted = asked
    if asked == "auto":
        name = environ.get("WANDB_MODE", "online").lower()
        if name not in _ENVIRONMENT:
            raise unknown_name("WANDB_MODE", name, _ENVIRONMENT)
        wanted = _ENVIRONMENT[name]
    if wanted == "online":
        return "online" if logged_in(environ) else "offline"
    return "offline" if wanted == "offline" else "disabled"


def logged_in(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a key is at hand: ``WANDB_API_KEY``, or the netrc file's entry for the server."""
    if environ.get("WANDB_API_KEY"):
        return True
    own = environ.get("WANDB_BASE_URL")
    hosts = PUBLIC_HOSTS if own is None else (urlparse(own).netloc,)
    home = Path(environ.get("HOME", "~")).expanduser()
    files = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for file in files:
        try:
            entries = netrc.netrc(file)
        except (OSError, netrc.NetrcParseError):
            continue
        if any((entry := entries.authenticators(host)) is not None and entry[2] for host in hosts):
            return True
    return False


def wandb_logger(
    run_dir: str | Path,
    *,
    mode: Literal["online", "offline"],
    config: Any = None,
    project: str = "fastvideo-train",
    name: str | None = None,
    entity: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
) -> Any:
    """Lightning's ``WandbLogger`` on a run that is started here, silent, under ``<run_dir>/wandb``.

    A run that resumes finds its W&B id in ``wandb/run-id.txt`` and continues it.
    """
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    run_dir = Path(run_dir)
    run = wandb.init(
        project=project,
        name=run_dir.name if name is None else name,
        entity=entity,
        group=group,
        tags=list(tags),
        config=config,
        dir=run_dir,
        id=_run_id(run_dir),
        resume="allow" if mode == "online" else None,
        mode=mode,
        settings=wandb.Settings(
            silent=True,
            console="off",  # stdout and stderr stay ours
            init_timeout=START_SECONDS,
            disable_git=True,  # no code and no diff leaves the machine
            save_code=False,
        ),
    )
    # As WandbLogger does for a run of its own; a resumed run may log a step again, which W&B's own counter forbids.
    run.define_metric(STEP_AXIS)
    run.define_metric("*", step_metric=STEP_AXIS, step_sync=True)
    return WandbLogger(project=project, save_dir=run_dir, experiment=run)


def _run_id(run_dir: Path) -> str:
    path = run_dir / "wandb" / "run-id.txt"
    if not path.is_file():
        write_bytes_atomic(path, secrets.token_hex(4).encode())
    return path.read_text().strip()
