"""Export: the trained role as a derived card and a diffusers folder that plain ``diffusers`` loads.

Ends with a strict reload and one seeded request whose latents must equal the trainer's own; only then does the folder
appear under its name. ``python -m fastvideo_train.export ckpt=outputs/<run>/checkpoints/last out=<folder>`` exports any
checkpoint of a run later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from cards.card import CARD_FILE, Component, ModelCard, Recipe, Source
from cards.errors import UserError
from cards.needs import MODULE_KINDS
from cards.source import BESIDE, component_folder, load_component, resolve_folder, weight_files
from fastvideo_train.cli import Options, parse_options, run_program, usage
from inference.engine import Engine
from inference.media import write_video
from inference.plain_request import plain_inputs, plain_task
from inference.request import Request
from inference.resident import Resident
from methods.ladder import denoising_loop, ladder_of
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
    samples: list[tuple[str, np.ndarray]],
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
        _save_lora(aside / "lora", state, role, lora)
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
    _write_readme(aside, child, samples)
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


def _save_lora(folder: Path, state: dict[str, Any], role: str, lora: Any) -> None:
    """With its config: without alpha a loader takes alpha = rank, which is another strength."""
    from diffusers import WanPipeline
    from peft import LoraConfig

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)).to_dict()
    WanPipeline.save_lora_weights(
        folder, transformer_lora_layers=lora_state(state, role), transformer_lora_adapter_metadata=config
    )


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


def _write_readme(folder: Path, card: ModelCard, samples: list[tuple[str, np.ndarray]]) -> None:
    """Model card for people, with sample clips as GIFs."""
    name = folder.name.removeprefix(".").removesuffix(".tmp")
    lines = [
        f"# {card.name}",
        "",
        f"Made by `{card.recipe.method}` from the card `{card.recipe.parents[0][:12]}`. Digest `{card.digest}`.",
        "",
        *_usage_lines(name, folder, card),
        *_refiner_lines(name, card),
        "",
    ]
    if card.recipe.metrics:
        lines += ["| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in sorted(card.recipe.metrics.items())] + [""]
    if samples:
        (folder / "samples").mkdir()
        lines += ["| prompt | sample |", "|---|---|"]
        for i, (prompt, frames) in enumerate(samples):
            name = f"samples/{i:02d}.gif"
            write_video(folder / name, np.repeat(np.repeat(frames, 4, axis=1), 4, axis=2), card.sampling.fps)
            lines.append(f"| {prompt} | ![]({name}) |")
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _refiner_lines(name: str, card: ModelCard) -> list[str]:
    """What plain diffusers leaves out of a card that rewrites prompts."""
    nodes = [n for n in card.programs[plain_task(card)].nodes if n.writes == "prompt" and n.loop is not None]
    folders = [card.components[card.loops[n.loop].components["lm"]].subfolder for n in nodes if n.loop is not None]
    if not folders:
        return []
    said = ", ".join(f"`{folder}/`" for folder in folders)
    return [
        "",
        f"That samples from a prompt as it is. The card has it rewritten first, by the language model in {said}:",
        f'`python -m fastvideo_train.generate ckpt={name} prompt="a crimson ball drifting west"`.',
    ]


def _usage_lines(name: str, folder: Path, card: ModelCard) -> list[str]:
    """How plain diffusers samples the folder, and by which sampler."""
    s, spec = card.sampling, card.loops[denoising_loop(card)]
    ladder = spec.schedule.ladder
    call = [
        f'video = pipe("a red circle moves left", height={s.height}, width={s.width}, num_frames={s.frames},',
        f"             num_inference_steps={s.steps}, guidance_scale={spec.guidance.scale},",
    ]
    pipeline = json.loads((folder / "model_index.json").read_text())["_class_name"]
    if card.programs[plain_task(card)].inputs:
        call.insert(1, '             image=load_image("first.png"),')
    load = f'pipe = {pipeline}.from_pretrained("{name}", dtype=torch.float32)'
    convention = f"guidance {spec.guidance.scale} ({spec.guidance.convention} convention)"
    if ladder is None:
        return [
            "```python",
            "import torch",
            f"from diffusers import {pipeline}",
            *(["from diffusers.utils import load_image"] if len(call) > 2 else []),
            "",
            load,
            *call,
            '             generator=torch.Generator("cpu").manual_seed(1)).frames[0]',
            "```",
            "",
            f"Sampler: {spec.solver}, shift {spec.schedule.shift}, {s.steps} steps, {convention}.",
        ]
    return [
        "```python",
        "from functools import partial",
        "",
        "import torch",
        "from diffusers import WanPipeline",
        "",
        load,
        "# The pipeline gives its scheduler neither sigmas nor a generator: without the ladder it samples a grid that",
        "# the weights were not made for, without the generator no seed repeats.",
        'generator = torch.Generator("cpu").manual_seed(1)',
        f"pipe.scheduler.set_timesteps = partial(pipe.scheduler.set_timesteps, sigmas={list(ladder)})",
        "pipe.scheduler.step = partial(pipe.scheduler.step, generator=generator)",
        *call,
        "             generator=generator).frames[0]",
        "```",
        "",
        f"Sampler: {spec.solver} on the ladder of sigmas {list(ladder)}, which is final (no shift), {convention}. "
        "Serving the card refuses another number of steps and another solver.",
    ]


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
