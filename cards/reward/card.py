"""Reward cards: a bundled tiny CLIP of ShapeWorld, published CLIPs by hub id, and any folder of a transformers
``CLIPModel`` with its processor.

Figures of the published models: config.json of openai/clip-vit-large-patch14 and openai/clip-vit-base-patch32. A model
whose processor is published elsewhere, such as PickScore, is used from a folder that holds both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import JsonValue

from cards.card import (
    CARD_FILE,
    Component,
    CostModel,
    LoopSpec,
    ModelCard,
    Parity,
    Recipe,
    Sampling,
    ScoreSampling,
    Source,
)
from cards.errors import unknown_name
from cards.geometry import Geometry
from cards.reward.program import SCORE
from cards.source import OWN_FOLDER, SourceError, parse_source, read_json, resolve_folder

TASK = "score"
SEMANTICS = "image-text-similarity"
CLASS = "CLIPModel"
PROCESSOR = "CLIPProcessor"
DTYPES = ("float32", "bfloat16", "float16")
TINY = "reward/weights/tiny"
"""Bundled; trained by ``scripts/pretrain/clip.py``."""
HUB = {"clip-l14": "openai/clip-vit-large-patch14", "clip-b32": "openai/clip-vit-base-patch32"}

NO_CLIP = Geometry(spatial=1, temporal=1, channels=1, patch=(1, 1, 1))
"""A reward card makes no clips and takes clips of any size: the smallest geometry."""

PICTURES = {"tiny": ScoreSampling(frames=4, grid=2)}
"""Size -> what it looks at, where that is not the default."""

_CONFIGS: dict[str, dict[str, dict[str, JsonValue]]] = {
    "tiny": {"vision_config": {"hidden_size": 96, "num_hidden_layers": 4, "patch_size": 8}},
    "clip-l14": {
        "text_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 77,
        },
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 14,
        },
    },
    "clip-b32": {
        "text_config": {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "max_position_embeddings": 77,
        },
        "vision_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 32,
        },
    },
}
_PROJECTION: dict[str, JsonValue] = {"clip-l14": 768, "clip-b32": 512}


def build_card(size: str, *, source: str | None = None, revision: str | None = None) -> ModelCard:
    """The card of the bundled or of a published size; with ``source`` (folder or hub id) a folder's configs are read
    from there."""
    if size != "tiny" and size not in HUB:
        raise unknown_name("size with weights", size, ("tiny", *HUB))
    if size == "tiny" and source is None:
        bundled = Source(kind="bundled", location=TINY)
        return _card(size, bundled, {}, read_json(resolve_folder(bundled) / "config.json"), "float32")
    if size == "tiny" and not Path(str(source)).expanduser().is_dir():
        raise SourceError(f"got card.source={source!r} for the tiny reward card, expected a folder, or none: bundled")
    if source is None:
        parsed = Source(kind="hub", location=HUB[size], revision=revision)
    else:
        parsed = parse_source(source, revision)
    if parsed.kind == "folder":
        return card_from_folder(Path(parsed.location))
    config: dict[str, JsonValue] = {**_CONFIGS[size], "projection_dim": _PROJECTION[size]}
    return _card(size, parsed, config, config, "float32")


def card_from_folder(folder: Path) -> ModelCard:
    """The card of a folder: its card.json when it holds one, else read off a plain transformers folder."""
    if (folder / CARD_FILE).is_file():
        return ModelCard.load(folder)
    source = Source(kind="folder", location=str(folder.resolve()))
    config = read_json(resolve_folder(source) / "config.json")
    if config.get("architectures") != [CLASS]:
        raise SourceError(f"{folder}: got architectures {config.get('architectures')!r}, expected ['{CLASS}']")
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32")))
    if dtype not in DTYPES:
        raise unknown_name(f"dtype in {folder / 'config.json'}", dtype, DTYPES)
    return _card(_size(config), source, {}, config, dtype)


def _size(config: dict[str, Any]) -> str:
    """The size of this vision tower, else ``custom``."""
    vision = config.get("vision_config", {})
    shape = ("hidden_size", "num_hidden_layers", "patch_size")
    return next(
        (size for size, c in _CONFIGS.items() if all(c["vision_config"][k] == vision.get(k) for k in shape)), "custom"
    )


def _figure(config: dict[str, Any], tower: str, key: str) -> int:
    """A figure of one tower, from the config or, where it leaves it out, the library's default."""
    from transformers import CLIPConfig

    return int(getattr(getattr(CLIPConfig.from_dict(config), tower), key))


def _card(size: str, source: Source, own: dict[str, JsonValue], config: dict[str, Any], dtype: Any) -> ModelCard:
    """``own`` is the component's config on the card, empty where the source has it; ``config`` the source's."""
    side = _figure(config, "vision_config", "image_size") // _figure(config, "vision_config", "patch_size")
    return ModelCard(
        name=f"reward-{size}",
        family="reward",
        size=size,
        source=source,
        geometry=NO_CLIP,
        components={
            "processor": Component(
                kind="processor",
                library="transformers",
                class_name=PROCESSOR,
                subfolder=OWN_FOLDER,
                required_for=(TASK,),
            ),
            "clip": Component(
                kind="scorer",
                library="transformers",
                class_name=CLASS,
                subfolder=OWN_FOLDER,
                config=own,
                dtype=dtype,
                required_for=(TASK,),
            ),
        },
        loops={
            "score": LoopSpec(
                kind="score",
                unit="REWARD_BATCH",
                components={"scorer": "clip"},
                semantics=SEMANTICS,
                cost=CostModel(per_token_seconds=1e-6 * (side * side + 1)),
            )
        },
        programs={TASK: SCORE},
        recipe=Recipe(method="pretrained", assumes_loop=SEMANTICS),
        sampling=Sampling(
            frames=1,
            height=1,
            width=1,
            fps=1.0,
            steps=1,
            max_sequence_length=_figure(config, "text_config", "max_position_embeddings"),
            score=PICTURES.get(size, ScoreSampling()),
        ),
        parity=Parity(levels=("C0", "C1", "C3")),
        capabilities=("score",),
    )
