"""``/health``, ``/health/live``, ``/health/ready``, ``/status`` and ``/metrics``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse

from inference.serving.worker import EngineWorker

router = APIRouter(tags=["health"])


def _state(worker: EngineWorker) -> str:
    if not worker.alive:
        return "engine_down"
    return "stalled" if worker.stalled else "ok"


def _report(request: Request) -> dict[str, Any]:
    worker: EngineWorker = request.app.state.worker
    running, waiting = worker.counts
    return {
        "status": _state(worker),
        "model": worker.instance.card.name,
        "device": str(worker.engine.device),
        "running": running,
        "waiting": waiting,
    }


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """200 when requests are served; 503 when the engine thread has died or stalls."""
    report = _report(request)
    return JSONResponse(report, 200 if report["status"] == "ok" else 503)


@router.get("/health/live")
async def live(request: Request) -> JSONResponse:
    """200 unless only a restart helps."""
    report = _report(request)
    return JSONResponse(report, 503 if report["status"] == "engine_down" else 200)


@router.get("/status")
def status(request: Request) -> JSONResponse:
    """What the engine holds and what its steps cost, for operators and for routing between servers."""
    engine = request.app.state.worker.engine
    return JSONResponse({**_report(request), **engine.figures()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(request.app.state.worker.metrics.text(), media_type=CONTENT_TYPE_LATEST)
