"""Worst-case activations: of a call before it runs, and of a request before its tensors exist.

The figures are those of the family's ``memory.py``; an operation without one counts as 0, so a budget of peak bytes
bounds nothing for its family. Knows sizes and configs; runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from cards.card import ModelCard
from cards.memory import ForwardSize
from cards.program import Node
from cards.registry import family
from inference.instance import ModelInstance
from inference.request import ResolvedRequest
from loops.ar_decode import TextOptions, as_chat
from loops.forecast import forecast
from loops.loop import ModelCall, Profile, SamplingParams, TokenParams, WorkPlan
from loops.options import read_options

_CONFIGS: WeakKeyDictionary[nn.Module, Mapping[str, Any]] = WeakKeyDictionary()
"""Configs as mappings: to make one takes longer than a forward's prediction may."""


def step_peak_bytes(plan: WorkPlan, instance: ModelInstance) -> int:
    """Worst case of a step: its calls as if they ran in one forward, which batching may make of them."""
    sizes = ((call, _size_of_call(call, instance.card)) for call in plan.calls)
    return plan.resources.peak_bytes + sum(_bytes(instance, call.component, call.method, size) for call, size in sizes)


def request_peak_bytes(resolved: ResolvedRequest, nodes: tuple[Node, ...], instance: ModelInstance) -> int:
    """Worst case over the steps of a request whose program runs ``nodes``."""
    operations = _operations(resolved, nodes, instance)
    return max((_bytes(instance, *operation, size) for operation, size in operations), default=0)


def config_of(instance: ModelInstance, component: str) -> Mapping[str, Any]:
    """The config of a component's module, which need not be built for it."""
    module = instance.residents[component].plan()
    known = _CONFIGS.get(module)
    if known is None:
        config: Any = getattr(module, "config", {})
        known = _CONFIGS[module] = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return known


@dataclass(frozen=True)
class TextPart:
    """The text that one node of a request makes."""

    component: str
    prompt: int
    """Tokens that it reads."""
    tokens: int
    """With all that may follow."""


def text_parts(resolved: ResolvedRequest, nodes: tuple[Node, ...], instance: ModelInstance) -> dict[str, TextPart]:
    """Node -> the text that it makes, in order. Only what the first reads is known; of the others as much as the
    context holds. Raises what tokenizing raises."""
    card = instance.card
    parts: dict[str, TextPart] = {}
    for node in nodes:
        params = resolved.params_of(node.id)
        if node.loop is None or not isinstance(params, TokenParams) or "lm" not in card.loops[node.loop].components:
            continue
        spec, limits = card.loops[node.loop], card.sampling.text
        assert limits is not None
        prompt = limits.context - params.max_tokens
        if not parts:
            said = as_chat(resolved.prompt, read_options(TextOptions, spec, card).system)
            prompt = instance.tokenize(said, limits.context, spec.components.get("tokenizer"))["ids"].shape[1]
        tokens = min(prompt + params.max_tokens, limits.context)
        parts[node.id] = TextPart(spec.components["lm"], max(0, prompt), tokens)
    return parts


def _operations(
    resolved: ResolvedRequest, nodes: tuple[Node, ...], instance: ModelInstance
) -> Iterator[tuple[tuple[str, str], ForwardSize]]:
    """((component, operation), size) of all that the nodes may call: of a loop, any operation of its components."""
    card = instance.card
    parts = text_parts(resolved, nodes, instance)
    sized = ((node, size) for node in nodes for size in _sizes_of_node(node, parts, resolved, instance))
    for node, size in sized:
        if node.loop is None:
            assert node.component is not None and node.op is not None
            yield (node.component, node.op), size
            continue
        spec = card.loops[node.loop]
        ahead = forecast(spec, resolved.params_of(node.id), card)
        part = replace(size, rows=ahead.rows)
        if ahead.frames is not None:
            part = replace(part, frames=ahead.frames, tokens=ahead.tokens)
        tile = spec.options.get("tile")
        if isinstance(tile, list):
            height, width = (int(pixels) // card.geometry.spatial for pixels in tile)  # type: ignore[arg-type]
            part = replace(part, height=min(height, size.height), width=min(width, size.width))
        for component in sorted(set(spec.components.values())):
            kind = card.components[component].kind
            for known, method in family(card.family).peak_bytes():
                if known == kind:
                    yield (component, method), part


def _bytes(instance: ModelInstance, component: str, method: str, size: ForwardSize) -> int:
    known = family(instance.card.family).peak_bytes().get((instance.card.components[component].kind, method))
    if known is None or component not in instance.residents:
        return 0
    return known(config_of(instance, component), size)


def _size_of_call(call: ModelCall, card: ModelCard) -> ForwardSize:
    text = next((call.tensors[name].shape[1] for name in ("text", "ids", "input_ids") if name in call.tensors), 0)
    clip = next((t for name, t in call.tensors.items() if name in ("latents", "tile") and t.ndim == 5), None)
    if clip is None:
        return ForwardSize(call.rows, text_tokens=text, past_tokens=_past(call.state, text))
    return _clip_size(call.rows, (clip.shape[2], clip.shape[3], clip.shape[4]), text, card)


def _past(state: Any, new: int) -> int:
    """Tokens whose keys and values a row reads. A row of one new token meets any others of its pool in a forward and is
    padded to the longest. Prompts meet those with as many new tokens, of which few have a past; theirs is the padding
    that is not counted."""
    length = getattr(state, "length", 0)
    return max(length, getattr(state, "padded_length", 0)) if new == 1 else length


def _sizes_of_node(
    node: Node, parts: Mapping[str, TextPart], resolved: ResolvedRequest, instance: ModelInstance
) -> tuple[ForwardSize, ...]:
    """One size, or of a text two: its prompt at once, and its last token after all others; of a rollout's text all
    tokens at once, too."""
    params, card = resolved.params_of(node.id), instance.card
    if isinstance(params, TokenParams):
        part = parts.get(node.id, next(iter(parts.values())))
        sizes = ForwardSize(1, text_tokens=part.prompt), ForwardSize(1, text_tokens=1, past_tokens=part.tokens)
        whole = ForwardSize(1, text_tokens=part.tokens)
        return sizes if resolved.request.profile is Profile.SERVE else (*sizes, whole)
    text = card.sampling.max_sequence_length
    if not isinstance(params, SamplingParams):
        return (ForwardSize(1, text_tokens=text),)
    _, *cells = card.geometry.latent_shape(params.frames, params.height, params.width)
    return (_clip_size(1, (cells[0], cells[1], cells[2]), text, card),)


def _clip_size(rows: int, cells: tuple[int, int, int], text_tokens: int, card: ModelCard) -> ForwardSize:
    frames, height, width = cells
    patch = card.geometry.patch
    tokens = (frames // patch[0]) * (height // patch[1]) * (width // patch[2])
    return ForwardSize(rows, frames, height, width, tokens, text_tokens)
