"""Export: the trained role as a derived card and a diffusers folder that plain ``diffusers`` loads.

Ends with a strict reload and one seeded request whose latents must equal the trainer's own; only then does the folder
appear under its name. ``python -m fastvideo_train.export ckpt=outputs/<run>/checkpoints/last out=<folder>`` exports any
checkpoint of a run later.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from cards.card import CARD_FILE, Component, ModelCard, Recipe, Source
from cards.errors import UserError
from cards.needs import MODULE_KINDS
from cards.source import BESIDE, component_folder, load_component, resolve_folder
from fastvideo_train.cli import Options, parse_options, run_program, usage
from fastvideo_train.export_readme import Samples, write_readme
from fastvideo_train.trained_weights import save_lora, trained_module, weights_digest
from inference.engine import Engine
from inference.plain_request import plain_inputs, plain_task
from inference.request import Request
from inference.resident import Resident
from methods.ladder import ladder_of
from methods.roles import trainable_component

REFERENCE_PROMPT = "a red circle moves left"
"""Of the seeded request that checks an export."""
PIPELINE = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae", "image_encoder")
"""What a diffusers folder may hold; ``image_processor`` beside it."""
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")
LORA_TOLERANCE = 1e-4
"""Merging adds B A into W before the product: equal in exact arithmetic, not in float32."""


class ExportError(RuntimeError):
    """The exported folder does not give what the trainer gives."""


@dataclass(frozen=True)
class Exported:
    """Outcome of an export."""

    folder: Path
    card: ModelCard
    latents_difference: float
    """Largest absolute difference of the seeded request, reloaded against trained."""


def derived_card(
    card: ModelCard,
    *,
    method: str,
    guidance: float | None,
    data: str,
    metrics: dict[str, float],
    weights: dict[str, str],
    parent: ModelCard,
) -> ModelCard:
    """The child card of a run that trained ``card`` from ``parent``: its recipe, its guidance scale, weights beside
    it."""
    loops = card.loops
    if guidance is not None:
        loops = {
            name: loop.model_copy(update={"guidance": loop.guidance.model_copy(update={"scale": guidance})})
            for name, loop in loops.items()
        }
    recipe = Recipe(
        method=method,
        assumes_loop=card.recipe.assumes_loop,
        assumes_precision=card.precision.train,
        consistency_required=card.recipe.consistency_required,
        data=data,
        metrics=metrics,
        weights=weights,
    )
    own = {name: getattr(card, name) for name in ModelCard.model_fields}
    return parent.derive(
        **own
        | {
            "name": f"{card.name}-{method}",
            "source": Source(kind="folder", location="."),
            "loops": loops,
            "recipe": recipe,
        }
    )


def reference_request(card: ModelCard, seed: int, guidance: float | None) -> Request:
    """The seeded request that checks an export of ``card``: its ladder, or four steps."""
    steps = 4 if ladder_of(card) is None else None
    return Request(
        prompt=REFERENCE_PROMPT,
        task=plain_task(card),
        inputs=plain_inputs(card),
        seed=seed,
        steps=steps,
        guidance=guidance,
        output="latents",
    )


def export_model(
    *,
    card: ModelCard,
    out: Path,
    state: dict[str, Any] | None,
    role: str,
    lora: Any,
    method: str,
    guidance: float | None,
    data: str,
    metrics: dict[str, float],
    reference_latents: torch.Tensor | None,
    reference_request: Request,
    samples: Samples,
    parent: ModelCard | None = None,
    joined: Mapping[str, dict[str, Any]] | None = None,
) -> Exported:
    """Writes, reloads and checks the export; see the module's docstring.

    Args:
        card: what was trained.
        parent: what the run started from; None is ``card``.
        state: gathered state dict, see :func:`trained_module`; None where the main component stayed as it was.
        joined: component -> state dict, of those that were trained beside the main one.
        reference_latents: the trainer's own (C, T, H, W) for ``reference_request``; None checks the reload against
            the module in memory.
        samples: (prompt, frames FHWC) shown in the README.
    """
    source = resolve_folder(card.source, card.root)
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    beside = {cid: c.subfolder for cid, c in card.components.items() if c.class_name in BESIDE}
    modules: dict[str, Any] = {}
    if state is not None:
        modules[trainable_component(card)] = trained_module(card, source, state, role, lora)
    for cid, weights in ({} if joined is None else joined).items():
        modules[cid] = load_component(card.components[cid], source)
        modules[cid].load_state_dict(weights, strict=True)
    placed = gathered_components(card)
    _copy_parts(card, placed, source, aside, trained=modules)
    for cid, module in modules.items():
        module.save_pretrained(aside / placed[cid].subfolder)
    if lora is not None and state is not None:
        save_lora(aside / "lora", state, role, lora)
    kept = [cid for cid, folder in beside.items() if (aside / folder).is_dir()]
    digests = {cid: weights_digest(aside / placed[cid].subfolder) for cid in (*modules, *kept)}
    child = derived_card(
        card.model_copy(update={"components": placed}),
        method=method,
        guidance=guidance,
        data=data,
        metrics=metrics,
        weights=digests,
        parent=card if parent is None else parent,
    )
    if ladder_of(child) is not None:
        write_ladder_scheduler(aside)
    (aside / CARD_FILE).write_text(child.to_json())
    write_readme(aside, child, samples)
    difference = _reload_difference(aside, modules, reference_latents, reference_request)
    allowed = 0.0 if lora is None else LORA_TOLERANCE
    if not difference <= allowed:
        raise ExportError(
            f"the export gives other latents than the trainer: largest difference {difference:.3e}, allowed "
            f"{allowed:.0e}; it is left in {aside}"
        )
    shutil.rmtree(out, ignore_errors=True)
    os.replace(aside, out)
    return Exported(out, ModelCard.load(out), difference)


def write_ladder_scheduler(folder: Path) -> None:
    """Makes the folder's scheduler the one that walks a ladder: it re-noises, and shifts nothing."""
    from diffusers import FlowMatchLCMScheduler

    shutil.rmtree(folder / "scheduler")
    FlowMatchLCMScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    index = folder / "model_index.json"
    entries = json.loads(index.read_text())
    entries["scheduler"] = ["diffusers", FlowMatchLCMScheduler.__name__]
    index.write_text(json.dumps(entries, indent=2) + "\n")


