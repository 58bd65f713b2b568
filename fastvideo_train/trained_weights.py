"""Trained weights as whole modules, adapters and digests: what exports, checkpoints and reports share.

Knows state dicts, LoRA's names and weight files. Leaves cards, folders and checks to ``export``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from cards.card import ModelCard
from cards.source import load_component, weight_files
from methods.roles import trainable_component


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def weights_digest(folder: Path) -> str:
    """sha256 (hex) of a component's weights file; of the digests of all, in order, when it has several shards."""
    digests = [file_digest(path) for path in weight_files(folder)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def trained_module(card: ModelCard, folder: Path, state: dict[str, Any], role: str, lora: Any) -> Any:
    """A whole module on CPU with a role's weights; LoRA is merged into the base.

    ``state``: the student module's (full weights: the role's) state dict, gathered.
    """
    component = trainable_component(card)
    module = load_component(card.components[component], folder)
    if lora is None:
        module.load_state_dict(state, strict=True)
        return module
    return _merge_lora(module, state, role, lora)


def _merge_lora(module: Any, state: dict[str, Any], role: str, lora: Any) -> Any:
    """``W <- W + (alpha / r) B A`` for every adapted layer."""
    scale = lora.alpha / lora.rank
    marker = f".lora_A.{role}.weight"
    layers = dict(module.named_modules())
    with torch.no_grad():
        for key, a in state.items():
            if key.endswith(marker):
                name = key.removesuffix(marker)
                b = state[f"{name}.lora_B.{role}.weight"]
                layers[name].weight += scale * (b.float() @ a.float()).to(layers[name].weight.dtype)
    return module


def lora_state(state: dict[str, Any], role: str) -> dict[str, Any]:
    """The adapter's weights under diffusers' names, for ``WanPipeline.load_lora_weights``."""
    marker = f".{role}.weight"
    return {
        key.removesuffix(marker) + ".weight": value.contiguous()
        for key, value in state.items()
        if key.endswith(marker) and ".lora_" in key
    }


def save_lora(folder: Path, state: dict[str, Any], role: str, lora: Any) -> None:
    """With its config: without alpha a loader takes alpha = rank, which is another strength."""
    from diffusers import WanPipeline
    from peft import LoraConfig

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)).to_dict()
    WanPipeline.save_lora_weights(
        folder, transformer_lora_layers=lora_state(state, role), transformer_lora_adapter_metadata=config
    )
