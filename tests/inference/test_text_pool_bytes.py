"""How large a pool of keys and values is that nobody gave a size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cards.unified.card import card_from_folder
from inference import text_kv
from inference.instance import ModelInstance
from inference.load import card_of
from inference.text_kv import pool_bytes
from tests.support.tiny_unified import save_tiny_unified


@pytest.fixture(scope="module")
def unified(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    folder = save_tiny_unified(wan_folder, tmp_path_factory.mktemp("unified") / "card")
    return ModelInstance.load(card_from_folder(folder))


def block_bytes(instance: ModelInstance) -> int:
    """Of 16 tokens: keys and values of every layer, float32."""
    config: Any = instance.module("llm").config
    return 16 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4


def test_it_holds_so_many_texts(unified: ModelInstance) -> None:
    limits: Any = unified.card.sampling.text
    usual = -(-min(2 * limits.max_tokens, limits.context) // 16)
    assert pool_bytes(unified, 1000) == 1000 * usual * block_bytes(unified)
    assert pool_bytes(unified, 1) == -(-limits.context // 16) * block_bytes(unified)  # any one request fits


def test_a_card_without_texts_and_one_whose_requests_may_be_too_large_have_none(
    unified: ModelInstance, wan_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool_bytes(ModelInstance.load(card_of(wan_folder)), 32) == 0
    limits: Any = unified.card.sampling.text
    one = -(-limits.context // 16) * block_bytes(unified)
    monkeypatch.setattr(text_kv, "MOST_BYTES", one)
    assert pool_bytes(unified, 1000) == one
    monkeypatch.setattr(text_kv, "MOST_BYTES", one - 1)
    assert pool_bytes(unified, 1000) == 0
