"""Starts a run's processes: in this one for a single device, else one a device through torch's elastic launcher.

A run that was itself started by ``torchrun`` (its variables are in the environment) joins that job instead.
"""

from __future__ import annotations

import os
import uuid
from typing import Any


def launch(config: dict[str, Any], run_dir: str) -> None:
    """Runs the job to its end on ``config['devices']`` processes."""
    from fastvideo_train.run import run_worker

    devices = int(config["devices"])
    if devices == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        run_worker(config, run_dir)
        return
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        start_method="spawn",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    try:
        elastic_launch(options, run_worker)(config, run_dir)
    except ChildFailedError as failed:
        raise RuntimeError(f"a worker failed: {failed}") from None
