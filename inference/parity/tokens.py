"""The behaviour gate (C2) of the texts that rewrite a clip's prompt: what training recomputes is what a rollout kept.

The log-prob of every token that a ROLLOUT drew comes out again when the text is evaluated the way a loss does, as a
``token_log_probs`` call under ``Profile.TRAIN``: bit for bit alone, within rounding in a batch of texts of other
lengths. So the ratio of the two policies is 1 where their weights are one. Knows nothing of losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import GateReport, tensor_difference, worst
from inference.plain_request import plain_inputs, plain_task
from inference.request import Request
from inference.resolve import denoise_spec, refine_nodes
from loops.ar_decode import log_prob_call
from loops.loop import Profile, TokenBehaviour

BATCH_TOLERANCE = 1e-6
"""Between a text's log-probs alone and among others, in float32 on a CPU."""
TEMPERATURE = 1.0


def token_gates(instance: ModelInstance, *, prompts: Sequence[str], seed: int) -> Iterator[GateReport]:
    """Two rows for each node that rewrites prompts; none for a card without any.

    The difference is nan for a NaN anywhere and inf where TRAIN gives weights that are trained no gradient.
    """
    task = plain_task(instance.card)
    nodes = refine_nodes(instance.card, task)
    if not nodes:
        return
    engine = Engine(instance.device, cache_bytes=0)
    rollouts = [
        engine.run(
            Request(
                prompt=prompt,
                task=task,
                inputs=plain_inputs(instance.card),
                seed=seed + i,
                steps=2 if denoise_spec(instance.card, task).schedule.ladder is None else None,
                guidance=1.0,
                temperature=TEMPERATURE,
                output="latents",
                profile=Profile.ROLLOUT,
            ),
            instance,
        )
        for i, prompt in enumerate(prompts)
    ]
    for node in nodes:
        drawn = [rollout.tokens[node] for rollout in rollouts]
        component = instance.card.loops[node].components["lm"]
        alone = worst(recompute(instance, component, [one])[0] for one in drawn)
        what = f"{node}: rollout log-probs == training's"
        yield GateReport("C2", f"{what}, alone", alone, instance.card.parity.tolerances["C2"])
        together = worst(recompute(instance, component, drawn))
        yield GateReport("C2", f"{what}, {len(drawn)} in a batch", together, BATCH_TOLERANCE)


def padded(drawn: Sequence[TokenBehaviour], fill: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, L) of whole texts, prompts and what was drawn, with padding on the right."""
    rows = [torch.cat([one.prompt_ids, one.token_ids]) for one in drawn]
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
    lengths_B = torch.tensor([len(row) for row in rows])
    return ids_BL, (torch.arange(ids_BL.shape[1]) < lengths_B[:, None]).long()


def recompute(instance: ModelInstance, component: str, drawn: Sequence[TokenBehaviour]) -> list[float]:
    """Of each text, the largest difference of its log-probs when all are evaluated together under TRAIN."""
    ids_BL, mask_BL = padded(drawn)
    (temperature,) = {one.temperature for one in drawn}
    again_BL = instance.call(log_prob_call(component, ids_BL, mask_BL, temperature), Profile.TRAIN)
    trained = any(parameter.requires_grad for parameter in instance.module(component).parameters())
    if again_BL.requires_grad != trained:
        return [math.inf]
    begins = [len(one.prompt_ids) for one in drawn]
    return [
        tensor_difference(row[begin : begin + len(one.token_ids)].cpu(), one.logprobs)
        for row, begin, one in zip(again_BL.detach(), begins, drawn, strict=True)
    ]
