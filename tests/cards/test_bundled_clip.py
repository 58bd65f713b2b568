"""The bundled tiny CLIP: loads in plain transformers, is small, and ranks right captions above wrong ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import CLIPModel, CLIPProcessor

from cards.card import ModelCard
from cards.errors import UserError
from cards.registry import family
from cards.reward.card import card_from_folder
from cards.source import BUNDLED, SourceError, check_source
from inference.engine import Engine
from inference.load import card_of
from loops.score import spread, tiled
from methods.rewards.card_reward import CardReward
from methods.rewards.reward import RewardBatch
from methods.shapeworld.render import render
from methods.shapeworld.scene import COLOURS, MOTIONS, RELATIONS, SHAPES, caption, captions, parse, sample_scene
from scripts.pretrain.clip import attributes, build_tokenizer, byte_pairs, edits, normalised, picture, saying

FOLDER = BUNDLED / "reward" / "weights" / "tiny"


@pytest.fixture(scope="module")
def reward() -> CardReward:
    made = CardReward(card={"name": "reward", "size": "tiny"}, name="tiny_clip")
    made.check()
    made.prepare()
    return made


def test_the_folder_is_small_and_holds_safetensors_only() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md"}


def test_the_card_is_that_of_its_folder_and_sees_pictures_of_four_frames() -> None:
    card = family("reward").card("tiny")
    assert card.problems() == [] and card.source.kind == "bundled"
    check_source(card)
    assert card_of("reward") == card
    other = card_from_folder(FOLDER)
    assert (other.sampling, other.loops, other.size) == (card.sampling, card.loops, "tiny")
    assert ModelCard.from_json(card.to_json()) == card
    score = card.sampling.score
    assert score is not None and (score.frames, score.grid) == (4, 2)
    assert card.components["clip"].dtype == "float32"
    with pytest.raises(SourceError, match=r"'someone/else'"):
        family("reward").card("tiny", source="someone/else")


def test_the_served_score_is_that_of_plain_transformers(reward: CardReward) -> None:
    rng = np.random.default_rng(0)
    model, processor = CLIPModel.from_pretrained(FOLDER).eval(), CLIPProcessor.from_pretrained(FOLDER)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prompt = "a red circle moves left"
    clip = render(parse(prompt), rng)
    shown = tiled(torch.from_numpy(clip[spread(9, 4)]), 2)[0]
    assert shown.shape == (64, 64, 3)
    inputs = processor(text=[prompt], images=[shown.numpy()], return_tensors="pt", padding="max_length", max_length=24)
    torch.testing.assert_close(inputs["pixel_values"], normalised(picture(clip)[None]))  # as it was trained
    with torch.no_grad():
        expected = model(**inputs).logits_per_image.item() / 100
    got = reward.score(RewardBatch([clip], [prompt], [{}])).values
    np.testing.assert_allclose(got, [expected], rtol=1e-5)


@pytest.mark.parametrize("attribute", ["colour", "shape", "motion", "position", "count"])
def test_right_captions_are_above_wrong_ones(reward: CardReward, attribute: str) -> None:
    """On fresh scenes, held-out combinations among them; a coin gives half."""
    rng = np.random.default_rng(5)
    clips, prompts = [], []
    while len(clips) < 80:
        scene = sample_scene(rng, {"position": "pair", "count": "count"}.get(attribute))
        wrong = [s for s in edits(scene) if attributes(scene, s) == {attribute} and not saying(s, scene)]
        if wrong:
            clips += [render(scene, rng)] * 2
            prompts += [caption(scene, rng), caption(wrong[int(rng.integers(len(wrong)))], rng)]
    right, wrong_values = reward.score(RewardBatch(clips, prompts, [{}] * len(clips))).values.reshape(-1, 2).T
    figures = json.loads((FOLDER / "FIGURES.json").read_text())["edited"]
    print(f"{attribute}: {np.mean(right > wrong_values):.3f}, measured {figures['held_out'][attribute]:.3f} held out")
    assert np.mean(right > wrong_values) >= 0.8


def test_figures_were_measured() -> None:
    figures = json.loads((FOLDER / "FIGURES.json").read_text())
    for part in ("retrieval", "edited"):
        assert all(0 <= value <= 1 for row in figures[part].values() for value in row.values())
    assert figures["shape_eval"]["pearson_score"] > 0.3
    assert (FOLDER / "README.md").read_text().count(f"{figures['shape_eval']['pearson_score']:.3f}") == 1


# -- how it was trained


def test_every_word_of_the_world_is_one_token() -> None:
    rng = np.random.default_rng(1)
    sentences = [said for _ in range(50) for said in captions(sample_scene(rng))]
    for tokenizer in (build_tokenizer(), CLIPProcessor.from_pretrained(FOLDER).tokenizer):
        for said, ids in zip(sentences, tokenizer(sentences).input_ids, strict=True):
            assert len(ids) == len(said.replace(",", " ,").split()) + 2 <= 24
        assert len(tokenizer("zebra").input_ids) > 3  # letters stand in
    assert build_tokenizer().get_vocab() == build_tokenizer().get_vocab()


def test_byte_pairs_by_hand() -> None:
    """a b</w> is in both words; b ab</w> is all that is left."""
    assert byte_pairs({"ab", "bab"}) == [("a", "b</w>"), ("b", "ab</w>")]


def test_edits_differ_in_one_attribute() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        scene = sample_scene(rng)
        found = edits(scene)
        assert all(len(attributes(scene, other)) == 1 for other in found) and scene not in found
        expected = len(scene.things) * (len(COLOURS) - len(scene.things) + len(SHAPES) - 1)
        expected += (len(MOTIONS) - 1) * (scene.motion is not None)
        expected += (len(RELATIONS) - 1) * (scene.relation is not None) + 2 * (scene.count > 1)
        assert len(found) == expected


def test_what_a_caption_may_also_be_true_of() -> None:
    def true(asked: str, shown: str) -> bool:
        return saying(parse(asked), parse(shown))

    assert true("a red circle left of a blue square", "a blue square right of a red circle")
    assert true("a red circle above a blue square", "a blue square below a red circle, both moving up")
    assert not true("a red circle left of a blue square", "a blue square left of a red circle")
    assert not true("two red circles", "three red circles")
    assert not true("a red circle moves left", "a red circle moves right")
    pair = "a red circle left of a blue square, both moving"
    assert not true(f"{pair} up", f"{pair} down")


def test_an_engine_takes_it_by_its_name() -> None:
    assert Engine().load("reward").card.name == "reward-tiny"
    with pytest.raises(UserError, match=r"clip-b32, clip-l14, tiny"):
        family("reward").card("clip-x")