def gathered_components(card: ModelCard) -> dict[str, Component]:
    """The card's components as its export has them: those with a source of their own lie beside the pipeline, each
    module in a folder that is called as it is, with what follows it of its source, such as its tokenizer."""
    folders: dict[tuple[Source, str], str] = {}
    placed = {}
    for cid, component in card.components.items():
        if component.source is not None:
            place = (component.source, component.subfolder)
            if component.kind in MODULE_KINDS:
                folders[place] = cid
            folder = folders.setdefault(place, cid)
            component = component.model_copy(update={"source": None, "subfolder": folder, "beside": True})
        placed[cid] = component
    return placed


def _copy_parts(
    card: ModelCard, placed: Mapping[str, Component], source: Path, aside: Path, *, trained: Iterable[str]
) -> None:
    """Copies the parts of a diffusers folder and the card's components, without papers of the folder's own. Of a
    ``trained`` component nothing comes along, but for what others keep in its folder."""
    weights = {placed[cid].subfolder for cid in trained}
    others = {component.subfolder for cid, component in placed.items() if cid not in trained}
    here = {placed[cid].subfolder for cid, component in card.components.items() if component.source is None}
    parts = ({*PIPELINE, "image_processor"} | here) - (weights - others)

    def ignore(folder: str, names: list[str]) -> list[str]:
        if Path(folder) == source:
            return [name for name in names if name not in parts]
        return [n for n in names if n.endswith(WEIGHTS)] if str(Path(folder).relative_to(source)) in weights else []

    shutil.copytree(source, aside, ignore=ignore)
    for cid, component in card.components.items():
        target = aside / placed[cid].subfolder
        if component.source is not None and not target.exists():
            bare = shutil.ignore_patterns(*(f"*{end}" for end in WEIGHTS)) if target.name in weights else None
            shutil.copytree(component_folder(component, source), target, ignore=bare)


