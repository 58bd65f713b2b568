"""A vision-language model as a judge, through any endpoint that speaks OpenAI's chat completions.

Knows HTTP, frames as base64 images and how strictly an answer is read. A sample whose judge is late, fails or does not
answer with one number in range is masked and counted; it never becomes a number.

Legend: F frames, H W pixels.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from numpy.typing import NDArray

from cards.errors import UserError
from loops.score import spread
from methods.rewards.reward import Reward, RewardBatch, Scores, attempt, clean

QUESTION = (
    "These are frames of one video, in order. It was made for this prompt: {prompt!r}. How well does the video show"
    " what the prompt says, from {low:g} (not at all) to {high:g} (exactly)? Answer with one line and nothing else:\n"
    "SCORE: <number>"
)
_ANSWER = re.compile(r"SCORE:\s*([+-]?\d+(?:\.\d+)?)")
RETRIED = (408, 409, 425, 429)
"""HTTP statuses that another try may mend, beside all from 500."""
LONGEST_PAUSE = 60.0
"""Seconds."""


class JudgeError(RuntimeError):
    """No score for this sample."""


class VLMJudge(Reward):
    """The judge's number, brought to 0..1.

    Args:
        base_url: of the endpoint, such as ``http://localhost:8000/v1``.
        model: name that the endpoint knows the judge by.
        question: what is asked, with ``{prompt}``, ``{low}`` and ``{high}`` to be filled in; it must ask for a line
            ``SCORE: <number>``.
        low, high: range of the number; an answer outside it is no score.
        frames: frames to show, spread evenly; None = all of them.
        side: pixels that a frame's shorter side is enlarged to by whole factors, for judges that see little in small
            pictures; None leaves frames as they are.
        timeout: seconds for one answer.
        retries: further tries after a timeout, a broken connection or a status of 429 or 5xx.
        backoff: seconds before the first further try, doubled for each next one; a longer Retry-After counts instead.
        concurrency: requests under way at once.
        max_tokens: of an answer.
        api_key_env: environment variable that holds the key; one that is not set sends none.
        name: as logged.
    """

    learned = True

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        question: str = QUESTION,
        low: float = 0.0,
        high: float = 10.0,
        frames: int | None = 4,
        side: int | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 8,
        max_tokens: int = 32,
        api_key_env: str = "OPENAI_API_KEY",
        name: str = "vlm_judge",
    ) -> None:
        self.name = name
        parts = urlsplit(base_url)
        checks = (
            (
                parts.scheme in ("http", "https") and bool(parts.netloc),
                "base_url",
                base_url,
                "http(s)://host[:port]/v1",
            ),
            (math.isfinite(low) and math.isfinite(high) and low < high, "low, high", (low, high), "low < high"),
            (frames is None or frames >= 1, "frames", frames, "1 or more, or null for all"),
            (side is None or side >= 1, "side", side, "1 or more pixels, or null"),
            (timeout > 0, "timeout", timeout, "seconds above 0"),
            (retries >= 0, "retries", retries, "0 or more"),
            (backoff >= 0, "backoff", backoff, "seconds, 0 or more"),
            (concurrency >= 1, "concurrency", concurrency, "1 or more"),
            (max_tokens >= 1, "max_tokens", max_tokens, "1 or more"),
        )
        for fine, key, value, expected in checks:
            if not fine:
                raise UserError(f"reward {name}: {key} got {value!r}, expected {expected}")
        try:
            question.format(prompt="", low=low, high=high)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"reward {name}: question cannot be filled in ({type(error).__name__}: {error}); expected text with"
                " {prompt}, {low} and {high} in braces and no others"
            ) from error
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.model = model
        self.question = question
        self.low, self.high = float(low), float(high)
        self.frames = frames
        self.side = side
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.concurrency = concurrency
        self.max_tokens = max_tokens
        self.api_key_env = api_key_env
        self.version = f"1 {model} {low:g}..{high:g} frames {frames}: {question}"

    def score(self, batch: RewardBatch) -> Scores:
        key = os.environ.get(self.api_key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=self.concurrency)
        with (
            httpx.Client(headers=headers, timeout=self.timeout, limits=limits) as client,
            ThreadPoolExecutor(self.concurrency) as pool,
        ):
            waiting = [pool.submit(self._judge, client, batch, row) for row in range(len(batch))]
            results, reasons = attempt(self.name, len(batch), lambda i: waiting[i].result())
        return Scores(values=clean([np.nan if value is None else value for value in results]), reasons=reasons)

    def _judge(self, client: httpx.Client, batch: RewardBatch, row: int) -> float:
        number = read_score(self._ask(client, self._body(batch.videos_BFHWC[row], batch.prompts[row])))
        if not self.low <= number <= self.high:
            raise JudgeError(f"the judge answered {number:g}, expected {self.low:g} .. {self.high:g}")
        return (number - self.low) / (self.high - self.low)

    def _body(self, video_FHWC: NDArray[np.uint8], prompt: str) -> dict[str, Any]:
        video_FHWC = np.asarray(video_FHWC)
        if video_FHWC.ndim != 4 or video_FHWC.shape[-1] != 3 or 0 in video_FHWC.shape or video_FHWC.dtype != np.uint8:
            raise ValueError(
                f"got a video of shape {video_FHWC.shape} and dtype {video_FHWC.dtype}, expected (frames, height,"
                " width, 3) uint8"
            )
        asked = self.question.format(prompt=prompt, low=self.low, high=self.high)
        images = [data_uri(video_FHWC[i], self.side) for i in spread(len(video_FHWC), self.frames)]
        content = [{"type": "text", "text": asked}]
        content += [{"type": "image_url", "image_url": {"url": uri}} for uri in images]  # type: ignore[dict-item]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }

    def _ask(self, client: httpx.Client, body: Mapping[str, Any]) -> str:
        """The answer's text, with further tries where they may help."""
        for tried in range(self.retries + 1):
            pause = self.backoff * 2**tried
            try:
                response = client.post(self.url, json=body)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__} from {self.url}"
            else:
                if response.status_code == 200:
                    return answer_of(response)
                failure = f"HTTP {response.status_code} from {self.url}"
                if response.status_code not in RETRIED and response.status_code < 500:
                    raise JudgeError(f"{failure}: {response.text[:200]}")
                pause = max(pause, _seconds(response.headers.get("Retry-After")))
            if tried < self.retries:
                time.sleep(min(pause, LONGEST_PAUSE))
        raise JudgeError(f"{failure}, {self.retries + 1} tries")


def answer_of(response: httpx.Response) -> str:
    """The text of a chat completion; raises :class:`JudgeError` for anything else."""
    try:
        text = response.json()["choices"][0]["message"]["content"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError):
        raise JudgeError("the endpoint's answer is no chat completion") from None
    if not isinstance(text, str):
        raise JudgeError("the endpoint's answer holds no text")
    return text


def read_score(text: str) -> float:
    """The number of an answer that is one line ``SCORE: <number>`` and nothing else."""
    match = _ANSWER.fullmatch(text.strip())
    if match is None:
        raise JudgeError("the judge's answer is not one line 'SCORE: <number>'")
    return float(match[1])


def data_uri(frame_HWC: NDArray[np.uint8], side: int | None) -> str:
    """A frame as a base64 PNG, its pixels repeated until the shorter side has at least ``side`` of them."""
    from PIL import Image

    if side is not None:
        factor = math.ceil(side / min(frame_HWC.shape[:2]))
        frame_HWC = frame_HWC.repeat(factor, 0).repeat(factor, 1)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame_HWC)).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After header that gives seconds; 0 for a date, which servers of models do not send, and for none."""
    try:
        return max(0.0, float(retry_after)) if retry_after is not None else 0.0
    except ValueError:
        return 0.0
