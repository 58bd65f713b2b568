"""The text loop: a prompt is prefilled in one forward, then each forward gives one token.

Greedy decoding equals ``generate(do_sample=False)`` of transformers token for token. What a request has said is in its
``LoopState``; the keys and values of its tokens are behind a :class:`loops.loop.KV` handle in ``plugins``, so that a
pool of pages may stand in for the cache that grows. Tokens in, text out is the tokenizer's business, which the state
shares with the instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cards.errors import UserError
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
    TokenParams,
    WorkPlan,
    WorkUnit,
)
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


class ARDecodeLoop(Loop):
    """``ar_decode``: one AR_PREFILL, then one AR_TOKEN a further token."""

    def init(self, params: TokenParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None and params is not None
        limits = instance.card.sampling.text
        assert limits is not None
        component = ctx.spec.components["lm"]
        ids_1L = instance.tokenize(ctx.slots["prompt"], limits.context)["ids"]
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
            },
            shared={"tokenizer": instance.tokenizer},
        )

    def next(self, state: LoopState) -> WorkPlan | Done:
        if state.step >= state.total:
            return Done()
        ids_1L, cost = state.tensors["ids"], state.facts["cost"]
        call = ModelCall(state.facts["component"], "next_logits", {"ids": ids_1L}, state=state.plugins[KV_KEY])
        first = state.step == 0
        return WorkPlan(
            unit=WorkUnit.AR_PREFILL if first else WorkUnit.AR_TOKEN,
            calls=(call,),
            label=f"prefill {ids_1L.shape[1]} tokens" if first else f"token {state.step + 1}/{state.total}",
            resources=Resources(seconds=cost.base_seconds + cost.per_token_seconds * ids_1L.shape[1]),
        )

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        p, facts = state.params, state.facts
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
            )
        )

    def _text(self, state: LoopState, ids: tuple[int, ...]) -> str:
        return str(state.shared["tokenizer"].decode(list(ids), skip_special_tokens=True))
