"""``fastvideo_train.serve`` as a program: one process serves, then ends cleanly on SIGTERM; mistakes end early."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from fastvideo_train.serve import main


@pytest.mark.slow
def test_serves_and_exits_cleanly_on_sigterm(wan_folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fastvideo_train.serve", f"ckpt={wan_folder}", "port=0", "device=cpu", "max_work=400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving wan21-tiny"), line
        url = line.split()[-1]
        body = {"prompt": "a red circle", "num_inference_steps": 2, "num_frames": 5, "seed": 1}
        with httpx.Client(transport=httpx.HTTPTransport(retries=5), timeout=30) as http:
            video = http.post(f"{url}/videos", json=body).json()
            while http.get(f"{url}/videos/{video['id']}").json()["status"] != "completed":
                time.sleep(0.05)
            assert http.get(f"{url}/videos/{video['id']}/content").content[4:8] == b"ftyp"
            http.post(f"{url}/videos", json={**body, "num_inference_steps": 4000})  # still running at the signal
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr and "server_stopped" in stderr


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["prot=8000"], "Did you mean 'port'"),
        (["port=99999"], "port: got '99999'"),
        (["batching=maybe"], "'off' or 'shape'"),
        (["max_queue=0"], "max_queue: got '0'"),
        (["max_work=0"], "max_work: got '0'"),
        (["ckpt=/no/such/folder", "port=0"], "no such folder"),
        (["host=no.such.host.invalid", "port=0"], "cannot listen on no.such.host.invalid"),
        (["8000"], "key=value"),
    ],
)
def test_mistakes(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and expected in captured.err and captured.out == ""


def test_a_port_that_is_taken_is_found_before_weights_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main([f"ckpt={tmp_path}", f"port={port}"]) == 2  # tmp_path holds no model: not looked at yet
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
