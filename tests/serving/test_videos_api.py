"""The server through the official ``openai`` client and plain HTTP: jobs, bounds, cancellation, equal results."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")

FAST = {"num_inference_steps": 3, "num_frames": 5, "seed": 1}
LONG = {"num_inference_steps": 4000, "num_frames": 5}
"""Minutes of steps: never finished in a test."""


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true in time"
        time.sleep(0.005)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/videos", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.json()


def finished(url: str, video: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}

    def done() -> bool:
        state.update(httpx.get(f"{url}/v1/videos/{video['id']}").json())
        return state["status"] in ("completed", "failed")

    wait_for(done)
    return state


def content(url: str, video: dict[str, Any], **params: str) -> bytes:
    reply = httpx.get(f"{url}/v1/videos/{video['id']}/content", params=params)
    assert reply.status_code == 200, reply.text
    return reply.content


# -- the official client


def test_the_official_client_creates_polls_and_downloads(client: Any, tmp_path: Path) -> None:
    from inference.media import read_video

    extra = {"num_inference_steps": 3, "guidance_scale": 2.5, "seed": 5, "fps": 4, "solver": "euler"}
    video = client.videos.create_and_poll(prompt="a red circle", size="24x16", seconds="2", extra_body=extra)
    assert video.status == "completed" and video.progress == 100 and video.error is None
    assert video.size == "24x16" and video.prompt == "a red circle" and video.completed_at >= video.created_at
    assert video.seconds == "2.25"  # 2 s at 4 fps is 8 frames; 9 is the nearest 4k + 1
    assert (video.num_frames, video.fps, video.seed, video.solver, video.guidance_scale) == (9, 4, 5, "euler", 2.5)
    assert len(video.card_digest) == 64 and video.weights_versions["transformer"] == 0
    path = tmp_path / "x.mp4"
    client.videos.download_content(video.id).write_to_file(path)
    frames, fps = read_video(path)
    assert frames.shape == (9, 16, 24, 3) and fps == pytest.approx(4)
    picture = tmp_path / "x.png"
    client.videos.download_content(video.id, variant="thumbnail").write_to_file(picture)
    still, _ = read_video(picture)
    assert still.shape == (1, 16, 24, 3)
    assert np.abs(still[0].astype(int) - frames[0]).mean() < 24  # the same picture but for H.264


def test_the_official_client_retrieves_lists_and_deletes(client: Any) -> None:
    import openai

    made = [client.videos.create(prompt=f"a {n}", extra_body=FAST).id for n in range(5)]
    for video_id in made:
        assert client.videos.poll(video_id).status == "completed"
    assert client.videos.retrieve(made[0]).prompt == "a 0"
    ascending = [video.id for video in client.videos.list(limit=2, order="asc")]  # pages by last_id
    assert [i for i in ascending if i in made] == made and len(set(ascending)) == len(ascending)
    descending = [video.id for video in client.videos.list(limit=2)]
    assert descending == ascending[::-1]
    page = client.videos.list(after=made[1], limit=2, order="asc")
    assert [video.id for video in page.data] == made[2:4] and page.has_more
    deleted = client.videos.delete(made[1])
    assert (deleted.id, deleted.deleted, deleted.object) == (made[1], True, "video.deleted")
    with pytest.raises(openai.NotFoundError) as caught:
        client.videos.retrieve(made[1])
    assert caught.value.code == "video_not_found" and caught.value.request_id
    assert client.videos.list(after=made[1], limit=1, order="asc").data[0].id == made[2]  # paging survives deletion


def test_the_official_client_lists_models(client: Any, wan_folder: Path) -> None:
    import openai

    from inference.load import card_of

    card = card_of(wan_folder)
    (model,) = client.models.list().data
    assert model.id == card.name and model.card_digest == card.digest
    assert model.capabilities == ["text_to_video"] and model.recipe["method"] == "pretrained"
    assert client.models.retrieve(card.name).id == card.name
    with pytest.raises(openai.NotFoundError, match="expected one of"):
        client.models.retrieve("sora-2")


def test_errors_reach_the_official_client_typed(client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="Did you mean 'num_inference_steps'") as caught:
        client.videos.create(prompt="a", extra_body={"num_inference_step": 3, "lora": {"name": "x"}})
    assert caught.value.code == "unknown_parameter" and caught.value.param == "num_inference_step"
    assert "unknown field 'lora'" in str(caught.value)
    with pytest.raises(openai.NotFoundError, match="unknown model 'sora-2'"):
        client.videos.create(prompt="a", model="sora-2")
    with pytest.raises(openai.BadRequestError, match="it can do: text_to_video"):
        client.videos.create(prompt="a", input_reference=b"image bytes")
    with pytest.raises(openai.BadRequestError, match="Field required"):
        client.videos.create(extra_body=FAST, prompt=openai.omit)


# -- equal results


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_a_served_video_equals_the_generated_file(
    server: tuple[str, Any], wan_folder: Path, tmp_path: Path, guidance: float
) -> None:
    from fastvideo_train.generate import main

    out = tmp_path / "x.mp4"
    argv = ["prompt=a red circle", "steps=4", f"guidance={guidance}", "seed=9", "device=cpu"]
    assert main([f"ckpt={wan_folder}", *argv, f"out={out}"]) == 0
    video = post(
        server[0],
        {"prompt": "a red circle", "num_inference_steps": 4, "guidance_scale": guidance, "seed": 9},
    )
    assert finished(server[0], video)["status"] == "completed"
    assert content(server[0], video) == out.read_bytes()


def test_requests_at_once_give_what_each_gives_alone(server: tuple[str, Any]) -> None:
    url, app = server
    bodies = [
        {"prompt": "a red circle", "num_inference_steps": 40, "seed": 1, "guidance_scale": 5},
        {"prompt": "a blue square", "num_inference_steps": 30, "seed": 2, "guidance_scale": 1},
        {"prompt": "a green triangle", "num_inference_steps": 40, "seed": 3, "solver": "euler", "num_frames": 5},
    ]
    alone = []
    for body in bodies:
        video = post(url, body)
        assert finished(url, video)["status"] == "completed"
        alone.append(content(url, video))
    together = [post(url, body) for body in bodies]
    wait_for(lambda: app.state.worker.counts[0] >= 2)  # their steps do interleave
    for video, expected in zip(together, alone, strict=True):
        assert finished(url, video)["status"] == "completed"
        assert content(url, video) == expected


def test_json_and_multipart_are_the_same_request(server: tuple[str, Any]) -> None:
    url, _ = server
    fields = {"prompt": "a red circle", "num_inference_steps": 3, "guidance_scale": 2.5, "seed": 4, "num_frames": 5}
    as_json = post(url, fields)
    parts = {name: (None, str(value)) for name, value in fields.items()}
    as_form = httpx.post(f"{url}/v1/videos", files=parts).json()
    as_url = httpx.post(f"{url}/v1/videos", data={k: str(v) for k, v in fields.items()}).json()
    videos = [finished(url, video) for video in (as_json, as_form, as_url)]
    contents = {content(url, video) for video in videos}
    assert len(contents) == 1
    assert all(video["guidance_scale"] == 2.5 and video["seed"] == 4 for video in videos)


def test_without_a_seed_each_request_has_its_own(server: tuple[str, Any]) -> None:
    url, _ = server
    body = {"prompt": "a", "num_inference_steps": 2, "num_frames": 1}
    first, second = finished(url, post(url, body)), finished(url, post(url, body))
    assert first["seed"] != second["seed"]
    again = finished(url, post(url, {**body, "seed": first["seed"]}))
    assert content(url, again) == content(url, first) != content(url, second)
    zero = post(url, {**body, "seed": 0, "guidance_scale": 0})
    assert (zero["seed"], zero["guidance_scale"]) == (0, 0)  # zero is a value, not "left out"


def test_merged_steps_agree(load_app: Any, serve_app: Any) -> None:
    """batching=shape: neighbours share forwards; the pictures differ by rounding alone."""
    from inference.request import Request

    app = load_app(batching="shape")
    worker = app.state.worker
    requests = [Request(prompt=p, seed=n, steps=6) for n, p in enumerate(("a red circle", "a blue square", "a"))]
    exact = worker.engine.run_serial(requests, worker.instance)
    with serve_app(app) as url:
        videos = [post(url, {"prompt": r.prompt, "seed": r.seed, "num_inference_steps": 6}) for r in requests]
        for video, artifact in zip(videos, exact, strict=True):
            assert finished(url, video)["status"] == "completed"
            first_frame = content(url, video, variant="thumbnail")
            assert np.abs(decode_png(first_frame).astype(int) - artifact.frames_FHWC()[0]).max() <= 1


def decode_png(data: bytes) -> np.ndarray:
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


# -- bad requests


BAD = [
    ({"prompt": ""}, "prompt", "at least 1 character"),
    ({"prompt": 3}, "prompt", "valid string"),
    ({"prompt": None}, "prompt", "valid string"),
    ({"prompt": "\ud800"}, "prompt", ""),
    ({"prompt": "x" * 9000}, "prompt", "expected at most 8000"),
    ({"num_frames": 10}, None, "frames: got 10, expected 4k + 1"),
    ({"num_frames": 10**30}, "num_frames", ""),
    ({"num_frames": 5, "seconds": 1}, "num_frames", "give one of them"),
    ({"seconds": -1}, "seconds", "greater than 0"),
    ({"seconds": float("inf")}, "seconds", "finite"),
    ({"size": "32"}, "size", "WIDTHxHEIGHT"),
    ({"size": "33x32"}, None, "width: got 33"),
    ({"size": "99999x99999"}, None, ""),
    ({"size": "80000x80000"}, None, "more than this server"),
    ({"num_inference_steps": 0}, None, "steps: got 0"),
    ({"num_inference_steps": 10**9}, None, "more than this server"),
    ({"num_inference_steps": True}, "num_inference_steps", "expected a number"),
    ({"num_inference_steps": "many"}, "num_inference_steps", "integer"),
    ({"guidance_scale": -1}, None, "guidance: got -1"),
    ({"guidance_scale": 10**400}, "guidance_scale", ""),
    ({"seed": -1}, "seed", ""),
    ({"solver": "heun"}, None, "expected one of: dpm2, euler, lcm, unipc"),
    ({"fps": 0}, "fps", "greater than 0"),
    ({"steps": 3}, "steps", "unknown field 'steps'; expected one of: fps, guidance_policy"),
]


@pytest.mark.parametrize(("extra", "param", "expected"), BAD, ids=[str(extra)[:40] for extra, _, _ in BAD])
def test_bad_fields_are_400_in_the_one_error_body(
    server: tuple[str, Any], extra: dict[str, Any], param: str | None, expected: str
) -> None:
    import json

    body = json.dumps({"prompt": "a", **extra})
    reply = httpx.post(f"{server[0]}/v1/videos", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and expected in error["message"]
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "kwargs", "status"),
    [
        ("POST", "/v1/videos", {"content": b"{not json"}, 400),
        ("POST", "/v1/videos", {"content": b"[" * 100_000}, 400),
        ("POST", "/v1/videos", {"content": b'{"seed": ' + b"9" * 5000 + b"}"}, 400),
        ("POST", "/v1/videos", {"content": b"\xff\xfe"}, 400),
        ("POST", "/v1/videos", {"content": b"[1]"}, 400),
        ("POST", "/v1/videos", {"content": b"prompt", "headers": {"content-type": "text/plain"}}, 415),
        ("POST", "/v1/videos", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400),
        ("POST", "/v1/videos", {"json": {"prompt": "x" * 2**21}}, 413),
        ("POST", "/v1/videos", {"files": {"prompt": (None, "x" * 2**21)}}, 413),
        ("GET", "/v1/videos/video_none", {}, 404),
        ("DELETE", "/v1/videos/video_none", {}, 404),
        ("GET", "/v1/videos/video_none/content", {}, 404),
        ("GET", "/v1/videos?limit=0", {}, 400),
        ("GET", "/v1/videos?limit=101", {}, 400),
        ("GET", "/v1/videos?order=sideways", {}, 400),
        ("GET", "/v1/nothing", {}, 404),
        ("PUT", "/v1/videos", {}, 405),
    ],
)
def test_every_error_has_the_one_body_and_a_request_id(
    server: tuple[str, Any], method: str, path: str, kwargs: dict[str, Any], status: int
) -> None:
    reply = httpx.request(method, server[0] + path, timeout=30, **kwargs)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"} and reply.json()["error"]["message"]
    assert reply.headers["x-request-id"]


def test_a_client_may_name_its_request_but_not_inject_headers(server: tuple[str, Any]) -> None:
    url = server[0]
    assert httpx.get(f"{url}/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert httpx.get(f"{url}/health", headers={"x-request-id": "a b<script>"}).headers["x-request-id"][:4] == "req_"


# -- content


def test_content_supports_ranges(server: tuple[str, Any]) -> None:
    url, _ = server
    video = finished(url, post(url, {"prompt": "a", **FAST}))
    whole = content(url, video)
    reply = httpx.get(f"{url}/v1/videos/{video['id']}/content", headers={"Range": "bytes=4-11"})
    assert reply.status_code == 206 and reply.content == whole[4:12]
    assert reply.headers["content-range"] == f"bytes 4-11/{len(whole)}"
    assert reply.headers["content-type"] == "video/mp4" and whole[4:8] == b"ftyp"
    past = httpx.get(f"{url}/v1/videos/{video['id']}/content", headers={"Range": "bytes=99999999-"})
    assert past.status_code == 416
    unknown = httpx.get(f"{url}/v1/videos/{video['id']}/content", params={"variant": "spritesheet"})
    assert unknown.status_code == 400 and "'video' or 'thumbnail'" in unknown.json()["error"]["message"]


# -- cancellation, queue, failures


def test_deleting_a_running_job_cancels_it_within_a_step(server: tuple[str, Any]) -> None:
    url, app = server
    video = post(url, {"prompt": "a", **LONG})
    job = app.state.store.get(video["id"])
    wait_for(lambda: job.handle is not None and job.handle.progress[0] > 3)
    running = httpx.get(f"{url}/v1/videos/{video['id']}")
    assert running.json()["status"] == "in_progress" and 50 <= int(running.headers["openai-poll-after-ms"]) <= 5000
    early = httpx.get(f"{url}/v1/videos/{video['id']}/content")
    assert early.status_code == 400 and early.json()["error"]["code"] == "video_not_ready"
    handle = job.handle
    app.state.worker.cancel(job)  # what DELETE does; called here so that the step is known
    at_cancel = handle.progress[0]
    after = finished(url, video)
    assert after["status"] == "failed" and after["error"]["code"] == "cancelled"
    assert handle.progress[0] - at_cancel <= 1
    assert httpx.delete(f"{url}/v1/videos/{video['id']}").json()["deleted"]  # finished now: this one forgets it
    assert httpx.get(f"{url}/v1/videos/{video['id']}").status_code == 404


def test_the_queue_is_bounded_and_moves_on(load_app: Any, serve_app: Any) -> None:
    app = load_app(max_running=1, max_queue=2, max_work=400.0)
    with serve_app(app) as url:
        running = post(url, {"prompt": "a", **LONG})
        wait_for(lambda: app.state.worker.counts == (1, 0))
        waiting = [post(url, {"prompt": "a", **LONG}), post(url, {"prompt": "a", **FAST})]
        assert waiting[0]["status"] == "queued" and waiting[0]["progress"] == 0
        full = httpx.post(f"{url}/v1/videos", json={"prompt": "a", **FAST})
        assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(full.headers["retry-after"]) < 120
        metrics = httpx.get(f"{url}/metrics").text
        for line in ("requests_running 1.0", "requests_waiting 2.0", "requests_rejected_total 1.0"):
            assert f"fastvideo_{line}" in metrics
        httpx.delete(f"{url}/v1/videos/{waiting[0]['id']}")  # a waiting job fails at once
        assert httpx.get(f"{url}/v1/videos/{waiting[0]['id']}").json()["error"]["code"] == "cancelled"
        assert httpx.delete(f"{url}/v1/videos/{running['id']}").json()["deleted"]
        assert finished(url, running)["error"]["code"] == "cancelled"
        assert finished(url, waiting[1])["status"] == "completed"
        metrics = httpx.get(f"{url}/metrics").text
        assert 'fastvideo_requests_total{finish_reason="cancelled"} 2.0' in metrics
        assert 'fastvideo_requests_total{finish_reason="completed"} 1.0' in metrics


def test_old_videos_and_their_files_are_dropped(load_app: Any, serve_app: Any) -> None:
    app = load_app(max_kept=2)
    with serve_app(app) as url:
        videos = [finished(url, post(url, {"prompt": "a", **FAST})) for _ in range(4)]
        post(url, {"prompt": "a", **FAST})
        assert httpx.get(f"{url}/v1/videos/{videos[0]['id']}").status_code == 404
        assert httpx.get(f"{url}/v1/videos/{videos[3]['id']}").status_code == 200
        folder = app.state.store.file(app.state.store.get(videos[3]["id"]), "").parent
        assert not list(folder.glob(f"{videos[0]['id']}*")) and list(folder.glob(f"{videos[3]['id']}*"))
    assert not folder.exists()


def test_a_broken_step_fails_its_request_alone(load_app: Any, serve_app: Any) -> None:
    """More latent frames than the transformer's position table holds: the forward itself fails."""
    app = load_app(max_work=400.0)
    with serve_app(app) as url:
        body = {"prompt": "a red circle", "num_inference_steps": 4, "seed": 1}
        before = content(url, finished(url, post(url, body)))
        broken = post(url, {"prompt": "a", "num_frames": 4 * 70 + 1, "size": "8x8", "num_inference_steps": 2})
        state = finished(url, broken)
        assert state["status"] == "failed" and state["error"]["code"] == "server_error" and state["error"]["message"]
        assert content(url, finished(url, post(url, body))) == before
        assert httpx.get(f"{url}/health").status_code == 200


