"""Wan2.1 cards: ``tiny`` bundled, ``1.3b`` and ``14b`` by folder or hub id, and any plain diffusers Wan folder.

Figures of the published models: Wan-Video/Wan2.1 configs and model cards (frames of 16 fps; 480x832 or 720x1280).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import JsonValue

from cards.card import (
    CARD_FILE,
    Component,
    Guidance,
    LoopSpec,
    ModelCard,
    Recipe,
    Sampling,
    Schedule,
    Source,
)
from cards.errors import unknown_name
from cards.geometry import Geometry
from cards.program import Program
from cards.source import SourceError, parse_source, read_json, resolve_folder
from cards.wan21.program import TEXT_TO_VIDEO

TASK = "t2v"
SEMANTICS = "flow-ode"
SOLVER_OF_SCHEDULER = {
    "UniPCMultistepScheduler": "unipc",
    "FlowMatchEulerDiscreteScheduler": "euler",
    "DPMSolverMultistepScheduler": "dpm2",
}
SHIFT_KEYS = ("flow_shift", "shift")
HUB = {"1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers"}

LOST_LEVELS: dict[str, tuple[str, ...]] = {"diffusion_denoise": (), "diffusion_denoise_exit": ("C1",)}
"""Loop kind -> parity levels that it cannot keep; C1 and C2 of one that is not listed."""

_TRANSFORMER = {
    "patch_size": [1, 2, 2],
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
_TRANSFORMERS = {
    "1.3b": {**_TRANSFORMER, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "14b": {**_TRANSFORMER, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
_VAE = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
}
_TEXT = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 256384,
    "feed_forward_proj": "gated-gelu",
}
_SAMPLING = {
    "tiny": Sampling(frames=9, height=32, width=32, fps=8, steps=20),
    "1.3b": Sampling(frames=81, height=480, width=832, fps=16, steps=50),
    "14b": Sampling(frames=81, height=720, width=1280, fps=16, steps=50),
}
_GUIDANCE = {"tiny": 3.0, "1.3b": 6.0, "14b": 5.0}
_SHIFT = {"tiny": 3.0, "1.3b": 8.0, "14b": 5.0}


def build_card(size: str, *, source: str | None = None, revision: str | None = None) -> ModelCard:
    """The card of a size; with ``source`` (folder or hub id) its configs are read from there.

    A hub id's configs are read when its weights are fetched; until then the published figures stand.
    """
    if source is not None:
        parsed = parse_source(source, revision)
        if parsed.kind == "folder":
            folder = Path(parsed.location)
            card = card_from_folder(folder)
            if (folder / CARD_FILE).is_file():
                return card
            return card.model_copy(
                update={"name": f"wan21-{size}", "size": size, "sampling": _clip_defaults(card, size)}
            )
        return _published(size, parsed)
    if size == "tiny":
        return _from_configs(
            Source(kind="bundled", location="wan21/weights/tiny"), size, _SAMPLING[size], _GUIDANCE[size]
        )
    return _published(size, Source(kind="hub", location=HUB[size], revision=revision))


def card_from_folder(folder: Path) -> ModelCard:
    """The card of a folder: its card.json when it holds one, else read off a plain diffusers Wan folder."""
    if (folder / CARD_FILE).is_file():
        return ModelCard.load(folder)
    source = Source(kind="folder", location=str(folder.resolve()))
    _check_index(resolve_folder(source))
    width = read_json(folder / "transformer" / "config.json").get("num_attention_heads", 0)
    size = {12: "1.3b", 40: "14b"}.get(width, "tiny")
    card = _from_configs(source, size, _SAMPLING[size], _GUIDANCE[size])
    return card.model_copy(update={"sampling": _clip_defaults(card, size)})


def with_vae_tiles(
    card: ModelCard, *, tile: tuple[int, int], stride: tuple[int, int], tiles_per_step: int = 1
) -> ModelCard:
    """A child of the card that decodes by tiles: (height, width) in pixels, as ``loops.vae_tiles`` has them."""
    spec = LoopSpec(
        kind="vae_tiles",
        unit="VAE_TILE",
        components={"decoder": "vae"},
        semantics="vae-tiles",
        options={"tile": list(tile), "stride": list(stride), "tiles_per_step": tiles_per_step},
    )
    by_loop = {"component": None, "op": None, "loop": "decode"}
    nodes = tuple(
        node.model_copy(update=by_loop) if node.writes == "video" else node for node in card.programs[TASK].nodes
    )
    return card.derive(loops={**card.loops, "decode": spec}, programs={**card.programs, TASK: Program(nodes=nodes)})


def with_denoise_loop(card: ModelCard, kind: str, **options: JsonValue) -> ModelCard:
    """A child of the card whose denoising loop is of another kind, such as those of ``loops.adaptive``.

    It no longer promises what such a loop gives up: to equal the library (C1) and, where velocities are reused, that
    training recomputes them (C2).
    """
    changes = {"kind": kind, "options": options, "dynamic_stop": kind != "diffusion_denoise"}
    lost = LOST_LEVELS.get(kind, ("C1", "C2"))
    parity = card.parity.model_copy(update={"levels": tuple(x for x in card.parity.levels if x not in lost)})
    loops = {**card.loops, "denoise": card.loops["denoise"].model_copy(update=changes)}
    return card.derive(loops=loops, parity=parity)


def _clip_defaults(card: ModelCard, size: str) -> Sampling:
    """The size's sampling defaults, moved to the nearest clip that the folder's geometry can hold."""
    wanted, g = _SAMPLING[size], card.geometry
    frames = (wanted.frames - 1) // g.temporal * g.temporal + 1
    unit_h, unit_w = g.spatial * g.patch[1], g.spatial * g.patch[2]
    height, width = max(1, wanted.height // unit_h) * unit_h, max(1, wanted.width // unit_w) * unit_w
    return card.sampling.model_copy(update={"frames": frames, "height": height, "width": width})


def _published(size: str, source: Source) -> ModelCard:
    geometry = Geometry(spatial=8, temporal=4, channels=16, patch=(1, 2, 2))
    if size not in _TRANSFORMERS:
        raise unknown_name("size with published weights", size, _TRANSFORMERS)
    components = _components(_TRANSFORMERS[size], _VAE, _TEXT)
    schedule = Schedule(
        shift=_SHIFT[size],
        options={"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000},
    )
    return _card(size, source, geometry, components, "unipc", schedule, _SAMPLING[size], _GUIDANCE[size])


def _check_index(folder: Path) -> None:
    """Raises ``SourceError`` unless the folder is a Wan2.1 text-to-video pipeline."""
    index = read_json(folder / "model_index.json")
    if index.get("_class_name") != "WanPipeline":
        raise SourceError(f"{folder}: got a {index.get('_class_name')} folder, expected WanPipeline")
    second = index.get("transformer_2")
    if (second and second[0] is not None) or index.get("boundary_ratio") is not None or index.get("expand_timesteps"):
        raise SourceError(f"{folder}: got a Wan2.2 folder (two experts or expanded timesteps), expected Wan2.1")


def _from_configs(source: Source, size: str, sampling: Sampling, guidance: float) -> ModelCard:
    folder = resolve_folder(source)
    _check_index(folder)
    vae = read_json(folder / "vae" / "config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    geometry = Geometry(
        spatial=vae.get("scale_factor_spatial", 8),
        temporal=vae.get("scale_factor_temporal", 4),
        channels=vae.get("z_dim", 16),
        patch=tuple(transformer.get("patch_size", (1, 2, 2))),
    )
    if transformer.get("in_channels", 16) != geometry.channels:
        raise SourceError(
            f"{folder}: the transformer takes {transformer.get('in_channels', 16)} channels, the VAE gives "
            f"{geometry.channels}; expected a text-to-video folder, where they are equal"
        )
    solver, schedule = _scheduler(folder)
    return _card(size, source, geometry, _components({}, {}, {}), solver, schedule, sampling, guidance)


def _scheduler(folder: Path) -> tuple[str, Schedule]:
    """Solver and schedule from scheduler_config.json, whole, so that a request repeats the folder's pipeline."""
    config = read_json(folder / "scheduler" / "scheduler_config.json")
    name = config.get("_class_name")
    if name not in SOLVER_OF_SCHEDULER:
        raise unknown_name(f"scheduler in {folder / 'scheduler'}", str(name), SOLVER_OF_SCHEDULER)
    shift = next((float(config[key]) for key in SHIFT_KEYS if key in config), 1.0)
    options = {k: v for k, v in config.items() if not k.startswith("_") and k not in SHIFT_KEYS and v is not None}
    return SOLVER_OF_SCHEDULER[name], Schedule(shift=shift, options=options)


