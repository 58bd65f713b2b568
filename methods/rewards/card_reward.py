"""A reward card as a training reward: every sample is a request to the engine that also rolls out.

Knows requests and how their failures are masked. What a card computes is its own (``cards.reward``); frames, pictures
and forwards are the score loop's, so samples of equal shape share REWARD_BATCH forwards and a group's prompt is encoded
once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from cards.registry import family
from cards.source import check_source
from inference.artifact import Artifact
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request
from inference.resolve import resolve
from methods.rewards.reward import Reward, RewardBatch, Scores, attempt, clean

TASK = "score"
CARD_KEYS = ("name", "size", "source", "revision")
SCALE = "scale"


class CardReward(Reward):
    """exp(logit_scale) cos(picture, prompt) / divisor by a served card, mean over the card's pictures of a clip.

    Args:
        card: ``{name, size, source, revision}`` of a card with a score task; ``source`` is a folder or hub id.
        name: as logged.
        divisor: None leaves the card's; ``scale`` divides by exp(logit_scale), which leaves the cosine. The usual
            ones: CLIPScore 100 (arXiv 2104.08718), PickScore 26 (arXiv 2305.01569), HPSv2 ``scale`` (arXiv 2306.09341).
        frames: of a clip that are looked at; None leaves the card's.
    """

    learned = True

    def __init__(
        self,
        *,
        card: Mapping[str, Any],
        name: str = "card",
        divisor: float | Literal["scale"] | None = None,
        frames: int | None = None,
    ) -> None:
        self.name = name
        for key in card:
            if key not in CARD_KEYS:
                raise unknown_name(f"key of card for reward {name}", str(key), CARD_KEYS)
        if "name" not in card or "size" not in card:
            raise UserError(f"reward {name}: got card {dict(card)}, expected at least its name and size")
        if divisor not in (None, SCALE) and not _is_positive(divisor):
            raise UserError(f"reward {name}: divisor got {divisor!r}, expected a number above 0, {SCALE!r} or null")
        if frames is not None and frames < 1:
            raise UserError(f"reward {name}: frames got {frames}, expected 1 or more, or null for the card's")
        self.place = dict(card)
        self.divisor = divisor
        self.frames = frames
        self.version = f"1 {self.place} / {divisor}, frames {frames}"
        self._engine: Engine | None = None
        self._instance: ModelInstance | None = None

    def card(self) -> ModelCard:
        """The checked card; loads no weights."""
        options = {"source": None, "revision": None, **self.place}
        card = family(options["name"]).card(str(options["size"]), options["source"], options["revision"])
        if TASK not in card.programs:
            raise UserError(
                f"reward {self.name}: card {card.name!r} has the tasks {', '.join(sorted(card.programs))}, expected"
                f" {TASK!r}; use e.g. reward.card.name=reward"
            )
        card.validate()
        return card

    def cards(self) -> Mapping[str, ModelCard]:
        return {self.name: self.card()}

    def check(self) -> None:
        check_source(self.card(), (TASK,))

    def use_engine(self, engine: Engine) -> None:
        self._engine, self._instance = engine, None

    def prepare(self, device: str = "cpu") -> None:
        if self._engine is None:
            self._engine = Engine(device, batching="shape")
        if self._instance is None:
            self._instance = self._engine.load(self.card(), tasks=(TASK,))

    def score(self, batch: RewardBatch) -> Scores:
        self.prepare()
        assert self._engine is not None and self._instance is not None
        instance = self._instance
        requests, refused = attempt(self.name, len(batch), lambda i: self._request(batch, i, instance.card))
        asked = {row: request for row, request in enumerate(requests) if request is not None}
        artifacts, failed = self._run(list(asked.values()), self._engine, instance)
        values = np.full(len(batch), np.nan)
        for row, artifact in zip(asked, artifacts, strict=True):
            if artifact is not None and artifact.score is not None:
                values[row] = artifact.score.value
        return Scores(values=clean(values * self._rescaling(instance)), reasons=refused + failed)

    def _request(self, batch: RewardBatch, row: int, card: ModelCard) -> Request:
        video_FHWC: NDArray[np.uint8] = np.asarray(batch.videos_BFHWC[row])
        request = Request(
            prompt=batch.prompts[row],
            task=TASK,
            frames=self.frames,
            inputs={"pixels": torch.from_numpy(np.ascontiguousarray(video_FHWC))},
        )
        try:
            resolve(request, card)
        except UserError as error:  # of this sample alone: the options were checked
            raise ValueError(str(error)) from error
        return request

    def _run(
        self, requests: list[Request], engine: Engine, instance: ModelInstance
    ) -> tuple[list[Artifact | None], tuple[str, ...]]:
        """All together; where one of them fails, one by one, so that it costs no other its score."""
        try:
            return list(engine.run_interleaved(requests, instance)), ()
        except MemoryError:
            raise
        except Exception:  # find out whose fault it was
            return attempt(self.name, len(requests), lambda i: engine.run(requests[i], instance))

    def _rescaling(self, instance: ModelInstance) -> float:
        """From the card's divisor to ours."""
        score = instance.card.sampling.score
        assert score is not None
        if self.divisor is None:
            return 1.0
        if self.divisor == SCALE:
            loop = next(loop for loop in instance.card.loops.values() if loop.kind == TASK)
            clip: Any = instance.module(loop.components["scorer"])
            return score.divisor / clip.logit_scale.double().exp().item()
        return score.divisor / float(self.divisor)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
