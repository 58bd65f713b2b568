"""The VLM judge against a real local HTTP server that is slow, broken, or talks too much."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cards.errors import UserError
from methods.rewards.reward import RewardBatch
from methods.rewards.vlm_judge import VLMJudge, data_uri

Answer = Callable[[dict[str, Any], int], tuple[int, Any, dict[str, str]]]
"""(request body, how often this prompt was asked before) -> status, answer, headers."""


class Server(ThreadingHTTPServer):
    """Speaks as the test's ``answer`` says and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Answer = lambda body, times: (200, said("SCORE: 5"), {})
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.asked: dict[str, int] = {}
        self.lock = threading.Lock()
        self.under_way = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        prompt = body["messages"][0]["content"][0]["text"]
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            times = server.asked.get(prompt, 0)
            server.asked[prompt] = times + 1
            server.under_way += 1
            server.most = max(server.most, server.under_way)
        status, answer, headers = server.answer(body, times) if self.path == "/v1/chat/completions" else (404, {}, {})
        with server.lock:
            server.under_way -= 1
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client stopped waiting

    def log_message(self, *args: Any) -> None:
        pass


def said(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def judge_at(server: Server, **options: Any) -> VLMJudge:
    fast = {"question": "{prompt}", "backoff": 0.0, "retries": 2, "timeout": 5.0}
    return VLMJudge(base_url=server.url, model="judge", **{**fast, **options})


def batch(*prompts: str, frames: int = 5) -> RewardBatch:
    videos = np.stack([np.full((frames, 4, 6, 3), 10 * i, np.uint8) for i in range(len(prompts))])
    videos += np.arange(frames, dtype=np.uint8)[None, :, None, None, None]
    return RewardBatch(videos_BFHWC=videos, prompts=list(prompts), metadata=[{} for _ in prompts])


def pixels(uri: str) -> np.ndarray:
    head, _, data = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_frames_and_prompt_are_sent_and_the_number_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    server.answer = lambda body, times: (
        200,
        said({"a": "SCORE: 2.5", "b": " score".upper() + ": 10\n"}[_prompt(body)]),
        {},
    )
    reward = judge_at(server, low=0, high=10, frames=2, side=10, api_key_env="MY_KEY")
    scores = reward.score(batch("a", "b"))
    np.testing.assert_array_equal(scores.values, [0.25, 1.0])
    assert scores.failed == 0 and set(server.keys) == {"Bearer s3cret"}
    body = next(body for body in server.bodies if _prompt(body) == "b")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.0, 32)
    images = [pixels(part["image_url"]["url"]) for part in body["messages"][0]["content"][1:]]
    assert [image.shape for image in images] == [(12, 18, 3)] * 2  # repeated thrice: the shorter side reaches 10
    assert [int(image[0, 0, 0]) for image in images] == [10 + 1, 10 + 3]  # frames 1 and 3 of 5


def test_the_question_holds_the_original_prompt_and_the_range(server: Server) -> None:
    VLMJudge(base_url=server.url + "/", model="m", low=1, high=5).score(batch("a red circle"))
    text = server.bodies[0]["messages"][0]["content"][0]["text"]
    assert "'a red circle'" in text and "from 1 (" in text and "to 5 (" in text
    assert server.keys == [None]  # no key in the environment, none sent


@pytest.mark.parametrize(
    "answer",
    [
        said("I would say 7"),
        said("SCORE: 7 of 10"),
        said("SCORE: 7\nSCORE: 8"),
        said("The clip is fine.\nSCORE: 7"),
        said("SCORE: nan"),
        said("SCORE: 1e1"),
        said("SCORE: 11"),
        said("SCORE: -1"),
        said(""),
        said(None),
        {"choices": []},
        {"error": "out of memory"},
        [],
        b"<html>gateway</html>",
        b"\xff\xfe",
    ],
)
def test_garbage_is_masked_and_not_asked_again(server: Server, answer: Any) -> None:
    server.answer = lambda body, times: (200, said("SCORE: 4") if _prompt(body) == "fine" else answer, {})
    scores = judge_at(server).score(batch("fine", "bad"))
    np.testing.assert_array_equal(scores.values, [0.4, np.nan])
    assert scores.failed == 1 and len(scores.reasons) == 1
    assert server.asked == {"fine": 1, "bad": 1}


