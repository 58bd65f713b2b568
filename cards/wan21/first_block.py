"""First Block Cache of diffusers around one forward, its memory brought along and taken away again.

The library keeps that memory in hooks on the module, where it would outlive a request, meet the forwards of others and
of training, and be lost to a saved request. Here the hooks are on for the length of one forward, and what they
remember is the caller's. Knows nothing about requests, steps or guidance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diffusers.hooks import FirstBlockCacheConfig
from diffusers.hooks.first_block_cache import _FBC_LEADER_BLOCK_HOOK

from cards.errors import UserError

CONTEXT = "call"
"""The library's name for whose memory it is; there is only ever one."""


@contextlib.contextmanager
def first_block_cache(transformer: Any, threshold: float, memory: Any) -> Iterator[None]:
    """Within it a forward of ``transformer`` skips all blocks but the first when the first block's residual differs
    from that of the last whole forward by a relative L1 of at most ``threshold``.

    ``memory`` has ``fields``, ``forwards`` and ``skipped`` (``loops.adaptive.BlockMemory``); a forward that raises
    leaves it as it was. Raises ``UserError`` where the network has a single block or caches already.
    """
    if len(transformer.blocks) < 2:
        raise UserError("got a transformer of one block, expected two or more; use loop kind 'diffusion_denoise'")
    if transformer.is_cache_enabled:
        raise UserError("got a transformer whose own cache is enabled; call its disable_cache() first")
    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        with transformer.cache_context(CONTEXT):
            hook = transformer.blocks[0]._diffusers_hook.get_hook(_FBC_LEADER_BLOCK_HOOK)
            kept = hook.state_manager.get_state()
            vars(kept).update(memory.fields)
            yield
            memory.fields = dict(vars(kept))
            memory.forwards += 1
            memory.skipped += not kept.should_compute
    finally:
        transformer.disable_cache()
