"""Roles: the models that a method trains, follows or compares with, as views over one loaded card.

A role replaces what is trained alone; text encoder and VAE are one object for all. With full weights a role is a copy
of the main trainable component, the denoiser; with LoRA every role is an adapter on the one module and the reference is
the base with adapters off. A teacher may be another card altogether. Further components may be trained beside the
denoiser, by its optimizer or by one of their own (:meth:`Roles.join`), always with full weights. Blending (old policy,
EMA) works on a role's own parameters, shard by shard under FSDP2.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cards.card import ModelCard
from cards.errors import UserError
from inference.instance import ModelInstance, Resident, adapter_context

STUDENT = "student"
OLD = "old"
REFERENCE = "reference"
TEACHER = "teacher"
CRITIC = "critic"
EMA = "ema"
UNTRAINED = (REFERENCE, TEACHER)
"""Roles that stay what the run started from, for good."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation by peft (arXiv 2106.09685)."""

    rank: int = 32
    alpha: int = 64
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


def trainable_component(card: ModelCard) -> str:
    """Id of the card's main trainable component, the student's: its transformer, or the first where it trains none."""
    trainable = [cid for cid, component in card.components.items() if component.trainable]
    return next((cid for cid in trainable if card.components[cid].kind == "transformer"), trainable[0])


def local(tensor: Tensor) -> Tensor:
    """Our shard of a tensor under FSDP2, the tensor itself otherwise."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def joined_names(card: ModelCard, role: str) -> dict[str, str]:
    """Component beside the main trainable one -> name of a role's module of it, where a method trains it too."""
    main = trainable_component(card)
    others = (cid for cid, component in card.components.items() if component.trainable and cid != main)
    return {cid: cid if role == STUDENT else f"{cid}_of_{role}" for cid in others}


