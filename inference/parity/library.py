"""The other side of the ladder: the library's own pipeline and modules, loaded from the same folder by the library.

Shares no code with our loops: only the folder and the seed. One class a family; a miss lists the families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import unknown_name
from cards.source import BESIDE, MODULE_KINDS, component_folder, resolve_folder, stands_alone
from inference.parity.transformers_library import ClipLibrary, GenerateLibrary
from inference.request import Request
from inference.resolve import denoise_spec, refine_nodes, resolve
from loops.options import read_options
from loops.solvers import RENOISING, SOLVERS
from loops.vae_tiles import TileOptions


class WanLibrary:
    """``diffusers.WanPipeline`` on a card's folder, in the card's dtypes."""

    def __init__(self, card: ModelCard, device: torch.device):
        from diffusers import WanPipeline

        dtypes: dict[str, torch.dtype] = {
            component.subfolder: getattr(torch, component.dtype)
            for component in card.components.values()
            if component.kind in MODULE_KINDS and component.class_name not in BESIDE and not stands_alone(component)
        }
        folder = resolve_folder(card.source, card.root)
        self.card = card
        self.pipeline = WanPipeline.from_pretrained(folder, dtype={**dtypes, "default": torch.float32}).to(device)
        self.pipeline.set_progress_bar_config(disable=True)
        self.own_scheduler = self.pipeline.scheduler
        by_tiles = (loop for loop in card.loops.values() if loop.kind == "vae_tiles")
        self.tiles = next((read_options(TileOptions, loop, card) for loop in by_tiles), None)

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """Text embedding (1, L, D)."""
        length = self.card.sampling.max_sequence_length
        return self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=length)[0]

    @torch.no_grad()
    def velocity(self, latents: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """Output (B, C, T, H, W) of the transformer called directly."""
        transformer = self.pipeline.transformer
        dtype = transformer.dtype
        return transformer(latents.to(dtype), timestep, text.to(dtype), return_dict=False)[0]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Video (B, 3, F, H, W) of normalised latents, by the VAE called directly, never by tiles."""
        vae = self.pipeline.vae
        vae.disable_tiling()
        shape = (1, -1, 1, 1, 1)
        std = torch.tensor(vae.config.latents_std, device=latents.device).view(shape)
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(shape)
        return vae.decode((latents.float() * std + mean).to(vae.dtype)).sample

    def sample(self, request: Request, *, solver: str, shift: float) -> tuple[Tensor, Tensor]:
        """Latents (C, T, H, W) and video (3, F, H, W) in [0, 1] of a request with every field set."""
        assert request.seed is not None
        generator = torch.Generator("cpu").manual_seed(request.seed)
        self.pipeline.scheduler = self._scheduler(solver, shift, generator)
        self._tile()
        last: list[Tensor] = []

        def keep(_pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            last[:] = [tensors["latents"]]
            return {}

        frames_BFCHW = self.pipeline(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            height=request.height,
            width=request.width,
            num_frames=request.frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=generator,
            max_sequence_length=self.card.sampling.max_sequence_length,
            output_type="pt",
            callback_on_step_end=keep,
        ).frames
        return last[0][0], frames_BFCHW[0].permute(1, 0, 2, 3)

    def _tile(self) -> None:
        """The pipeline decodes by tiles where the card does."""
        if self.tiles is None:
            return
        self.pipeline.vae.enable_tiling(
            tile_sample_min_height=self.tiles.tile[0],
            tile_sample_min_width=self.tiles.tile[1],
            tile_sample_stride_height=self.tiles.stride[0],
            tile_sample_stride_width=self.tiles.stride[1],
        )

    def _scheduler(self, solver: str, shift: float, generator: torch.Generator) -> Any:
        """The folder's own scheduler where the solver is the folder's, else a plain one of the solver's class.

        The pipeline gives a scheduler neither the sigmas of a ladder nor a generator to re-noise with: a new one is
        told of both.
        """
        import diffusers

        class_name, shift_key, options = SOLVERS[solver]
        ladder = denoise_spec(self.card, Request.task).schedule.ladder
        if ladder is not None:
            scheduler = getattr(diffusers, class_name)(**{**options, shift_key: 1.0})
            scheduler.set_timesteps = partial(scheduler.set_timesteps, sigmas=list(ladder))
            if solver in RENOISING:
                scheduler.step = partial(scheduler.step, generator=generator)
            return scheduler
        if type(self.own_scheduler).__name__ == class_name:
            return self.own_scheduler
        return getattr(diffusers, class_name)(**{**options, shift_key: shift})


class RefinedWanLibrary(WanLibrary):
    """``WanPipeline`` on the prompt that transformers' ``generate`` rewrote, greedily."""

    def __init__(self, card: ModelCard, device: torch.device):
        super().__init__(card, device)
        source = resolve_folder(card.source, card.root)
        self.refiners: dict[str, GenerateLibrary] = {}
        """Node that rewrites the prompt -> its model, in order."""
        for node in refine_nodes(card, Request.task):
            component = card.components[card.loops[node].components["lm"]]
            self.refiners[node] = GenerateLibrary(card, device, component_folder(component, source))

    def refine(self, prompt: str, max_tokens: int) -> str:
        """What ``generate(do_sample=False)`` makes of an instruction, as the tokenizer's chat template puts it; of what
        it made, the next one where there are several."""
        for node, refiner in self.refiners.items():
            told = self.card.loops[node].options["system"]
            chat = [{"role": "system", "content": told}, {"role": "user", "content": prompt}]
            options = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": False}
            ids_1L = torch.tensor([refiner.tokenizer.apply_chat_template(chat, **options)])
            tokens, _ = refiner.greedy(ids_1L, max_tokens)
            prompt = str(refiner.tokenizer.decode(tokens, skip_special_tokens=True))
        return prompt

    def sample(self, request: Request, *, solver: str, shift: float) -> tuple[Tensor, Tensor]:
        params = resolve(request, self.card).nodes[next(iter(self.refiners))]
        prompt = self.refine(request.prompt, params.max_tokens)
        return super().sample(replace(request, prompt=prompt), solver=solver, shift=shift)


LIBRARIES: dict[str, Callable[[ModelCard, torch.device], Any]] = {
    "multi_expert": RefinedWanLibrary,
    "qwen3": GenerateLibrary,
    "reward": ClipLibrary,
    "unified": RefinedWanLibrary,
    "wan21": WanLibrary,
    "wan_causal": WanLibrary,
}


def library_of(card: ModelCard, device: torch.device) -> Any:
    """The library's side of a card; raises ``UserError`` with the list of families."""
    if card.family not in LIBRARIES:
        raise unknown_name("family with a library to compare with", card.family, LIBRARIES)
    return LIBRARIES[card.family](card, device)
