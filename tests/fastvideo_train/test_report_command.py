"""The report's command line: composing it gives the run's configuration again. The oracle is Hydra."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fastvideo_train.paths import conf_dir
from fastvideo_train.report.command import overrides


def composed(words: list[str]) -> dict[str, Any]:
    """The resolved configuration as a run writes it to config.yaml, read back."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("train", words)
    OmegaConf.resolve(cfg)
    return yaml.safe_load(OmegaConf.to_yaml(cfg))


@pytest.mark.parametrize(
    "words",
    [
        ["method=diffusion_nft", "card=wan21", "seed=0"],
        ["method=finetune", "card=wan21", "seed=3", "steps=7", "batch_size=4", "lr=0.001"],
        ["method=diffusion_nft", "card=wan21", "seed=0", "eval.count=4", "method.mix=0.3", "method.kl=0.01"],
        ["method=finetune", "card=wan21", "parallel=fsdp2", "seed=0", "devices=2", "method.lora={rank:8,alpha:16}"],
        ["method=finetune", "card=wan21", "data=video_folder", "seed=0", "data.folder='/my videos, \\'all\\''"],
        ["method=diffusion_nft", "card=wan21", "reward=pick_score", "logger=csv", "seed=0", "card.size=1.3b"],
    ],
)
def test_the_words_give_the_configuration_again(words: list[str]) -> None:
    config = composed(words)
    said = overrides(config)
    assert composed(said) == config
    assert sorted(said) == sorted(words)  # and nothing that the menu says already