class Roles(nn.ModuleDict):
    """Modules of the roles by name, and the engine's view of each.

    Args:
        base: the loaded card; its main trainable component becomes the student, object for object.
        names: roles besides the student.
        lora: None trains full weights.
        card: what the roles run; None is the base's. ``UNTRAINED`` roles run the base's own.
        trained: what has an optimizer: roles, and components that join with one of their own. Without the student the
            main component stays as it is and every role shares it.
        others: roles that are cards of their own, frozen. A critic starts from a teacher of its own shape.

    Raises ``UserError`` when a trained role shares a weight with another role.
    """

    _base: ModelInstance
    _card: ModelCard
    _others: dict[str, ModelInstance]
    _residents: dict[str, Resident]

    def __init__(
        self,
        base: ModelInstance,
        names: Iterable[str],
        lora: LoRA | None = None,
        *,
        card: ModelCard | None = None,
        trained: Iterable[str] = (STUDENT,),
        others: Mapping[str, ModelInstance] | None = None,
    ):
        super().__init__()
        self.component = trainable_component(base.card)
        self.lora = lora
        self.names = (STUDENT, *names)
        self.trained_names = tuple(trained)
        self._heads: dict[str, list[str]] = {}
        self._joined: dict[str, dict[str, str]] = {}
        """Component that is trained beside the student's main one -> role -> its module's name."""
        self.apart: list[str] = []
        """Those of them that have an optimizer of their own, by whose name it goes."""
        # Plain attributes: the shared components are the base's own, not submodules to train or shard.
        object.__setattr__(self, "_base", base)
        object.__setattr__(self, "_card", base.card if card is None else card)
        object.__setattr__(self, "_others", {} if others is None else dict(others))
        student = base.module(self.component)
        self[STUDENT] = student
        for name, other in self._others.items():
            self[name] = other.module(trainable_component(other.card)).requires_grad_(name in self.trained_names)
        if lora is None:
            student.requires_grad_(STUDENT in self.trained_names)
            for name in self.names[1:]:
                if name not in self._others and STUDENT in self.trained_names:
                    self[name] = copy.deepcopy(student).requires_grad_(name in self.trained_names)
        else:
            self._inject(student, lora)
        if lora is None and CRITIC in self.names and TEACHER in self._others:
            _copy_where_alike(self[TEACHER], self[CRITIC])
        self._check_apart()
        residents = {STUDENT: Resident(student, adapter=self.adapter(STUDENT))}
        for name in self.names[1:]:
            own = name in self or self.adapter(name) is not None
            residents[name] = Resident(self.module(name), adapter=self.adapter(name)) if own else residents[STUDENT]
        object.__setattr__(self, "_residents", residents)

    def _inject(self, student: nn.Module, lora: LoRA) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        student.requires_grad_(False)
        layers = [name for name, layer in student.named_modules() if isinstance(layer, nn.Linear)]
        missing = [t for t in lora.targets if not any(name == t or name.endswith(f".{t}") for name in layers)]
        if missing:
            ends = {re.search(r"[^.\d][^.]*(\.\d+)?$", name)[0] for name in layers}  # type: ignore[index]
            raise UserError(
                f"method lora: {type(student).__name__} has no linear layer {', '.join(missing)}; its linear layers "
                f"end in: {', '.join(sorted(ends))}"
            )
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are what we want
            for name in self.names:
                if self.adapter(name):
                    inject_adapter_in_model(config, student, adapter_name=name)
        # Activation checkpointing recomputes in the backward, outside any role's call: what is active there is what
        # the gradient is of.
        for layer in student.modules():
            if isinstance(layer, BaseTunerLayer):
                layer._active_adapter = [STUDENT]
        student.eval()  # the new layers too
        for key, parameter in student.named_parameters():
            parameter.requires_grad_(any(f".{name}." in key for name in self.trained_names))
        for name in self.names[1:]:
            if self.adapter(name):
                self.copy(name)

    def _check_apart(self) -> None:
        """A role that is trained must own its weights: an update of one would silently be one of the other."""
        owned = {name: {_storage(p) for p in self.parameters_of(name).values()} for name in self.names}
        for a, b in itertools.combinations(self.names, 2):
            if owned[a] & owned[b] and {a, b} & set(self.trained_names):
                raise UserError(f"roles {a} and {b} share weights, and one of them is trained; give each its own copy")

    def module(self, role: str) -> nn.Module:
        """The module that computes a role's main component."""
        return self[role] if role in self else self[STUDENT]

    def adapter(self, role: str) -> str | None:
        """The adapter that a role's calls switch on; "" is the base alone."""
        if self.lora is None or role in self._others:
            return None
        return "" if role in UNTRAINED else role

    def instance(self, role: str) -> ModelInstance:
        """The role as the engine serves it."""
        if role in self._others:
            other = self._others[role]
            return other.view({trainable_component(other.card): self._residents[role]})
        card = self._base.card if role in UNTRAINED else self._card
        joined = {component: self._residents[name] for component, name in self.joined(role).items()}
        return self._base.view({self.component: self._residents[role], **joined}, card=card)

    def changed(self, name: str) -> None:
        """Says that the weights of a role, or of a component with its own optimizer, moved: bumps their versions."""
        for part in self._moved(name):
            self._residents[part].version += 1

    def moves(self, role: str) -> bool:
        """Whether an optimizer moves any of the role's weights."""
        return role in self.trained_names or (role == STUDENT and bool(self.apart))

    def _moved(self, name: str) -> list[str]:
        """Modules that are a role's own, for the student without those of ``apart``; or the one of such a component."""
        if name in self.apart:
            return [name]
        joined = [n for cid, n in self.joined(name).items() if name != STUDENT or cid not in self.apart]
        return [name, *joined] if self._owns(name) else joined

    def _owns(self, role: str) -> bool:
        """Whether a role's main component is served apart from the student's."""
        residents = self.__dict__.get("_residents")
        return role == STUDENT or residents is None or residents[role] is not residents[STUDENT]

    def join(self, component: str, *, apart: bool = False, roles: Iterable[str] = ()) -> None:
        """Trains another component of the card. Every role of the card gets its own: sharded, saved, blended and served
        with the role's main component; the student's is the base's, object for object.

        Args:
            apart: by an optimizer of its own, which goes by the component's name; else by the student's.
            roles: roles of joined components alone, such as a reference; all else they share with the student.
        """
        for role in roles:
            if role not in self.names:
                self.names = (*self.names, role)
                self._residents[role] = self._residents[STUDENT]
        own = self._base.module(component)
        names = {r: joined_names(self._card, r)[component] for r in self.names if r not in self._others}
        for role, name in names.items():
            self[name] = own if role == STUDENT else copy.deepcopy(own).requires_grad_(False)
            self._residents[name] = Resident(self[name])
        own.requires_grad_(True)
        self._joined[component] = names
        if apart:
            self.apart.append(component)

    def joined(self, role: str) -> dict[str, str]:
        """Component that was joined -> name of the role's module of it."""
        return {component: names[role] for component, names in self._joined.items() if role in names}

    def parts(self, role: str) -> dict[str, str]:
        """Trained component -> name of the module that holds the role's weights of it."""
        main = {} if STUDENT not in self.trained_names else {self.component: STUDENT if self.lora is not None else role}
        return {**main, **self.joined(role)}

    def parameters_of(self, role: str) -> dict[str, nn.Parameter]:
        """The role's own parameters of the main component under the student's names, in one order for all roles; none
        where it shares the student's."""
        if role not in self and not self.adapter(role):
            return {}
        if self.lora is None or role in self._others:
            return dict(self[role].named_parameters())
        marker = f".{role}."
        return {
            key.replace(marker, f".{STUDENT}."): parameter
            for key, parameter in self[STUDENT].named_parameters()
            if marker in key
        }

    def attach(self, name: str, head: nn.Module, role: str) -> None:
        """Puts a head on a role: sharded and saved as ``name``, trained by the role's optimizer."""
        self[name] = head.requires_grad_(True)
        self._heads.setdefault(role, []).append(name)

    def trained(self, role: str = STUDENT) -> list[nn.Parameter]:
        """What the optimizer of a role, or of a component with its own, moves."""
        if role in self.apart:
            return [p for p in self[role].parameters() if p.requires_grad]
        names = (*self._heads.get(role, ()), *(name for name in self._moved(role) if name != role))
        heads = [p for name in names for p in self[name].parameters()]
        return [p for p in (*self.parameters_of(role).values(), *heads) if p.requires_grad]

    @contextlib.contextmanager
    def backward_of(self, role: str) -> Iterator[None]:
        """For a backward through the role's forwards: what activation checkpointing recomputes is the role's again."""
        adapter = self.adapter(role)
        if adapter is None:
            yield
        else:
            with adapter_context(self[STUDENT], adapter):
                yield

    def stored(self) -> dict[str, nn.Module]:
        """Modules that a checkpoint holds: all but what its source still has, such as a teacher, and what stays of the
        student and of roles that are cards of their own."""
        left = {TEACHER, *(name for name in (STUDENT, *self._others) if name not in self.trained_names)}
        return {name: module for name, module in self.items() if name not in left}

    def sharded_modules(self) -> Iterator[nn.Module]:
        """Modules that a sharding plan is to shard, each once."""
        yield from (self[name] for name in self)

    @torch.no_grad()
    def blend(self, role: str, keep: float, *, of: str | None = None) -> None:
        """``role <- keep role + (1 - keep) student``; ``keep = 0`` copies exactly. ``of``: only what that optimizer
        moves."""
        moved = []
        if of in (None, STUDENT) and self._owns(role):
            moved.append(role)
            source = self.parameters_of(STUDENT)
            for key, parameter in self.parameters_of(role).items():
                target, new = local(parameter), local(source[key])
                if keep == 0:
                    target.copy_(new)
                else:
                    target.mul_(keep).add_(new, alpha=1 - keep)
        for component, name in self.joined(role).items():
            if of not in (None, component if component in self.apart else STUDENT):
                continue
            moved.append(name)
            student = self[self._joined[component][STUDENT]]
            for parameter, new in zip(self[name].parameters(), student.parameters(), strict=True):
                local(parameter).lerp_(local(new), 1 - keep)
        residents = self.__dict__.get("_residents")
        if residents is not None:
            for name in moved:
                residents[name].version += 1

    def copy(self, role: str) -> None:
        """``role <- student``, exactly."""
        self.blend(role, 0.0)


def _storage(parameter: Tensor) -> int:
    """Identity of the memory behind a parameter, that of a parameter without memory too."""
    return local(parameter).untyped_storage()._cdata


@torch.no_grad()
def _copy_where_alike(source: nn.Module, target: nn.Module) -> None:
    """``target <- source`` when they have the same weights by name and shape; else ``target`` stays."""
    new, old = source.state_dict(), target.state_dict()
    if {key: value.shape for key, value in new.items()} == {key: value.shape for key, value in old.items()}:
        target.load_state_dict(new)
