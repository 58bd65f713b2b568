"""A real uvicorn server on a free port, over a tiny random Wan folder."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def running_server(app: Any) -> Iterator[str]:
    """Base URL of an app while uvicorn serves it in a thread."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


@pytest.fixture(scope="session")
def load_app(wan_folder: Path) -> Callable[..., Any]:
    """Makes apps over the folder, each with weights of its own; keyword arguments are those of Settings."""

    def load(*, batching: str = "off", **bounds: Any) -> Any:
        from inference.engine import Engine
        from inference.serving.app import create_app
        from inference.serving.settings import Settings

        settings = Settings(**bounds)
        engine = Engine("cpu", batching=batching, budget=settings.budget())  # type: ignore[arg-type]
        return create_app(engine, engine.load(wan_folder), settings)

    return load


@pytest.fixture(scope="session")
def serve_app() -> Callable[[Any], Any]:
    return running_server


@pytest.fixture(scope="module")
def server(load_app: Callable[..., Any], serve_app: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """(base URL, app) with wide limits, for long requests."""
    app = load_app(max_work=400.0)
    with serve_app(app) as url:
        yield url, app


@pytest.fixture(scope="module")
def client(server: tuple[str, Any]) -> Iterator[Any]:
    """The official client on the server."""
    import openai

    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as made:
        yield made
