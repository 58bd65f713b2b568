"""The command line of training: ``python train.py method=diffusion_nft card=wan21``.

Hydra composes, the checks run before anything is written, then the run starts here or in one process a device.
Nothing heavy is imported until a run starts, so ``--help`` and a typo answer at once.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from cards.errors import UserError, unknown_name
from fastvideo_train.paths import conf_dir

SHORT_KEYS = ("steps", "batch_size", "lr")
"""Top-level keys that set the method's argument of the same name."""
EXIT_USER_ERROR = 2
DRY_RUN = "dry_run"


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 a bug (with its traceback), 2 a mistake in the input."""
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
    def command(cfg: DictConfig) -> None:
        codes.append(run_job(cfg))

    # Hydra then raises its errors instead of printing them its own way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # "+key=" adds a key, and Hydra refuses it for one that is there; as a switch it is written either way.
    sys.argv[1:] = [arg.removeprefix("+") if arg.startswith(f"+{DRY_RUN}=") else arg for arg in sys.argv[1:]]
    try:
        command()
    except HydraException as error:
        print(f"error: {config_message(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    sys.exit(max(codes, default=0))


def config_message(error: HydraException) -> str:
    """Hydra's complaint in one paragraph, with the keys that exist where one does not."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(line for line in lines if not line.startswith(("provider=", "Config search path")))
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
        key = str(cause.full_key)
        where, _, name = key.rpartition(".")
        keys = [str(k) for k in cause.parent_node if k != "hydra"]
        return str(unknown_name(f"key in {where}" if where else "key", name, keys))
    return message


def run_job(cfg: DictConfig) -> int:
    """One job of a run or sweep; gives its exit code."""
    try:
        _start(cfg)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted; continue with resume=auto", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def apply_short_keys(cfg: DictConfig) -> None:
    """Copies ``steps=``, ``batch_size=`` and ``lr=`` to the method, and each rank's rows to the data module."""
    with open_dict(cfg):
        for key in SHORT_KEYS:
            if cfg[key] is not None:
                cfg.method[key] = cfg[key]
        cfg.data.batch_size = max(1, int(cfg.method.batch_size) // max(1, int(cfg.devices)))


def run_directory(cfg: DictConfig) -> Path:
    """``outputs/<run>``; without ``run=`` a name of method, card, size, seed and time; in a sweep one a job."""
    name = cfg.run
    sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if name is None:
        method = str(cfg.method._target_).rsplit(".", 2)[-2] if cfg.stages is None else "flywheel"
        name = f"{method}-{cfg.card.name}-{cfg.card.size}-s{cfg.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if sweep:
        name = f"{name}-{HydraConfig.get().job.num}"
    if not str(name) or Path(str(name)).name != str(name) or str(name).startswith("."):
        raise UserError(f"run: got {name!r}, expected a plain folder name")
    return Path(cfg.outputs) / str(name)


def _start(cfg: DictConfig) -> None:
    """A plan on paper, a run, or several in stages."""
    apply_short_keys(cfg)
    if cfg[DRY_RUN]:
        from fastvideo_train.dry_run import dry_run, print_plan

        print_plan(dry_run(cfg))
    elif cfg.stages is None:
        _run(cfg, run_directory(cfg))
    else:
        from fastvideo_train.flywheel import run_stages

        run_stages(cfg, run_directory(cfg), check=_check, run=_run)


def _check(cfg: DictConfig, run_dir: Path) -> None:
    from fastvideo_train.checks import check_run

    apply_short_keys(cfg)
    check_run(cfg, run_dir)


def _run(cfg: DictConfig, run_dir: Path) -> None:
    _check(cfg, run_dir)
    from fastvideo_train import launch, rundir

    rundir.prepare(run_dir, overwrite=cfg.overwrite)
    OmegaConf.resolve(cfg)
    config: Any = OmegaConf.to_container(cfg)
    rundir.write_text(run_dir / rundir.CONFIG_FILE, OmegaConf.to_yaml(cfg))
    launch.launch(config, str(run_dir))


if __name__ == "__main__":
    main()
