"""The text loop: a prompt is prefilled in one forward, then each forward gives one token.

Greedy decoding equals ``generate(do_sample=False)`` of transformers token for token. What a request has said is in its
``LoopState``; the keys and values of its tokens are behind a :class:`loops.loop.KV` handle in ``plugins``, so that a
pool of pages may stand in for the cache that grows. Tokens in, text out is the tokenizer's business, which the state
shares with the instance.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cards.errors import UserError
from cards.program import Node
from loops.loop import (
    KV,
    Done,
    Instance,
    KVSource,
    Loop,
    LoopContext,
    LoopResult,
    LoopState,
    ModelCall,
    Profile,
    Resources,
    StepResult,
    TokenBehaviour,
    TokenParams,
    WorkPlan,
    WorkUnit,
)
from loops.options import LoopOptions, read_options
from loops.sampling import choose, cut_at_stop, token_logprob

KV_KEY = ("kv", "main")
"""Plugin key of the handle, one a guidance branch."""


@dataclass
class GrowingKV:
    """A cache of the request's own, which the first forward makes and each one lengthens."""

    cache: Any = None

    @property
    def length(self) -> int:
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    @property
    def batch_key(self) -> None:
        """Rows of unequal lengths do not fit one such cache."""
        return None

    def record(self, token_ids: Sequence[int]) -> None:
        """Nobody shares these tokens."""


@dataclass(frozen=True)
class Completion:
    """What the loop leaves."""

    text: str
    """Without special tokens, cut before the stop string."""
    token_ids: tuple[int, ...]
    """Every token that was chosen, the end token and those of a stop string among them."""
    prompt_tokens: int
    finish: Literal["stop", "length"]
    """stop: an end token or a stop string | length: max_tokens."""
    logprobs: Tensor | None = None
    """(N,) float64 on CPU under ROLLOUT and TRAIN: log p of each token by the model itself, see ``token_logprob``."""


class TextOptions(LoopOptions):
    """Options of ``ar_decode``."""

    system: str | None = None
    """First message of the chat that a plain prompt becomes the user's turn of; None leaves a prompt as it is."""
    behaviour: bool = False
    """A ROLLOUT keeps a ``TokenBehaviour``, whose log-probs are of one forward over the whole text as training runs it:
    what is recomputed equals them bit for bit where the rows of the batch are the same."""
    keeps_end: bool = False
    """A prompt that leaves no room for ``max_tokens`` loses its beginning, where else it is refused: for a text that
    another model wrote and nobody can shorten."""