def _components(transformer: dict[str, Any], vae: dict[str, Any], text: dict[str, Any]) -> dict[str, Component]:
    return {
        "tokenizer": Component(
            kind="tokenizer",
            library="transformers",
            class_name="T5TokenizerFast",
            subfolder="tokenizer",
            required_for=(TASK,),
        ),
        "text_encoder": Component(
            kind="text_encoder",
            library="transformers",
            class_name="UMT5EncoderModel",
            subfolder="text_encoder",
            config=text,
            required_for=(TASK,),
        ),
        "transformer": Component(
            kind="transformer",
            library="diffusers",
            class_name="WanTransformer3DModel",
            subfolder="transformer",
            config=transformer,
            trainable=True,
            required_for=(TASK,),
        ),
        "vae": Component(
            kind="vae",
            library="diffusers",
            class_name="AutoencoderKLWan",
            subfolder="vae",
            config=vae,
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
    sampling: Sampling,
    guidance: float,
) -> ModelCard:
    return ModelCard(
        name=f"wan21-{size}",
        family="wan21",
        size=size,
        source=source,
        geometry=geometry,
        components=components,
        loops={
            "denoise": LoopSpec(
                kind="diffusion_denoise",
                unit="DIFFUSION_STEP",
                solver=solver,
                schedule=schedule,
                guidance=Guidance(scale=guidance),
                components={"denoiser": "transformer"},
                semantics=SEMANTICS,
            )
        },
        programs={TASK: TEXT_TO_VIDEO},
        recipe=Recipe(
            method="pretrained", assumes_loop=SEMANTICS, data="ShapeWorld" if source.kind == "bundled" else ""
        ),
        sampling=sampling,
        capabilities=("text_to_video",),
    )
