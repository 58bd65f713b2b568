"""From a composed config to the objects of a run. Every complaint is a ``UserError``; no weights load here, but by
``load_others``.

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
from cards.source import load_component, resolve_folder
from fastvideo_train.numerics import with_text_padding
from fastvideo_train.parallel.plan import Plan, make_plan
from fastvideo_train.rollouts import RolloutSettings, make_settings
from inference.instance import ModelInstance, Resident
from methods.method import Method
from methods.rewards.build import build_reward
from methods.rewards.reward import Reward
from methods.rewards.watch import watched
from methods.roles import trainable_component

PRECISIONS = ("float32", "bfloat16")
CARD_KEYS = ("name", "size", "source", "revision", "precision")
"""Keys that every card group has."""


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
    """The card of ``card.name``, ``card.size``, ``card.source``, ``card.revision``, ``card.precision`` and the family's
    own options, which null leaves to it."""
    options = plain(node)
    own = {name: value for name, value in options.items() if name not in CARD_KEYS and value is not None}
    card = family(options["name"]).card(str(options["size"]), options["source"], options["revision"], **own)
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


def in_numerics_of(card: ModelCard, method: Method) -> ModelCard:
    """The card in the numerics that the method trains in, and so rolls out, exports and serves in."""
    return card if method.text_padding is None else with_text_padding(card, method.text_padding)


def card_for(card: ModelCard, method: Method) -> ModelCard:
    """The card that a run of the method from ``card`` trains, evaluates and exports."""
    trained = method.derive_card(in_numerics_of(card, method))
    trained.validate()
    return trained


def load_others(base: ModelInstance, cards: Mapping[str, ModelCard]) -> dict[str, ModelInstance]:
    """The instance of each role that is a card of its own, by role. One from the base's own folder shares the base's
    frozen components; of another, what the role computes loads now and the rest when it is first used."""
    home = resolve_folder(base.card.source, base.card.root)
    others = {}
    for role, card in cards.items():
        folder = resolve_folder(card.source, card.root)
        if folder == home:
            component = trainable_component(card)
            module = load_component(card.components[component], folder, base.device)
            others[role] = base.view({component: Resident(module)}, card=card)
        else:
            others[role] = ModelInstance.from_folder(card, folder, base.device, tasks=())
    return others


def build_plan(node: DictConfig) -> Plan:
    options: Mapping[str, Any] = plain(node)
    return make_plan(options["name"], **{k: v for k, v in options.items() if k != "name"})


def build_rollouts(node: DictConfig) -> RolloutSettings:
    """How rollouts are executed."""
    return make_settings(plain(node))


def build_method_reward(method: Method, node: DictConfig) -> Reward | None:
    """The reward of a method that needs one; a learned one is watched."""
    if not method.needs_reward:
        return None
    reward = watched(build_reward(node))
    reward.check()
    return reward
