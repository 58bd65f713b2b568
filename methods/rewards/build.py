"""From a Hydra node (conf/reward/*.yaml) to a reward, with errors that a user can act on.

Knows Hydra's ``_target_`` and how it wraps errors; knows no reward by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from cards.errors import UserError, unknown_name
from methods.rewards.reward import Reward


def build_reward(config: DictConfig | Mapping[str, Any]) -> Reward:
    """Instantiate the reward that ``config`` describes. No weights load.

    Raises:
        UserError: unknown class, unknown or missing key, bad value; nested rewards included.
    """
    tree: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    _check_keys(tree, "reward")
    try:
        reward = instantiate(tree, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    if not isinstance(reward, Reward):
        raise UserError(
            f"reward: got a {type(reward).__name__} from _target_ {tree.get('_target_')!r}, expected a class that"
            " derives from methods.rewards.reward.Reward; choose one of conf/reward/"
        )
    return reward


def _check_keys(node: Any, where: str) -> None:
    """Every node with a ``_target_`` has exactly keywords that its class takes, none required missing."""
    if not isinstance(node, Mapping):
        return
    if "_target_" in node:
        _check_target(node, where)
    for key, value in node.items():
        _check_keys(value, f"{where}.{key}")


def _check_target(node: Mapping[str, Any], where: str) -> None:
    target = node["_target_"]
    try:
        parameters = {
            name: parameter
            for name, parameter in inspect.signature(get_class(target)).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
    except Exception as error:  # Hydra's own error type differs with the reason
        raise UserError(
            f"{where}: got _target_ {target!r}, which is no importable class ({str(error).splitlines()[0]}); expected a"
            " class under methods.rewards; choose one of conf/reward/"
        ) from error
    given = [str(key) for key in node if not (str(key).startswith("_") and str(key).endswith("_"))]
    for key in given:
        if key not in parameters:
            raise unknown_name(f"key of {where} ({target})", key, parameters)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and (name not in given or node[name] == "???")
    ]
    if missing:
        raise UserError(f"{where} ({target}): missing {', '.join(missing)}; set e.g. {where}.{missing[0]}=...")
