"""Requests for the gates: small, unlike each other, and of every task of a card that a gate knows how to ask."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError
from inference.instance import ModelInstance
from inference.request import Request
from inference.resolve import CHUNK_LOOP, SCORE_LOOP, TEXT_LOOP, denoise_spec, refine_nodes
from loops.loop import Profile

CLIP_PROMPTS = ("a red circle moves left", "two blue squares", "", "a green triangle stays still")
TEXT_PROMPTS = ("a red circle moves left", "b", "two blue squares and a long way to go", "a green triangle")
TOKENS = 16
"""Length of a gate's completion, where the context has room for it."""


def gate_tasks(card: ModelCard) -> dict[str, str]:
    """Task -> kind of the loop that it is about, for the tasks that a gate knows how to ask: texts, scores and t2v.

    Raises ``UserError`` where the card has none.
    """
    found = {}
    for task in card.programs:
        kind = denoise_spec(card, task).kind
        if kind in (TEXT_LOOP, SCORE_LOOP) or task == Request.task:
            found[task] = kind
    if not found:
        raise UserError(
            f"card {card.name!r} has the tasks {', '.join(card.programs)}; the gates ask for {Request.task} and for "
            f"tasks whose loop is {TEXT_LOOP} or {SCORE_LOOP}"
        )
    return found


def gate_requests(instance: ModelInstance, count: int = 4) -> list[Request]:
    """``count`` requests of each task, small enough for a gate."""
    requests: list[Request] = []
    for task, kind in gate_tasks(instance.card).items():
        ask = {TEXT_LOOP: _texts, SCORE_LOOP: _scores}.get(kind, _clips)
        requests += ask(instance, task, count)
    return requests


def _clips(instance: ModelInstance, task: str, count: int) -> list[Request]:
    """They differ in prompt, seed, steps and guidance, where the loop has any, and in how the prompt is rewritten."""
    refines = refine_nodes(instance.card, task)
    spec = denoise_spec(instance.card, task)
    ladder = spec.schedule.ladder
    return [
        Request(
            prompt=CLIP_PROMPTS[i % 4],
            task=task,
            seed=100 + i,
            steps=len(ladder) if ladder is not None else 3 + i,
            guidance=None if spec.kind == CHUNK_LOOP else (1.0, 3.0, 5.0, 1.0)[i % 4],
            temperature=float(i % 2) if refines else None,
            max_tokens=4 + 2 * i if refines else None,
        )
        for i in range(count)
    ]


# -- texts


def context_of(instance: ModelInstance) -> int:
    """Tokens that prompt and completion may fill together."""
    text = instance.card.sampling.text
    assert text is not None
    return text.context


def text_request(instance: ModelInstance, task: str, prompt: str, *, seed: int, temperature: float) -> Request:
    """Keeps log-probs; nothing but the temperature shapes what is drawn."""
    context = context_of(instance)
    length = instance.tokenize(prompt, context)["ids"].shape[1]
    return Request(
        prompt=prompt,
        task=task,
        seed=seed,
        max_tokens=max(1, min(TOKENS, context - length)),
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        profile=Profile.ROLLOUT,
    )


def _texts(instance: ModelInstance, task: str, count: int) -> list[Request]:
    """They differ in prompt, length, temperature and seed."""
    requests = [
        text_request(instance, task, TEXT_PROMPTS[i % 4], seed=100 + i, temperature=float(i % 2)) for i in range(count)
    ]
    lengths = [request.max_tokens for request in requests if request.max_tokens is not None]
    return [
        replace(request, max_tokens=min(length, 4 + 3 * i))
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True))
    ]


# -- scores


def noise_frames(frames: int, height: int, width: int, seed: int) -> Tensor:
    """uint8 (F, H, W, 3), every value as likely."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8, generator=generator)


def _scores(instance: ModelInstance, task: str, count: int) -> list[Request]:
    """They differ in prompt, size and number of frames; one is longer than a forward."""
    score = instance.card.sampling.score
    assert score is not None
    sizes = ((1, 32, 32), (2 * score.rows + 1, 24, 40), (5, 40, 24), (score.rows, 32, 48))
    return [
        Request(
            prompt=CLIP_PROMPTS[i % 4],
            task=task,
            frames=sizes[i % 4][0],
            inputs={"pixels": noise_frames(*sizes[i % 4], seed=100 + i)},
        )
        for i in range(count)
    ]