class ARDecodeLoop(Loop):
    """``ar_decode``: one AR_PREFILL, then one AR_TOKEN a further token; under ROLLOUT a LOGPROB_BATCH, where the card
    asks for it.

    Parts: ``lm`` and, where it is not the card's first, ``tokenizer``.
    """

    def init(self, params: TokenParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None and params is not None
        limits = instance.card.sampling.text
        assert limits is not None
        component, tokenizer = ctx.spec.components["lm"], ctx.spec.components.get("tokenizer")
        options = read_options(TextOptions, ctx.spec, instance.card)
        said = as_chat(ctx.slots["prompt"], options.system)
        if options.keeps_end:
            room = max(1, limits.context - params.max_tokens)
            ids_1L = instance.tokenize(said, sys.maxsize, tokenizer)["ids"][:, -room:]
        else:
            ids_1L = instance.tokenize(said, limits.context, tokenizer)["ids"]
        prompt = tuple(int(token) for token in ids_1L[0])
        if not prompt:
            raise UserError("the prompt has no tokens; expected at least one")
        if len(prompt) + params.max_tokens > limits.context:
            raise UserError(
                f"got a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens}; the model's context holds "
                f"{limits.context}: shorten the prompt or use max_tokens <= {max(0, limits.context - len(prompt))}"
            )
        kv: KV = ctx.kv.open(component, prompt) if isinstance(ctx.kv, KVSource) else GrowingKV()
        if kv.length >= len(prompt):
            raise ValueError(
                f"the KV holds {kv.length} tokens of a prompt of {len(prompt)}; expected at most all but one"
            )
        return LoopState(
            step=0,
            total=params.max_tokens,
            params=params,
            tensors={"ids": ids_1L[:, kv.length :]},
            generator=torch.Generator("cpu").manual_seed(params.seed),
            plugins={KV_KEY: kv},
            captured={} if ctx.profile is Profile.SERVE else {"logprobs": []},
            facts={
                "component": component,
                "prompt_tokens": len(prompt),
                "eos": limits.eos,
                "cost": ctx.spec.cost,
                "token_ids": (),
                "text": None,
                "ended": False,
                "prompt_ids": ids_1L[0],
                "scores": options.behaviour and ctx.profile is Profile.ROLLOUT,
            },
            shared={"tokenizer": instance.tokenizer_of(tokenizer)},
        )

    def next(self, state: LoopState) -> WorkPlan | Done:
        if state.step >= state.total:
            return self._scoring(state)
        ids_1L, cost = state.tensors["ids"], state.facts["cost"]
        call = ModelCall(state.facts["component"], "next_logits", {"ids": ids_1L}, state=state.plugins[KV_KEY])
        first = state.step == 0
        return WorkPlan(
            unit=WorkUnit.AR_PREFILL if first else WorkUnit.AR_TOKEN,
            calls=(call,),
            label=f"prefill {ids_1L.shape[1]} tokens" if first else f"token {state.step + 1}/{state.total}",
            resources=Resources(seconds=cost.base_seconds + cost.per_token_seconds * ids_1L.shape[1]),
        )

    def _scoring(self, state: LoopState) -> WorkPlan | Done:
        """The forward that a ROLLOUT ends with, until it is done."""
        facts, cost = state.facts, state.facts["cost"]
        if not facts["scores"] or "scored" in state.tensors:
            return Done()
        ids_1L = torch.cat([facts["prompt_ids"], torch.tensor(facts["token_ids"])])[None]
        call = log_prob_call(facts["component"], ids_1L, torch.ones_like(ids_1L), drawn_at(state.params.temperature))
        return WorkPlan(
            unit=WorkUnit.LOGPROB_BATCH,
            calls=(call,),
            label=f"log-probs of {ids_1L.shape[1]} tokens",
            resources=Resources(seconds=cost.base_seconds + cost.per_token_seconds * ids_1L.shape[1]),
        )

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        p, facts = state.params, state.facts
        if state.step >= state.total:
            return replace(state, tensors={**state.tensors, "scored": result.outputs[0][0].cpu()})
        logits_V = result.outputs[0][0]
        assert state.generator is not None
        token = choose(logits_V, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, generator=state.generator)
        if "logprobs" in state.captured:
            state.captured["logprobs"].append(token_logprob(logits_V, token))
        ids = (*facts["token_ids"], token)
        # A stop string may span tokens, and a token may be part of a character: the whole text is looked at.
        text = cut_at_stop(self._text(state, ids), p.stop) if p.stop else None
        if state.step > 0:
            state.plugins[KV_KEY].record(facts["token_ids"][-1:])
        step = state.step + 1
        ended = token in facts["eos"] or text is not None
        return replace(
            state,
            step=step,
            total=step if ended else state.total,
            tensors={"ids": torch.tensor([[token]])},
            facts={**facts, "token_ids": ids, "text": text, "ended": ended},
        )

    def finalize(self, state: LoopState) -> LoopResult:
        facts, ids = state.facts, state.facts["token_ids"]
        logprobs = torch.stack(state.captured["logprobs"]) if "logprobs" in state.captured else None
        return LoopResult(
            Completion(
                text=self._text(state, ids) if facts["text"] is None else facts["text"],
                token_ids=ids,
                prompt_tokens=facts["prompt_tokens"],
                finish="stop" if facts["ended"] else "length",
                logprobs=logprobs,
            ),
            self._behaviour(state) if facts["scores"] else None,
        )

    def _behaviour(self, state: LoopState) -> TokenBehaviour:
        facts = state.facts
        ids_N = torch.tensor(facts["token_ids"])
        ended_N = torch.isin(ids_N, torch.tensor(facts["eos"], dtype=ids_N.dtype))
        return TokenBehaviour(
            prompt_ids=facts["prompt_ids"],
            token_ids=ids_N,
            logprobs=state.tensors["scored"][len(facts["prompt_ids"]) :],
            mask=ended_N.cumsum(0) - ended_N.long() == 0,
            temperature=drawn_at(state.params.temperature),
        )

    def _text(self, state: LoopState, ids: tuple[int, ...]) -> str:
        return str(state.shared["tokenizer"].decode(list(ids), skip_special_tokens=True))


def as_chat(prompt: Any, system: str | None) -> Any:
    """A plain prompt as the user's turn of a chat that ``system`` opens; as it is where there is none."""
    if system is None or not isinstance(prompt, str):
        return prompt
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": prompt}]


def drawn_at(temperature: float) -> float:
    """The temperature that log-probs are told at: where the most likely token is taken, the model's own."""
    return temperature if temperature > 0 else 1.0


def log_prob_call(component: str, ids_BL: Tensor, mask_BL: Tensor, temperature: float) -> ModelCall:
    """The forward that gives (B, L) log-probs of ``ids_BL``: the same for rollouts and for training."""
    return ModelCall(component, "token_log_probs", {"ids": ids_BL, "mask": mask_BL}, {"temperature": temperature})


def words_of(node: Node, result: LoopResult) -> dict[str, Any]:
    """What a node leaves in its slots: a text that takes the place of the prompt is there as words."""
    value = result.value
    if node.writes == "prompt" and isinstance(value, Completion):
        value = value.text
    return {**result.also, node.writes: value}
