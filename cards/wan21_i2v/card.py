"""Wan2.1 image-to-video cards: a plain diffusers folder of the pipeline, or the published 14B weights.

Figures of the published model: Wan-AI/Wan2.1-I2V-14B-480P-Diffusers (frames of 16 fps, 480x832).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cards.card import CARD_FILE, Component, Guidance, LoopSpec, ModelCard, Recipe, Sampling, Schedule, Source
from cards.errors import UserError
from cards.geometry import Geometry
from cards.source import SourceError, parse_source, read_json, resolve_folder
from cards.wan21 import card as wan21
from cards.wan21_i2v.program import IMAGE_TO_VIDEO

TASK = "i2v"
FAMILY = "wan21_i2v"
PIPELINE = "WanImageToVideoPipeline"
HUB = {"14b": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"}
SAMPLING = {
    "tiny": Sampling(frames=9, height=32, width=32, fps=8, steps=20),
    "14b": Sampling(frames=81, height=480, width=832, fps=16, steps=50),
}
GUIDANCE = 5.0
SHIFT = 3.0
_IMAGE_ENCODER = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
}


def build_card(size: str, *, source: str | None = None, revision: str | None = None) -> ModelCard:
    """The card of a folder or hub id; without one that of the published weights, which only ``14b`` has."""
    if source is None and size not in HUB:
        raise UserError(
            f"card {FAMILY} has no bundled weights: give card.source=<folder of a {PIPELINE} or hub id>, or "
            f"card.size={', '.join(HUB)} for the published ones"
        )
    if source is None:
        return _published(size, Source(kind="hub", location=HUB[size], revision=revision))
    parsed = parse_source(source, revision)
    if parsed.kind == "folder":
        return card_from_folder(Path(parsed.location))
    return _published(size, parsed)


def card_from_folder(folder: Path) -> ModelCard:
    """The card of a folder: its card.json when it holds one, else read off a plain diffusers folder."""
    if (folder / CARD_FILE).is_file():
        return ModelCard.load(folder)
    source = Source(kind="folder", location=str(folder.resolve()))
    _check_index(resolve_folder(source))
    vae = read_json(folder / "vae" / "config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    geometry = Geometry(
        spatial=vae.get("scale_factor_spatial", 8),
        temporal=vae.get("scale_factor_temporal", 4),
        channels=vae.get("z_dim", 16),
        patch=tuple(transformer.get("patch_size", (1, 2, 2))),
    )
    expected = 2 * geometry.channels + geometry.temporal
    if transformer.get("in_channels", 16) != expected or transformer.get("image_dim") is None:
        raise SourceError(
            f"{folder}: got a transformer of {transformer.get('in_channels', 16)} channels and image_dim "
            f"{transformer.get('image_dim')}, expected {expected} channels (latents, mask and condition) and an "
            "image_dim: a Wan2.1 image-to-video folder"
        )
    solver, schedule = wan21._scheduler(folder)
    size = "14b" if transformer.get("num_attention_heads") == 40 else "tiny"
    return _card(size, source, geometry, _components({}, {}, {}, {}), solver, schedule)


def _check_index(folder: Path) -> None:
    """Raises ``SourceError`` unless the folder is a Wan2.1 image-to-video pipeline."""
    index = read_json(folder / "model_index.json")
    if index.get("_class_name") != PIPELINE:
        raise SourceError(f"{folder}: got a {index.get('_class_name')} folder, expected {PIPELINE}")
    second = index.get("transformer_2")
    if (second and second[0] is not None) or index.get("boundary_ratio") is not None or index.get("expand_timesteps"):
        raise SourceError(f"{folder}: got a Wan2.2 folder (two experts or expanded timesteps), expected Wan2.1")


def _published(size: str, source: Source) -> ModelCard:
    transformer = {
        **wan21._TRANSFORMERS["14b"],
        "in_channels": 36,
        "image_dim": 1280,
        "added_kv_proj_dim": 5120,
    }
    schedule = Schedule(
        shift=SHIFT,
        options={"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000},
    )
    components = _components(transformer, wan21._VAE, wan21._TEXT, _IMAGE_ENCODER)
    geometry = Geometry(spatial=8, temporal=4, channels=16, patch=(1, 2, 2))
    return _card(size, source, geometry, components, "unipc", schedule)


def _components(
    transformer: dict[str, Any], vae: dict[str, Any], text: dict[str, Any], image: dict[str, Any]
) -> dict[str, Component]:
    shared = {
        cid: component.model_copy(update={"required_for": (TASK,)})
        for cid, component in wan21._components(transformer, vae, text).items()
    }
    shared["vae"] = shared["vae"].model_copy(update={"layout": "library"})  # its encode of the frame enters every step
    return {
        **shared,
        "image_processor": Component(
            kind="image_processor",
            library="transformers",
            class_name="CLIPImageProcessor",
            subfolder="image_processor",
            required_for=(TASK,),
        ),
        "image_encoder": Component(
            kind="image_encoder",
            library="transformers",
            class_name="CLIPVisionModel",
            subfolder="image_encoder",
            config=image,
            required_for=(TASK,),
        ),
    }


def _card(
    size: str,
    source: Source,
    geometry: Geometry,
    components: dict[str, Component],
    solver: str,
    schedule: Schedule,
) -> ModelCard:
    card = ModelCard(
        name=f"wan21-i2v-{size}",
        family=FAMILY,
        size=size,
        source=source,
        geometry=geometry,
        components=components,
        loops={
            "denoise": LoopSpec(
                kind="diffusion_denoise_image",
                unit="DIFFUSION_STEP",
                solver=solver,
                schedule=schedule,
                guidance=Guidance(scale=GUIDANCE),
                components={"denoiser": "transformer"},
                semantics=wan21.SEMANTICS,
            )
        },
        programs={TASK: IMAGE_TO_VIDEO},
        recipe=Recipe(method="pretrained", assumes_loop=wan21.SEMANTICS),
        sampling=SAMPLING[size],
        capabilities=("image_to_video",),
    )
    return card.model_copy(update={"sampling": _nearest(card)})


def _nearest(card: ModelCard) -> Sampling:
    """The size's defaults, moved to the nearest clip that the geometry can hold."""
    s, g = card.sampling, card.geometry
    unit_h, unit_w = g.spatial * g.patch[1], g.spatial * g.patch[2]
    return s.model_copy(
        update={
            "frames": (s.frames - 1) // g.temporal * g.temporal + 1,
            "height": max(1, s.height // unit_h) * unit_h,
            "width": max(1, s.width // unit_w) * unit_w,
        }
    )
