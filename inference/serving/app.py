"""``create_app``: routes, error handling and the engine thread's life, put together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.serving.errors import Envelope, install_handlers
from inference.serving.jobs import JobStore
from inference.serving.routes import health, models, videos
from inference.serving.settings import Settings
from inference.serving.worker import EngineWorker


def create_app(engine: Engine, instance: ModelInstance, settings: Settings | None = None) -> FastAPI:
    """The server of one loaded model; its engine thread starts and stops with the app."""
    settings = Settings() if settings is None else settings
    store = JobStore(settings.max_kept)
    worker = EngineWorker(engine, instance, store, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            worker.stop()
            store.close()

    app = FastAPI(title="fastvideo-train", lifespan=lifespan)
    app.state.store, app.state.worker, app.state.started_at = store, worker, int(time.time())
    app.add_middleware(Envelope, max_body_bytes=settings.max_body_bytes)
    install_handlers(app)
    for family in (videos, models, health):
        app.include_router(family.router)
    return app
