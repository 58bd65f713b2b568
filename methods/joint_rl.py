"""joint_rl: any number of prompt refiners and a generator under one reward, each a policy of its own.

The refiners, called experts, rewrite an instruction one after the other. An iteration is that of ``methods.unirl``,
which is this with one expert; what is new is who gets which credit:

    shared      everyone gets the sample's advantage: that of R = task + weight * mean format of the experts
    per_expert  an expert gets the advantage of what it answers for, R_e = part_e + weight * format_e, where part_e is
                the mean of its own parts of the reward, of those that the prompt asks for; the generator gets that of
                the task. Each is normalised in its group by itself. A prompt that asks for none of an expert's parts
                teaches it nothing.

Each expert has an optimizer, a learning rate and a version of its own. No gradient crosses between models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cards.errors import UserError, unknown_name
from inference.artifact import Artifact
from methods.advantages import group_advantages
from methods.method import Context
from methods.rewards.reward import Reward
from methods.rewards.scoring import GroupRewards
from methods.rewrites import Format, make_format
from methods.roles import STUDENT
from methods.unirl import Credit, UniRL

CreditRule = Literal["shared", "per_expert"]


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One of the refiners."""

    component: str
    """The card's component, ``llm_colour`` of the expert ``colour``."""
    parts: tuple[str, ...] = ()
    """Parts of the reward that it answers for, see ``Reward.part_names``."""
    lr: float | None = None
    """Its learning rate; None takes ``lm_lr``."""
    format: str | None = None
    """Of its texts; None takes the method's for the last expert and ``ended`` for those before it."""


class JointRL(UniRL):
    """See the module's docstring; all that is not here is as in :class:`methods.unirl.UniRL`.

    Args:
        experts: the refiners in the order in which the card has them, each a mapping of :class:`Expert`'s fields.
        credit: ``shared`` | ``per_expert``.
    """

    name = "joint_rl"
    remedy = "name the card's own in method.experts, in its order, or use card=multi_expert"

    def __init__(self, *, experts: Sequence[Mapping[str, Any]], credit: CreditRule = "shared", **options: Any):
        super().__init__(**options)
        if credit not in get_args(CreditRule):
            raise unknown_name("method credit", str(credit), get_args(CreditRule))
        self.experts = tuple(make_expert(entry) for entry in experts)
        self.rule = credit
        self.refiners = tuple(expert.component for expert in self.experts)
        if not self.refiners or len(set(self.refiners)) != len(self.refiners):
            raise UserError(f"method experts: got {list(self.refiners)}, expected at least one component, each once")
        self._rates = {e.component: self.lm_lr if e.lr is None else e.lr for e in self.experts}
        named = [*("ended" for _ in self.experts[1:]), None]
        self._formats = {
            expert.component: self.format if name is None else make_format(name)
            for expert, fallback in zip(self.experts, named, strict=True)
            for name in (fallback if expert.format is None else expert.format,)
        }

    def rate_of(self, component: str) -> float:
        return self._rates[component]

    def format_of(self, component: str) -> Format:
        return self._formats[component]

    def reward_problems(self, reward: Reward) -> list[str]:
        if self.rule == "shared":
            return []
        known = reward.part_names()
        said = f"reward {reward.name!r} has the parts {', '.join(known) or '(none)'}"
        found = []
        for expert in self.experts:
            unknown = [part for part in expert.parts if part not in known]
            if unknown or not expert.parts:
                got = ", ".join(unknown or expert.parts) or "none"
                found.append(
                    f"method experts: {expert.component} answers for {got}, but {said}; give it some of these as "
                    "parts, or use method.credit=shared"
                )
        return found

    def observed(self, artifacts: Sequence[Artifact], metadata: Sequence[Any]) -> dict[str, NDArray[np.float64]]:
        """Beside what UniRL sees, of each expert its own format and how much of what it answers for the last text says
        rightly."""
        columns = super().observed(artifacts, metadata)
        columns |= {f"refine/format_{name}": values for name, values in self.formats(artifacts).items()}
        for expert in self.experts:
            right = np.full(len(artifacts), np.nan)
            for i, artifact in enumerate(artifacts):
                if artifact.refined is not None:
                    kept = self.format.parts_kept(artifact.refined, metadata[i])
                    right[i] = _mean_of([kept[part] for part in expert.parts if part in kept])
            columns[f"refine/right_{expert.component}"] = right
        return columns

    def credits(self, scored: GroupRewards, seen: Mapping[str, NDArray[np.float64]], ctx: Context) -> dict[str, Credit]:
        if self.rule == "shared":
            return super().credits(scored, seen, ctx)
        rewards = {STUDENT: scored.rewards_GK}
        for expert in self.experts:
            own_GK = answered_for(expert, scored)
            rewards[expert.component] = self.total(own_GK, seen[f"refine/format_{expert.component}"])
        return {name: Credit(*group_advantages(table, std=self.advantage_std)) for name, table in rewards.items()}


def make_expert(entry: Mapping[str, Any]) -> Expert:
    """``Expert`` from a config; raises ``UserError`` that names an unknown or missing key."""
    known = [field.name for field in fields(Expert)]
    if not isinstance(entry, Mapping):
        raise UserError(f"method experts: got {entry!r}, expected a mapping with {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise unknown_name("key of method experts", str(key), known)
    if not isinstance(entry.get("component"), str):
        raise UserError(f"method experts: got {dict(entry)}, expected a component in each entry")
    parts = entry.get("parts", ())
    if isinstance(parts, str):
        raise UserError(f"method experts: parts: got {parts!r}, expected a list of names")
    expert = Expert(**{**entry, "parts": tuple(() if parts is None else parts)})
    if expert.lr is not None and not expert.lr >= 0:
        raise UserError(f"method experts: {expert.component}: lr: got {expert.lr}, expected a number >= 0")
    return expert


def answered_for(expert: Expert, scored: GroupRewards) -> NDArray[np.float64]:
    """(G, K) mean of an expert's parts of the reward, of those that are known; NaN for none, and where it failed."""
    parts_PGK = np.stack([scored.parts_GK[part] for part in expert.parts])
    known_PGK = np.isfinite(parts_PGK)
    counts_GK = known_PGK.sum(0)
    means_GK = np.where(known_PGK, parts_PGK, 0.0).sum(0) / np.maximum(counts_GK, 1)
    return np.where((counts_GK > 0) & np.isfinite(scored.rewards_GK), means_GK, np.nan)


def _mean_of(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
