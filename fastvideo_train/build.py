"""From a composed config to the objects of a run. No weights load here; every complaint is a ``UserError``.

Knows Hydra's ``_target_``; knows no method or reward by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from cards.registry import family
from fastvideo_train.parallel.plan import Plan, make_plan
from methods.method import Method
from methods.rewards.build import build_reward
from methods.rewards.reward import Reward

PRECISIONS = ("float32", "bfloat16")


def plain(node: Any) -> dict[str, Any]:
    """A config node as plain containers."""
    data = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def build_target(node: DictConfig, what: str) -> Any:
    """Instantiates ``_target_``; a wrong or missing key becomes a ``UserError``."""
    missing = OmegaConf.missing_keys(node)
    if missing:
        raise UserError(f"{what}: give {', '.join(f'{key}=...' for key in sorted(missing))}")
    try:
        return instantiate(plain(node), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, TypeError) and "argument" in str(cause):
            raise UserError(f"{what}: {cause}; see conf/{what}/") from None
        raise


def build_card(node: DictConfig) -> ModelCard:
    """The card of ``card.name``, ``card.size``, ``card.source``, ``card.revision`` and ``card.precision``."""
    options = plain(node)
    card = family(options["name"]).card(str(options["size"]), options["source"], options["revision"])
    precision = options["precision"]
    if precision is not None:
        if precision not in PRECISIONS:
            raise unknown_name("card.precision", str(precision), PRECISIONS)
        card = card.model_copy(
            update={"precision": card.precision.model_copy(update={"serve": precision, "train": precision})}
        )
    card.validate()
    return card


def build_method(node: DictConfig) -> Method:
    method = build_target(node, "method")
    if not isinstance(method, Method):
        raise UserError(f"method: got a {type(method).__name__}, expected a class that derives from Method")
    return method


def card_for(card: ModelCard, method: Method) -> ModelCard:
    """The card in the numerics that the method trains in, and so rolls out, exports and serves in."""
    if method.text_padding is None:
        return card
    return card.model_copy(
        update={"precision": card.precision.model_copy(update={"text_padding": method.text_padding})}
    )


def build_plan(node: DictConfig) -> Plan:
    options: Mapping[str, Any] = plain(node)
    return make_plan(options["name"], **{k: v for k, v in options.items() if k != "name"})


def build_method_reward(method: Method, node: DictConfig) -> Reward | None:
    """The reward of a method that needs one."""
    if not method.needs_reward:
        return None
    reward = build_reward(node)
    reward.check()
    return reward
