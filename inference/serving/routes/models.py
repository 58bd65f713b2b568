"""``/v1/models``: the served card, with its digest, recipe and capabilities."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from cards.errors import unknown_name
from inference.serving.errors import ApiError

router = APIRouter(prefix="/v1/models", tags=["models"])


def _model(request: Request) -> dict[str, Any]:
    instance = request.app.state.worker.instance
    card = instance.card
    return {
        "id": card.name,
        "object": "model",
        "created": request.app.state.started_at,
        "owned_by": "fastvideo-train",
        "family": card.family,
        "size": card.size,
        "card_digest": card.digest,
        "weights_versions": instance.versions(),
        "capabilities": list(card.capabilities),
        "recipe": card.recipe.model_dump(mode="json"),
        "defaults": card.sampling.model_dump(mode="json"),
        "loops": {
            name: {"solver": loop.solver, "ladder": loop.schedule.ladder, "guidance": loop.guidance.scale}
            for name, loop in card.loops.items()
        },
        "max_frames_pixels_steps": request.app.state.worker.settings.work_limit(card),
    }


@router.get("")
async def list_models(request: Request) -> dict[str, Any]:
    """All models that requests may name."""
    return {"object": "list", "data": [_model(request)]}


@router.get("/{model_id:path}")
async def retrieve(model_id: str, request: Request) -> dict[str, Any]:
    """One model by name."""
    model = _model(request)
    if model_id != model["id"]:
        message = str(unknown_name("model", model_id, (model["id"],)))
        raise ApiError(message, status=404, param="model", code="model_not_found")
    return model