def _reload_difference(
    folder: Path, modules: Mapping[str, Any], reference: torch.Tensor | None, request: Request
) -> float:
    """Loads the folder strictly, as any user would, and samples once, on the trainer's device: devices round apart."""
    engine = Engine("cpu" if reference is None else reference.device)
    instance = engine.load(folder)
    ours = engine.run(request, instance).latents
    if reference is None:
        residents = {component: Resident(module) for component, module in modules.items()}
        reference = engine.run(request, instance.view(residents)).latents
    return (ours - reference).abs().max().item()


# -- command line


class ExportOptions(Options):
    """What to export and where to."""

    ckpt: str = Field(description="checkpoint folder, e.g. outputs/<run>/checkpoints/last")
    out: str = Field(description="folder to write")
    overwrite: bool = Field(False, description="replace what is at out")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after one message for a mistake in the command."""
    return run_program(_export_checkpoint, _usage, argv)


def _usage() -> str:
    return usage(
        ExportOptions,
        "python -m fastvideo_train.export",
        "Export a checkpoint of a run as a card and a diffusers folder.",
        "python -m fastvideo_train.export ckpt=outputs/demo/checkpoints/last out=exports/demo",
    )


def _export_checkpoint(argv: Sequence[str]) -> int:
    from omegaconf import OmegaConf

    from fastvideo_train.build import build_card, build_method, card_for, in_numerics_of
    from fastvideo_train.checkpoint import check_meta, load_state, read_meta
    from fastvideo_train.rundir import CONFIG_FILE
    from methods.roles import EMA, STUDENT, joined_names

    options = parse_options(ExportOptions, argv)
    checkpoint, out = Path(options.ckpt).resolve(), Path(options.out)
    meta = read_meta(checkpoint)
    config = checkpoint.parents[1] / CONFIG_FILE
    if not config.is_file():
        raise UserError(f"{checkpoint} is not inside a run: expected its configuration at {config}")
    cfg = OmegaConf.load(config)
    method = build_method(cfg.method)
    base = build_card(cfg.card)
    card = card_for(base, method)
    others = {
        out.with_name(f"{out.name}-{role}"): (role, other)
        for role, other in method.role_cards(in_numerics_of(base, method)).items()
        if role in method.optimizers()
    }
    for place in (out, *others):
        if place.exists() and not options.overwrite:
            raise UserError(f"{place} exists; choose another out=<folder> or pass overwrite=true")
    check_meta(meta, card_digest=card.digest, card_name=card.name, method=method.name, seed=meta.seed, where=checkpoint)
    stored = load_state(checkpoint)
    role = EMA if method.ema is not None else STUDENT
    parts = {trainable_component(card): STUDENT if method.lora is not None else role, **joined_names(card, role)}
    joined = {cid: stored["roles"][name] for cid, name in parts.items() if name in stored["roles"]}
    metrics = {f"before_{name}": value for name, value in stored["data"]["before"].items()}

    def export(card: ModelCard, place: Path, role: str, **more: Any) -> None:
        exported = export_model(
            card=card,
            out=place,
            role=role,
            method=method.name,
            data=card.recipe.data,
            metrics=metrics,
            reference_latents=None,
            reference_request=reference_request(card, meta.seed, None),
            samples=[],
            **more,
        )
        print(
            f"exported step {meta.step} ({role}) to {exported.folder}; reloaded latents differ by "
            f"{exported.latents_difference:.1e}"
        )

    export(
        card,
        out,
        role,
        state=joined.pop(trainable_component(card), None),
        joined=joined,
        lora=method.lora,
        guidance=method.rollout_guidance(),
        parent=base,
    )
    for place, (name, other) in others.items():
        export(other, place, name, state=stored["roles"][name], lora=None, guidance=None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
