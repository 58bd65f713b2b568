"""The server: ``python -m fastvideo_train.serve ckpt=<export, run folder or card name> [port=8000]``.

Everything that can be wrong with the command is found before a weight loads, the port included. Knows the engine and
``inference.serving``; knows no training method.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from cards.errors import UserError
from fastvideo_train.cli import EXIT_OK, Options, parse_options, pick_device, run_program, usage

GRACE_SECONDS = 5
"""How long open connections may take after SIGTERM."""


class ServeOptions(Options):
    """Options of the server."""

    ckpt: str = Field("wan21", description="export, run folder, plain diffusers folder or card name")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:<index>")
    batching: Literal["off", "shape"] = Field(
        "off",
        description="shape merges equal steps of all requests: faster; results then agree within 1e-4 only",
    )
    policy: Literal["fair", "fifo", "deadline"] = Field(
        "fair", description="fair shares the device's seconds, fifo finishes the oldest first, deadline the most urgent"
    )
    compile: Literal["off", "regional", "graphs"] = Field(
        "off",
        description="torch.compile the transformer's blocks; graphs adds CUDA graphs. Needs a C++ compiler on CPU",
    )
    max_queue: int = Field(64, ge=1, description="requests that may wait; past it, 429")
    max_running: int = Field(8, ge=1, description="requests whose steps interleave")
    max_work: float = Field(16.0, gt=0, description="largest frames x pixels x steps of a request, in card defaults")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 after SIGTERM, 130 after Ctrl-C, 2 after one message for a mistake in the command."""
    return run_program(_serve, _usage, argv)


def _usage() -> str:
    return usage(
        ServeOptions,
        "python -m fastvideo_train.serve",
        "Serve a model over HTTP, with the routes of OpenAI's videos API.",
        "python -m fastvideo_train.serve ckpt=outputs/demo/export port=8000",
    )


def _serve(argv: Sequence[str]) -> int:
    options = parse_options(ServeOptions, argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)
    with _bind(options.host, options.port) as listener:
        from inference.engine import Engine  # loads torch: after the checks that need none
        from inference.load import card_of
        from inference.serving.settings import Settings

        card = card_of(options.ckpt)
        settings = Settings(max_queue=options.max_queue, max_running=options.max_running, max_work=options.max_work)
        engine = Engine(
            pick_device(options.device),
            batching=options.batching,
            policy=options.policy,
            budget=settings.budget(),
            costs=card.root,
        )
        instance = engine.load(card, tasks=tuple(card.programs))  # a server that listens is ready
        if options.compile != "off":
            from inference.compiling import compile_component

            for name, component in card.components.items():
                if component.kind == "transformer":
                    compile_component(instance, name, cuda_graphs=options.compile == "graphs")

        import uvicorn

        from inference.serving.app import create_app

        app = create_app(engine, instance, settings)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on"
        )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
        address = _address(listener)
        print(f"serving {card.name} ({card.digest[:12]}) on {engine.device} at {address}/v1", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
    return EXIT_OK


def _exit(signum: int, frame: Any) -> None:
    """While weights load, and again when uvicorn has shut down and raises what it caught."""
    sys.exit(EXIT_OK)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, which does not listen yet; raises ``UserError`` when the address is not free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with port=<number>, or port=0"
        ) from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
