"""The text encoder's auxiliary task: labels follow the caption's meaning, and the encoder can learn them."""

from __future__ import annotations

import numpy as np
import torch

from methods.shapeworld.scene import captions, sample_scene
from scripts.pretrain.places import ALONE, IGNORED, OPPOSITE, RELATIONS, PlaceHead, place_labels, places
from scripts.pretrain.tiny_wan import build_text_encoder, build_tokenizer


def test_both_objects_are_labelled_from_their_own_side() -> None:
    left, right, above, below = (RELATIONS.index(name) for name in ("left of", "right of", "above", "below"))
    assert places("a red circle left of a blue square") == (("red", left), ("blue", right))
    assert places("there is a green triangle over a magenta triangle, holding still together") == (
        ("green", above),
        ("magenta", below),
    )
    assert places("a red circle moves left") == (("red", ALONE),)
    assert places("") == ()
    assert all(OPPOSITE[OPPOSITE[name]] == name for name in RELATIONS)


def test_labels_lie_on_the_words_of_the_objects() -> None:
    tokenizer = build_tokenizer()
    said = ["a red circle left of a blue square", "", "a green square above a red square"]
    ids = tokenizer(said, padding=True, return_tensors="pt").input_ids
    labels = place_labels(tokenizer, said, ids)
    words = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in ids]
    left, right, above, below = (RELATIONS.index(name) for name in ("left of", "right of", "above", "below"))
    found = [
        {word: label for word, label in zip(row, marks, strict=True) if label != IGNORED}
        for row, marks in zip(words, labels.tolist(), strict=True)
    ]
    assert found[0] == {"▁red": left, "▁circle": left, "▁blue": right, "▁square": right}
    assert found[1] == {}
    assert labels[2].tolist()[:7] == [IGNORED, above, above, IGNORED, IGNORED, below, below]
    assert set(found[2].values()) == {above, below}


def test_the_encoder_learns_places_from_text_alone() -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    encoder = build_text_encoder(len(tokenizer)).train()
    head = PlaceHead(encoder.config.d_model)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=3e-3)
    rng = np.random.default_rng(0)

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        options = [captions(sample_scene(rng, "pair")) for _ in range(n)]
        said = [sentences[int(rng.integers(len(sentences)))] for sentences in options]
        tokens = tokenizer(said, padding=True, return_tensors="pt")
        hidden = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return hidden, place_labels(tokenizer, said, tokens.input_ids)

    for _ in range(250):
        loss = head.loss(*batch(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        hidden, labels = batch(256)
        right = (head(hidden).argmax(-1) == labels)[labels != IGNORED].float().mean()
    assert right >= 0.97  # chance is 0.25
