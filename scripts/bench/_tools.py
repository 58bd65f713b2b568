"""What the benches share: options, the machine's description, a random Wan large enough to time, the JSON line."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from diffusers import WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from cards.registry import family
from cards.source import load_component, resolve_folder
from inference.instance import ModelInstance
from inference.resident import Resident

TEXT_TOKENS = 64
TEXT_WIDTH = 128


def options(arguments: list[str], defaults: dict[str, int]) -> dict[str, int]:
    """``name=<number>`` arguments over defaults; ends the program with a message for any other."""
    found = dict(defaults)
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in found or not value.isdecimal():
            print(f"got {argument!r}; expected {' or '.join(f'{key}=<number>' for key in found)}", file=sys.stderr)
            raise SystemExit(2)
        found[name] = int(value)
    return found


def text_options(arguments: list[str], defaults: dict[str, str]) -> dict[str, str]:
    """``name=<text>`` arguments over defaults; ends the program with a message for any other."""
    found = dict(defaults)
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in found or not value:
            print(f"got {argument!r}; expected {' or '.join(f'{key}=...' for key in found)}", file=sys.stderr)
            raise SystemExit(2)
        found[name] = value
    return found


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {load:.1f}"


def report(name: str, value: float, unit: str, goal: float, passed: bool, **more: Any) -> None:
    """The JSON line of a bench."""
    line = {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "pass": bool(passed), **more}
    print(json.dumps({**line, "machine": machine()}), flush=True)


def random_wan(heads: int = 6, head_dim: int = 64, layers: int = 4, ffn: int = 1536) -> ModelInstance:
    """The wan21 card and tokenizer on random modules of this size; by default a step takes some 20 ms."""
    card = family("wan21").card("tiny")
    card = card.derive(sampling=card.sampling.model_copy(update={"max_sequence_length": TEXT_TOKENS}))
    torch.manual_seed(0)
    tokenizer = load_component(card.components["tokenizer"], resolve_folder(card.source))
    text = UMT5EncoderModel(
        UMT5Config(vocab_size=len(tokenizer), d_model=TEXT_WIDTH, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    )
    transformer = WanTransformer3DModel(
        patch_size=card.geometry.patch,
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=card.geometry.channels,
        out_channels=card.geometry.channels,
        text_dim=TEXT_WIDTH,
        freq_dim=256,
        ffn_dim=ffn,
        num_layers=layers,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )
    residents = {
        "text_encoder": Resident(text.eval().requires_grad_(False)),
        "transformer": Resident(transformer.eval().requires_grad_(False)),
    }
    return ModelInstance(card, residents, tokenizer)
