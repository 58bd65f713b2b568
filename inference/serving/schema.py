"""The wire's ``POST /v1/videos`` -> an engine request, and a job -> the video object.

Field names are OpenAI's where it has them, those of image servers (``num_inference_steps``, ``guidance_scale``) else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from cards.geometry import Geometry
from inference.request import Request, ResolvedRequest
from inference.resolve import resolve
from inference.serving.errors import ApiError
from inference.serving.settings import Settings

SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
CONDITIONING = ("input_reference",)
"""Fields of the API that ask for more than text to video."""


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("got true or false, expected a number")
    return value


Whole = Annotated[int, BeforeValidator(_not_bool), Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]


class VideoCreate(BaseModel):
    """Body of ``POST /v1/videos``; fields left out take the model's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str = Field(min_length=1, description="what to show")
    model: str | None = Field(None, description="name of the served model, as /v1/models lists it")
    seconds: Number | None = Field(None, gt=0, le=3600, description="length; the nearest that the model can make")
    size: str | None = Field(None, description="WIDTHxHEIGHT in pixels")
    num_frames: Whole | None = Field(None, description="length in frames, instead of seconds")
    fps: Number | None = Field(None, gt=0, le=240, description="frames a second of the file")
    num_inference_steps: Whole | None = Field(None, description="solver steps")
    guidance_scale: Number | None = Field(None, description="classifier-free guidance; 1 = conditional only")
    guidance_policy: str | None = Field(None, description="sequential or batched")
    negative_prompt: str | None = None
    seed: Whole | None = Field(None, description="left out: a fresh random one, reported in the video object")
    solver: str | None = None
    shift: Number | None = Field(None, description="flow shift")
    refine: bool | None = Field(None, description="false gives a model that rewrites prompts this one as it is")
    temperature: Number | None = Field(None, description="of the rewriting; 0 takes the most likely words")
    max_tokens: Whole | None = Field(None, description="length of the rewritten prompt, at most")


@dataclass(frozen=True)
class Order:
    """A checked request of a client."""

    resolved: ResolvedRequest
    fps: float
    """Frames a second of the file."""

    @property
    def seconds(self) -> float:
        return self.resolved.params.frames / self.fps


def parse_order(fields: dict[str, Any], card: ModelCard, settings: Settings) -> Order:
    """Checks a body against the API, the model and the server's bounds; raises :class:`ApiError`."""
    for name in CONDITIONING:
        if fields.pop(name, None) not in (None, ""):
            raise ApiError(
                f"{name}: {card.name} cannot take it; it can do: {', '.join(card.capabilities)}",
                param=name,
                code="unsupported",
            )
    body = _validated(fields)
    if body.model is not None and body.model != card.name:
        raise ApiError(
            str(unknown_name("model", body.model, (card.name,))), status=404, param="model", code="model_not_found"
        )
    for name, text in (("prompt", body.prompt), ("negative_prompt", body.negative_prompt)):
        if text is not None and len(text) > settings.max_prompt_chars:
            raise ApiError(
                f"{name}: got {len(text)} characters, expected at most {settings.max_prompt_chars}", param=name
            )
    width, height = (None, None) if body.size is None else _size(body.size)
    fps = card.sampling.fps if body.fps is None else body.fps
    request = Request(
        prompt=body.prompt,
        negative_prompt=body.negative_prompt,
        seed=body.seed,
        frames=_frames(body, fps, card.geometry),
        height=height,
        width=width,
        steps=body.num_inference_steps,
        guidance=body.guidance_scale,
        guidance_policy=body.guidance_policy,
        solver=body.solver,
        shift=body.shift,
        refine=body.refine,
        temperature=body.temperature,
        max_tokens=body.max_tokens,
    )
    try:
        order = Order(resolve(request, card), fps)
    except UserError as error:
        raise ApiError(str(error)) from None
    _check_work(order, card, settings)
    return order


def _validated(fields: dict[str, Any]) -> VideoCreate:
    unknown = [name for name in fields if name not in VideoCreate.model_fields]
    if unknown:
        message = "; ".join(str(unknown_name("field", name, VideoCreate.model_fields)) for name in unknown[:8])
        raise ApiError(message, param=unknown[0], code="unknown_parameter")
    try:
        return VideoCreate.model_validate(fields)
    except ValidationError as error:
        rows = [(str(row["loc"][0]), row["msg"]) for row in error.errors()]
        raise ApiError("; ".join(f"{name}: {text}" for name, text in rows), param=rows[0][0]) from None


def _size(text: str) -> tuple[int, int]:
    match = SIZE.fullmatch(text)
    if match is None:
        raise ApiError(f"size: got {text!r}, expected WIDTHxHEIGHT in pixels, such as 64x32", param="size")
    return int(match[1]), int(match[2])


def _frames(body: VideoCreate, fps: float, geometry: Geometry) -> int | None:
    """Frames of the clip; for a length in seconds, the nearest count that the VAE can hold."""
    if body.seconds is None:
        return body.num_frames
    if body.num_frames is not None:
        raise ApiError("got both seconds and num_frames; give one of them", param="num_frames")
    return max(0, round((body.seconds * fps - 1) / geometry.temporal)) * geometry.temporal + 1


def _check_work(order: Order, card: ModelCard, settings: Settings) -> None:
    p = order.resolved.params
    work, limit = p.frames * p.height * p.width * p.steps, settings.work_limit(card)
    if work > limit:
        raise ApiError(
            f"{p.frames} frames x {p.width}x{p.height} pixels x {p.steps} steps = {work} is more than this server "
            f"takes ({limit}); ask for fewer frames, pixels or steps, or start it with a larger max_work",
            code="request_too_large",
        )
