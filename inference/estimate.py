"""What a request will need, before any of its tensors exists: device seconds, bytes, cache blocks.

Reads the card, the resolved request and the cost figures; runs nothing. Worst case: the admission of a whole request
rests on it.
"""

from __future__ import annotations

from collections.abc import Iterator

from cards.card import ModelCard
from cards.needs import MODULE_KINDS
from cards.program import Node
from cards.registry import family
from inference.admission import Demand, Weights
from inference.cost import CostBook, Workload, workload_of
from inference.instance import ModelInstance
from inference.peak import config_of, request_peak_bytes, text_parts
from inference.request import ResolvedRequest
from inference.slab_kv import features_bytes
from loops.forecast import forecast
from loops.loop import ModelCall, SamplingParams, TokenParams, WorkPlan
from loops.score import ScoreParams

FLOAT_BYTES = 4
TEXT_WIDTH = 4096
CLIPS_HELD = 6
"""Clips of latents that a request holds at most: its own, the solver's last outputs and sample, what a step adds."""

SOLVER_BYTES = 64 * 1024
"""Tables of a solver: sigmas, timesteps and what diffusers' schedulers keep of the training schedule."""
PREPARED_FRAME_BYTES = 3 * 336 * 336 * FLOAT_BYTES
"""A frame as a scorer takes it, at the largest size of the published CLIP models."""


def tokens_of_call(call: ModelCall, card: ModelCard) -> int:
    """Tokens of one row of a call: of the transformer where it has latents, else of the first input's second dim."""
    latents = call.tensors.get("latents")
    if latents is not None and latents.ndim == 5:
        _, _, frames, height, width = latents.shape
        t, h, w = card.geometry.patch
        return max(1, (frames // t) * (height // h) * (width // w))
    shape = next(iter(call.tensors.values())).shape
    return shape[1] if len(shape) > 1 else 1


def step_seconds(plan: WorkPlan, card: ModelCard, book: CostBook) -> float:
    """Predicted device seconds of a step, each of its calls by itself."""
    return sum(book.predict(workload_of(call, tokens_of_call(call, card))) for call in plan.calls)


def _text_width(instance: ModelInstance) -> int:
    """Width of the widest prompt embedding of a card's encoders; TEXT_WIDTH where a config does not say."""
    ids = {n.component for program in instance.card.programs.values() for n in program.nodes if n.op == "encode"}
    residents = [instance.residents.get(str(cid)) for cid in ids]
    configs = [None if resident is None else getattr(resident.plan(), "config", None) for resident in residents]
    widths = [getattr(c, "d_model", getattr(c, "hidden_size", TEXT_WIDTH)) for c in configs]
    return max(widths, default=0)


def demand_of(
    resolved: ResolvedRequest,
    nodes: tuple[Node, ...],
    instance: ModelInstance,
    book: CostBook,
    *,
    cache_bytes: int = 0,
    weights: Weights = (),
) -> Demand:
    """The worst case of a whole request whose program runs ``nodes``."""
    return Demand(
        seconds=book.request_seconds(_forwards(resolved, nodes, instance.card)),
        resident_bytes=_resident_bytes(resolved, nodes, instance, pooled=cache_bytes > 0)
        + features_bytes(resolved, nodes, instance),
        peak_bytes=request_peak_bytes(resolved, nodes, instance),
        cache_bytes=cache_bytes,
        weights=weights,
    )


def _forwards(resolved: ResolvedRequest, nodes: tuple[Node, ...], card: ModelCard) -> Iterator[tuple[Workload, int]]:
    """Each forward of a request with how often it runs; a loop's branches are rows of one step."""
    for node in nodes:
        if node.loop is None:
            assert node.component is not None
            yield Workload(node.component, "", 1, _node_tokens(node, resolved, card)), 1
            continue
        spec = card.loops[node.loop]
        ahead = forecast(spec, resolved.params_of(node.id), card)
        steps = {
            component: ahead.turns.get(part, ahead.steps)
            for part, component in spec.components.items()
            if card.components[component].kind in MODULE_KINDS
        }
        for component in sorted(steps):
            yield Workload(component, "", ahead.rows, ahead.tokens), steps[component]


def _node_tokens(node: Node, resolved: ResolvedRequest, card: ModelCard) -> int:
    if node.op == "encode" or not isinstance(resolved.params, SamplingParams):
        return card.sampling.max_sequence_length
    return _clip_tokens(resolved.params, card)


def _clip_tokens(params: SamplingParams, card: ModelCard) -> int:
    return card.geometry.tokens(params.frames, params.height, params.width)


def _held_of_text(resolved: ResolvedRequest, nodes: tuple[Node, ...], instance: ModelInstance) -> int:
    """Keys and values of all tokens that the longest of its texts may have, where no pool holds them."""
    kinds = {cid: component.kind for cid, component in instance.card.components.items()}
    known = family(instance.card.family).held_bytes()
    return max(
        (
            known[kinds[part.component]](config_of(instance, part.component), part.tokens)
            for part in text_parts(resolved, nodes, instance).values()
            if kinds[part.component] in known
        ),
        default=0,
    )


def _resident_bytes(
    resolved: ResolvedRequest, nodes: tuple[Node, ...], instance: ModelInstance, *, pooled: bool
) -> int:
    """What a request holds from step to step; ``pooled`` keys and values are cache blocks, not among it."""
    params, card = resolved.params, instance.card
    if isinstance(params, TokenParams):
        ids = 8 * (params.max_tokens + (0 if card.sampling.text is None else card.sampling.text.context))
        return ids + (0 if pooled else _held_of_text(resolved, nodes, instance))
    given = {} if resolved.request.inputs is None else resolved.request.inputs
    inputs = sum(tensor.numel() * tensor.element_size() for tensor in given.values())
    if isinstance(params, ScoreParams):
        return 2 * inputs + params.rows * PREPARED_FRAME_BYTES
    if not isinstance(params, SamplingParams):
        return inputs
    channels, frames, height, width = card.geometry.latent_shape(params.frames, params.height, params.width)
    texts = 0 if pooled else _held_of_text(resolved, nodes, instance)
    held = inputs + texts + SOLVER_BYTES + CLIPS_HELD * FLOAT_BYTES * channels * frames * height * width
    if resolved.pixels:
        held += FLOAT_BYTES * 3 * params.frames * params.height * params.width
    text = FLOAT_BYTES * card.sampling.max_sequence_length * _text_width(instance)
    return held + text * (2 if resolved.guided else 1)
