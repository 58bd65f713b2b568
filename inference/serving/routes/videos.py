"""``/v1/videos``: create, retrieve, list, delete and content, as OpenAI's client calls them."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import FileResponse

from inference.serving.body import read_body
from inference.serving.errors import ApiError
from inference.serving.jobs import Job, JobStore, Status
from inference.serving.schema import VideoCreate, parse_order
from inference.serving.worker import EngineDown, EngineWorker, QueueFull

router = APIRouter(prefix="/v1/videos", tags=["videos"])
POLL_MS = (50, 5000)
"""Bounds of ``openai-poll-after-ms``; OpenAI's client keeps the first value that it hears."""
POLLS = 4
"""Polls that the remaining time is divided into."""
_SCHEMA = VideoCreate.model_json_schema()
_BODY = {
    "required": True,
    "content": {kind: {"schema": _SCHEMA} for kind in ("application/json", "multipart/form-data")},
}


def get_worker(request: Request) -> EngineWorker:
    return request.app.state.worker


def get_store(request: Request) -> JobStore:
    return request.app.state.store


def get_job(video_id: str, request: Request) -> Job:
    job = get_store(request).get(video_id)
    if job is None:
        raise ApiError(
            f"no video {video_id!r}; it was deleted, or dropped behind the last {get_store(request).max_kept}",
            status=404,
            param="video_id",
            code="video_not_found",
        )
    return job


@router.post("", openapi_extra={"requestBody": _BODY})
async def create(
    request: Request, worker: EngineWorker = Depends(get_worker), store: JobStore = Depends(get_store)
) -> dict[str, Any]:
    """Takes a request in; poll the video by its id."""
    card = worker.instance.card
    order = parse_order(await read_body(request), card, worker.settings)
    job = store.create(order, model=card.name, card_digest=card.digest)
    try:
        worker.enqueue(job)
    except QueueFull:
        wait = min(119, max(1, round(worker.seconds_to_free_slot())))
        raise ApiError(
            f"the queue is full ({worker.settings.max_queue} requests wait); try again in {wait} s",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(wait)},
        ) from None
    except EngineDown:
        raise ApiError(
            "the engine is not running; the server has to be restarted",
            status=503,
            code="engine_down",
            headers={"x-should-retry": "false"},
        ) from None
    store.add(job)
    return job.video()


@router.get("")
async def list_videos(
    after: str | None = None,
    limit: int = Query(20, ge=1, le=100),
    order: Literal["asc", "desc"] = "desc",
    store: JobStore = Depends(get_store),
) -> dict[str, Any]:
    """Videos by time of creation, a page at a time."""
    jobs, more = store.page(after=after, limit=limit, newest_first=order == "desc")
    return {
        "object": "list",
        "data": [job.video() for job in jobs],
        "has_more": more,
        "first_id": jobs[0].id if jobs else None,
        "last_id": jobs[-1].id if jobs else None,
    }


@router.get("/{video_id}")
async def retrieve(
    response: Response, job: Job = Depends(get_job), worker: EngineWorker = Depends(get_worker)
) -> dict[str, Any]:
    """The video as it is now. A failed or cancelled one is a 200 whose ``status`` is ``failed``."""
    if not job.finished:
        least, most = POLL_MS
        wait = 1000 * worker.seconds_left(job) / POLLS
        response.headers["openai-poll-after-ms"] = str(round(min(most, max(least, wait))))
    return job.video()


@router.delete("/{video_id}")
async def delete(
    job: Job = Depends(get_job), worker: EngineWorker = Depends(get_worker), store: JobStore = Depends(get_store)
) -> dict[str, Any]:
    """Forgets a finished video. An unfinished one is cancelled before its next step and stays as ``failed``."""
    if job.finished:
        store.remove(job)
    else:
        worker.cancel(job)
    return {"id": job.id, "object": "video.deleted", "deleted": True}


@router.get("/{video_id}/content", response_class=FileResponse)
async def content(job: Job = Depends(get_job), variant: Literal["video", "thumbnail"] = "video") -> FileResponse:
    """The mp4, or the first frame as a png; ranges are supported."""
    if job.status is not Status.COMPLETED:
        why = f"it failed: {job.error.message}" if job.error is not None else f"it is {job.status}, {job.progress} %"
        raise ApiError(f"video {job.id} has no content: {why}", param="video_id", code="video_not_ready")
    path = job.files[variant]
    kind = "video/mp4" if variant == "video" else "image/png"
    return FileResponse(path, media_type=kind, filename=path.name, content_disposition_type="inline")