def test_values_that_are_not_finite_fail_the_request(load_app: Any, serve_app: Any) -> None:
    import torch

    app = load_app()
    with torch.no_grad():
        app.state.worker.instance.module("transformer").proj_out.bias.fill_(float("nan"))
    with serve_app(app) as url:
        state = finished(url, post(url, {"prompt": "a", **FAST}))
        assert state["status"] == "failed" and state["error"]["code"] == "not_finite"


# -- health


def test_health(server: tuple[str, Any]) -> None:
    url, _ = server
    for path in ("/health", "/health/live", "/health/ready"):
        reply = httpx.get(url + path)
        assert reply.status_code == 200 and reply.json()["status"] == "ok"


def test_health_tells_a_dead_engine(load_app: Any, serve_app: Any) -> None:
    app = load_app()
    with serve_app(app) as url:
        app.state.worker.stop()
        assert httpx.get(f"{url}/health/ready").status_code == 503
        assert httpx.get(f"{url}/health/live").status_code == 503
        refused = httpx.post(f"{url}/v1/videos", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["type"] == "server_error"


def test_health_tells_a_stalled_engine(load_app: Any, serve_app: Any) -> None:
    app = load_app(max_work=400.0, stall_seconds=0.0)
    with serve_app(app) as url:
        post(url, {"prompt": "a", **LONG})
        wait_for(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        assert httpx.get(f"{url}/health/live").status_code == 200  # it may still recover