def test_a_server_that_recovers_is_asked_again(server: Server) -> None:
    server.answer = lambda body, times: (
        (200, said("SCORE: 3"), {}) if times == 2 else ((503, 429)[times], {}, {"Retry-After": "0"})
    )
    np.testing.assert_array_equal(judge_at(server).score(batch("a")).values, [0.3])
    assert server.asked == {"a": 3}


def test_a_server_that_does_not_is_masked_with_its_reason(server: Server) -> None:
    server.answer = lambda body, times: (500, {}, {}) if _prompt(body) == "a" else (400, {"error": "no images"}, {})
    scores = judge_at(server).score(batch("a", "b"))
    assert scores.failed == 2
    assert f"HTTP 500 from {server.url}/chat/completions, 3 tries" in scores.reasons[0]
    assert "HTTP 400" in scores.reasons[1] and "no images" in scores.reasons[1]
    assert server.asked == {"a": 3, "b": 1}  # what asks wrongly is not asked again


def test_tries_wait_longer_each_time_and_as_long_as_they_are_told(server: Server) -> None:
    server.answer = lambda body, times: (500, {}, {})
    began = time.monotonic()
    judge_at(server, backoff=0.1).score(batch("a"))
    assert 0.3 <= time.monotonic() - began < 5  # 0.1 and 0.2 seconds
    server.answer = lambda body, times: (429, {}, {"Retry-After": "0.4"})
    began = time.monotonic()
    judge_at(server, retries=1).score(batch("b"))
    assert time.monotonic() - began >= 0.4


def test_a_late_answer_is_masked_and_costs_no_other(server: Server) -> None:
    scored = threading.Event()

    def answer(body: dict[str, Any], times: int) -> tuple[int, Any, dict[str, str]]:
        if _prompt(body) == "slow":
            scored.wait(30)
        return 200, said("SCORE: 6"), {}

    server.answer = answer
    scores = judge_at(server, timeout=2.0, retries=0).score(batch("slow", "quick"))
    scored.set()
    np.testing.assert_array_equal(scores.values, [np.nan, 0.6])
    assert "ReadTimeout" in scores.reasons[0]


def test_nobody_there(server: Server) -> None:
    url = "http://127.0.0.1:9/v1"
    scores = VLMJudge(base_url=url, model="m", retries=1, backoff=0.0).score(batch("a"))
    assert scores.failed == 1 and "ConnectError" in scores.reasons[0]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_at_once_than_allowed(server: Server, concurrency: int) -> None:
    def answer(body: dict[str, Any], times: int) -> tuple[int, Any, dict[str, str]]:
        time.sleep(0.05)
        return 200, said(f"SCORE: {_prompt(body)}"), {}

    server.answer = answer
    scores = judge_at(server, concurrency=concurrency).score(batch(*(str(i) for i in range(8))))
    np.testing.assert_allclose(scores.values, np.arange(8) / 10)  # in the order of the samples
    assert server.most == concurrency if concurrency == 1 else 1 < server.most <= concurrency


def test_a_broken_clip_is_masked_without_a_request(server: Server) -> None:
    broken = RewardBatch(videos_BFHWC=[np.zeros((2, 4, 4), np.uint8)], prompts=["a"], metadata=[{}])
    assert judge_at(server).score(broken).failed == 1
    assert server.bodies == []


def test_a_frame_is_sent_as_it_is() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    np.testing.assert_array_equal(pixels(data_uri(frame, None)), frame)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url got 'localhost:8000'"),
        ({"low": 3.0, "high": 3.0}, "low, high got"),
        ({"timeout": 0}, "timeout got 0"),
        ({"retries": -1}, "retries got -1"),
        ({"concurrency": 0}, "concurrency got 0"),
        ({"frames": 0}, "frames got 0"),
        ({"question": "{colour}?"}, "question cannot be filled in"),
    ],
)
def test_misconfiguration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="reward vlm_judge") as error:
        VLMJudge(**{"base_url": "http://h/v1", "model": "m", **options})
    assert message in str(error.value)


def _prompt(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"][0]["text"]
