"""What is kept of a data set's clips: their latents and, for a card that starts from a first frame, what its program
encodes of that frame. Through the card's own operations, so that training sees what serving computes.

Legend: B clips, F frames, H W pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from cards.program import Node
from cards.source import resolve_folder
from fastvideo_train.data.latent_cache import LATENTS, Encode
from fastvideo_train.trained_weights import weights_digest
from inference.instance import ModelInstance
from inference.plain_request import plain_task
from loops.loop import ModelCall

FIRST_FRAME = "image"
"""Input of a program that a clip's first frame stands for."""


@dataclass(frozen=True)
class Size:
    """Of the clips: what preparing a first frame needs of a request's params."""

    frames: int
    height: int
    width: int


def frame_nodes(instance: ModelInstance) -> tuple[Node, ...]:
    """The nodes that encode the first frame."""
    program = instance.card.programs[plain_task(instance.card)]
    return tuple(node for node in program.nodes if FIRST_FRAME in node.reads)


def clip_encoder(instance: ModelInstance) -> Encode:
    """Latents of clips, and what each of :func:`frame_nodes` writes."""
    nodes = frame_nodes(instance)

    def latents_of(video_BCFHW: Tensor) -> Tensor:
        return instance.call(ModelCall("vae", "encode", {"video": video_BCFHW})).float().cpu()

    def encode(video_BCFHW: Tensor) -> dict[str, Tensor]:
        return {LATENTS: latents_of(video_BCFHW)} | {
            node.writes: _encoded(instance, node, video_BCFHW).float().cpu() for node in nodes
        }

    return encode if nodes else latents_of


def _encoded(instance: ModelInstance, node: Node, video_BCFHW: Tensor) -> Tensor:
    """A node's result for the first frame of every clip."""
    assert node.component is not None and node.op is not None
    frames_BHWC = video_BCFHW[:, :, 0].add(1).mul(127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
    size = Size(*video_BCFHW.shape[2:])
    rows = [instance.prepared(node.op, frame_HWC.contiguous(), size) for frame_HWC in frames_BHWC]
    assert all(row is not None for row in rows)
    first = rows[0]
    assert first is not None
    tensors = {name: torch.cat([row[name] for row in rows if row is not None]) for name in first}
    return instance.call(ModelCall(node.component, node.op, tensors))


def encoder_digest(instance: ModelInstance) -> str:
    """Changes when what :func:`clip_encoder` gives would."""
    card = instance.card
    folder = resolve_folder(card.source, card.root)
    nodes = frame_nodes(instance)
    parts = {"vae": "", **{node.component: node.op for node in nodes if node.component is not None}}
    digests = {cid: weights_digest(folder / card.components[cid].subfolder) for cid in parts}
    if not nodes:
        return digests["vae"]
    said = ";".join(f"{card.family}:{cid}:{parts[cid]}:{digests[cid]}" for cid in sorted(digests))
    return hashlib.sha256(said.encode()).hexdigest()
