"""Qwen3 cards: published sizes by hub id, and any folder of a transformers ``Qwen3ForCausalLM`` with its tokenizer.

Figures of the published models: config.json and generation_config.json of Qwen/Qwen3-*.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import JsonValue

from cards.card import CARD_FILE, Component, LoopSpec, ModelCard, Parity, Recipe, Sampling, Source, TextSampling
from cards.errors import unknown_name
from cards.geometry import Geometry
from cards.qwen3.program import TEXT
from cards.source import OWN_FOLDER, SourceError, parse_source, read_json, resolve_folder

TASK = "text"
SEMANTICS = "next-token"
CLASS = "Qwen3ForCausalLM"
TOKENIZERS = {"Qwen2Tokenizer": "Qwen2Tokenizer", "Qwen2TokenizerFast": "Qwen2Tokenizer"}
"""``tokenizer_class`` of a folder -> class."""
DTYPES = ("float32", "bfloat16", "float16")
MAX_TOKENS = 256
"""Default length of a completion, where the context has room for it."""
LIBRARY_TOP_K = 50
"""What ``generate`` draws with where generation_config.json says nothing."""

NO_CLIP = Geometry(spatial=1, temporal=1, channels=1, patch=(1, 1, 1))
"""A text card makes no clips: the smallest geometry, which its sampling fills with one pixel."""

_COMMON: dict[str, JsonValue] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
_CONFIGS: dict[str, dict[str, JsonValue]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
_PUBLISHED = TextSampling(
    context=40960, eos=(151645, 151643), max_tokens=MAX_TOKENS, temperature=0.6, top_p=0.95, top_k=20
)


def build_card(size: str, *, source: str | None = None, revision: str | None = None) -> ModelCard:
    """The card of a published size; with ``source`` (folder or hub id) a folder's configs are read from there."""
    parsed = Source(kind="hub", location=f"Qwen/Qwen3-{size.upper()}", revision=revision)
    if source is not None:
        parsed = parse_source(source, revision)
    if parsed.kind == "folder":
        return card_from_folder(Path(parsed.location))
    if size not in _CONFIGS:
        raise unknown_name("size with published weights", size, _CONFIGS)
    return _card(size, parsed, {**_COMMON, **_CONFIGS[size]}, "bfloat16", "Qwen2Tokenizer", _PUBLISHED)


def card_from_folder(folder: Path) -> ModelCard:
    """The card of a folder: its card.json when it holds one, else read off a plain transformers folder."""
    if (folder / CARD_FILE).is_file():
        return ModelCard.load(folder)
    source = Source(kind="folder", location=str(folder.resolve()))
    config = read_json(resolve_folder(source) / "config.json")
    if config.get("architectures") != [CLASS]:
        raise SourceError(f"{folder}: got architectures {config.get('architectures')!r}, expected ['{CLASS}']")
    tokenizer = str(read_json(folder / "tokenizer_config.json").get("tokenizer_class"))
    if tokenizer not in TOKENIZERS:
        raise unknown_name(f"tokenizer_class in {folder / 'tokenizer_config.json'}", tokenizer, TOKENIZERS)
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32")))
    if dtype not in DTYPES:
        raise unknown_name(f"dtype in {folder / 'config.json'}", dtype, DTYPES)
    return _card(_size(config), source, {}, dtype, TOKENIZERS[tokenizer], _text_sampling(folder, config))


def _size(config: dict[str, Any]) -> str:
    """The published size of this width and depth, else ``custom``."""
    shape = ("hidden_size", "num_hidden_layers")
    return next((size for size, c in _CONFIGS.items() if all(c[k] == config.get(k) for k in shape)), "custom")


def _text_sampling(folder: Path, config: dict[str, Any]) -> TextSampling:
    """What ends a completion and how it is drawn, by generation_config.json where there is one, as in ``generate``."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    end = generation.get("eos_token_id", config.get("eos_token_id"))
    context = config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 2:
        raise SourceError(f"{folder / 'config.json'}: got max_position_embeddings {context!r}, expected a number >= 2")
    drawn = bool(generation.get("do_sample", False))
    return TextSampling(
        context=context,
        eos=() if end is None else tuple(end) if isinstance(end, list) else (end,),
        max_tokens=min(MAX_TOKENS, context // 2),
        temperature=float(generation.get("temperature", 1.0)) if drawn else 0.0,
        top_p=float(generation.get("top_p", 1.0)) if drawn else 1.0,
        top_k=int(generation.get("top_k", LIBRARY_TOP_K)) if drawn else 0,
    )


def _card(
    size: str, source: Source, config: dict[str, JsonValue], dtype: Any, tokenizer: str, text: TextSampling
) -> ModelCard:
    return ModelCard(
        name=f"qwen3-{size}",
        family="qwen3",
        size=size,
        source=source,
        geometry=NO_CLIP,
        components={
            "tokenizer": Component(
                kind="tokenizer",
                library="transformers",
                class_name=tokenizer,
                subfolder=OWN_FOLDER,
                required_for=(TASK,),
            ),
            "lm": Component(
                kind="causal_lm",
                library="transformers",
                class_name=CLASS,
                subfolder=OWN_FOLDER,
                config=config,
                dtype=dtype,
                trainable=True,
                required_for=(TASK,),
            ),
        },
        loops={
            "decode": LoopSpec(
                kind="ar_decode",
                unit="AR_TOKEN",
                components={"lm": "lm"},
                semantics=SEMANTICS,
                caches=("kv",),
                dynamic_stop=True,
            )
        },
        programs={TASK: TEXT},
        recipe=Recipe(method="pretrained", assumes_loop=SEMANTICS),
        sampling=Sampling(frames=1, height=1, width=1, fps=1.0, steps=1, text=text),
        parity=Parity(levels=("C0", "C1", "C3")),
        caches=("kv",),
        capabilities=("text",),
    )
