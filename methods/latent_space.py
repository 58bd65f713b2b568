"""Whether two cards denoise the same latents, by their configs alone: no weight loads."""

from __future__ import annotations

import inspect
from typing import Any

from cards.card import ModelCard
from cards.errors import UserError
from cards.source import library_class, read_json, resolve_folder


def check_latent_space(card: ModelCard, other: ModelCard) -> None:
    """Raises ``UserError`` that names every difference: geometry, normalisation of the latents, guidance convention."""
    mine, theirs = latent_space(card), latent_space(other)
    wrong = [f"{name} is {theirs[name]}, expected {mine[name]}" for name in mine if mine[name] != theirs[name]]
    if wrong:
        raise UserError(
            f"card {other.name!r} does not denoise the latents of {card.name!r}: {'; '.join(wrong)}. Take a card of "
            "the same VAE"
        )


def latent_space(card: ModelCard) -> dict[str, Any]:
    """What must be equal for the scores of two models to be comparable."""
    geometry = card.geometry
    conventions = sorted({loop.guidance.convention for loop in card.loops.values()})
    return {
        "channels": geometry.channels,
        "spatial": geometry.spatial,
        "temporal": geometry.temporal,
        "guidance convention": ", ".join(conventions),
        **{name: _vae_option(card, name) for name in ("latents_mean", "latents_std")},
    }


def _vae_option(card: ModelCard, name: str) -> Any:
    """An option of the card's VAE: of its folder, else of the card, else the library's default."""
    vae = next(component for component in card.components.values() if component.kind == "vae")
    config = read_json(resolve_folder(card.source, card.root) / vae.subfolder / "config.json")
    default = inspect.signature(library_class(vae.library, vae.class_name).__init__).parameters[name].default
    return list(config.get(name, default))
