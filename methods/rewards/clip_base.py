"""Image-text similarity by a CLIP of transformers: what CLIPScore, PickScore and HPSv2 share.

Knows how to load a CLIP and pick frames. Leaves model names and scales to the subclasses, and what a CLIP computes to
``cards.reward``, whose card scores requests of the engine alike.

Legend: B = samples, F = frames, H, W = pixels, C = 3, N = images of one forward, D = width of the joint space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import CLIPModel, CLIPProcessor

from cards.errors import UserError, unknown_name
from cards.reward.components import image_features, pixels, similarity, text_features, tokenize
from loops.score import spread
from methods.rewards.pretrained import check_model, check_processor
from methods.rewards.reward import Reward, RewardBatch, Scores, attempt, clean

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class _Loaded:
    """A frozen CLIP with its own preprocessing."""

    clip: CLIPModel
    processor: CLIPProcessor


class ClipReward(Reward):
    """exp(logit_scale) cos(image, text) / divisor, mean over evenly spaced frames.

    Args:
        model: folder or hub id of a transformers CLIP.
        revision: commit, tag or branch on the hub; None = its main branch. Not used for folders.
        processor: folder or hub id of tokenizer and image processor; None = ``model``.
        processor_revision: as ``revision``, for ``processor``.
        frames: frames to look at, spread evenly; None = all of them.
        batch_size: images in one forward.
        dtype: of the weights and the forward; the comparison itself is float32.
    """

    learned = True
    divisor: ClassVar[float | None]  # brings the usual range of the logit to about 0..1; None: exp(logit_scale)

    def __init__(
        self,
        *,
        model: str,
        revision: str | None = None,
        processor: str | None = None,
        processor_revision: str | None = None,
        frames: int | None = 4,
        batch_size: int = 32,
        dtype: DtypeName = "float32",
    ) -> None:
        if frames is not None and frames < 1:
            raise UserError(f"reward {self.name}: frames got {frames}, expected 1 or more, or null for every frame")
        if batch_size < 1:
            raise UserError(f"reward {self.name}: batch_size got {batch_size}, expected 1 or more images")
        if dtype not in get_args(DtypeName):
            raise unknown_name(f"dtype for reward {self.name}", str(dtype), get_args(DtypeName))
        if processor is None and processor_revision is not None:
            raise UserError(
                f"reward {self.name}: got processor_revision={processor_revision!r} without a processor; expected both"
                " or neither; set processor too, or use revision"
            )
        self.model = model
        self.revision = revision
        self.processor = model if processor is None else processor
        self.processor_revision = revision if processor is None else processor_revision
        self.frames = frames
        self.batch_size = batch_size
        self.dtype = dtype
        self.version = f"1 {model}" if revision is None else f"1 {model}@{revision}"
        self._loaded: _Loaded | None = None

    def check(self) -> None:
        check_model(self.name, self.model, revision=self.revision, model_type="clip")
        check_processor(self.name, self.processor, revision=self.processor_revision)

    def prepare(self, device: str = "cpu") -> None:
        self._ready().clip.to(device)

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> Scores:
        loaded, videos, prompts = self._ready(), batch.videos_BFHWC, batch.prompts
        attempts, reasons = attempt(self.name, len(batch), lambda i: self._pixels(loaded, videos[i], prompts[i]))
        pixels_NCHW = {row: images for row, images in enumerate(attempts) if images is not None}
        values = np.full(len(batch), np.nan)
        if not pixels_NCHW:
            return Scores(values=values, reasons=reasons)
        counts = [len(images) for images in pixels_NCHW.values()]
        image_ND = self._images(loaded, torch.cat(list(pixels_NCHW.values())))
        distinct = sorted({prompts[row] for row in pixels_NCHW})  # a group shares its prompt: embed it once
        text_ND = self._texts(loaded, distinct)[[distinct.index(prompts[row]) for row in pixels_NCHW]]
        text_ND = text_ND.repeat_interleave(torch.tensor(counts, device=text_ND.device), dim=0)
        logits_N = similarity(loaded.clip, image_ND, text_ND)
        values[list(pixels_NCHW)] = [float(own.double().mean()) for own in logits_N.cpu().split(counts)]
        divisor = loaded.clip.logit_scale.double().exp().item() if self.divisor is None else self.divisor
        return Scores(values=clean(values / divisor), reasons=reasons)

    def _ready(self) -> _Loaded:
        if self._loaded is None:
            self.check()
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> _Loaded:
        clip, info = CLIPModel.from_pretrained(
            self.model, revision=self.revision, dtype=getattr(torch, self.dtype), output_loading_info=True
        )
        wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
        if wrong:
            raise UserError(
                f"reward {self.name}: weights of {self.model} do not fit their config: {wrong}; expected exactly the"
                " keys and shapes of transformers' CLIPModel; fetch the model again"
            )
        processor = CLIPProcessor.from_pretrained(self.processor, revision=self.processor_revision)
        return _Loaded(clip=clip.eval().requires_grad_(False), processor=processor)

    def _pixels(self, loaded: _Loaded, video_FHWC: NDArray[np.uint8], prompt: Any) -> torch.Tensor:
        """(N, C, H, W): the chosen frames, resized, cropped and normalised as the model's own processor says."""
        video_FHWC = np.asarray(video_FHWC)
        if video_FHWC.ndim != 4 or video_FHWC.shape[-1] != 3 or 0 in video_FHWC.shape or video_FHWC.dtype != np.uint8:
            raise ValueError(
                f"got a video of shape {video_FHWC.shape} and dtype {video_FHWC.dtype}, expected (frames, height,"
                " width, 3) uint8"
            )
        if not isinstance(prompt, str):
            raise ValueError(f"got a prompt of type {type(prompt).__name__}, expected text")
        chosen = np.ascontiguousarray(video_FHWC[spread(len(video_FHWC), self.frames)])
        return pixels(loaded.processor, torch.from_numpy(chosen))

    def _images(self, loaded: _Loaded, pixels_NCHW: torch.Tensor) -> torch.Tensor:
        """Unit image embeddings, (N, D) float32."""
        chunks = pixels_NCHW.to(loaded.clip.device, loaded.clip.dtype).split(self.batch_size)
        return torch.cat([image_features(loaded.clip, chunk) for chunk in chunks])

    def _texts(self, loaded: _Loaded, prompts: list[str]) -> torch.Tensor:
        """Unit text embeddings, (N, D) float32; long prompts are cut at the model's length."""
        chunks = []
        for start in range(0, len(prompts), self.batch_size):
            length = loaded.clip.config.text_config.max_position_embeddings
            tokens = tokenize(loaded.processor, prompts[start : start + self.batch_size], length)
            ids_NL, mask_NL = (tokens[name].to(loaded.clip.device) for name in ("ids", "mask"))
            chunks.append(text_features(loaded.clip, ids_NL, mask_NL))
        return torch.cat(chunks)
