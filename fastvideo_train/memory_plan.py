"""What a run will hold in a device's memory, role by role, without loading a weight.

The run's own parts are put together on tensors without memory: the card's modules from their configs, the method's
roles and optimizers by ``PostTrainingModule`` itself, and one micro batch of training (the student's forward with
gradient, the other roles' beside it, the backward) whose live tensors are counted operation by operation; of a trained
language model, a batch of text. Nothing here knows a method or a family by name.

Not counted: scratch memory inside kernels, the forwards of reward models and rewards that are no card, buffers of the
communication library, what the allocator keeps for itself and the driver's own memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cards.card import Component, ModelCard
from cards.memory import ForwardSize
from cards.needs import MODULE_KINDS, needed_components
from cards.registry import family
from cards.source import build_on_meta, resolve_folder
from fastvideo_train.live_bytes import LiveBytes
from fastvideo_train.module import PostTrainingModule
from fastvideo_train.parallel.plan import Plan, blocks
from fastvideo_train.rollout_record import RecordPlan, plan_record
from fastvideo_train.rollouts import InProcessRollouts, RolloutSettings
from inference.instance import ModelInstance
from inference.resident import Resident
from inference.text_kv import language_models
from loops.loop import ModelCall, Profile
from methods.forward import velocity
from methods.method import Method
from methods.roles import EMA, REFERENCE, STUDENT, Roles, trainable_component

BASE = "base"
"""Row of the weights that all LoRA roles share."""
MOMENTS = 2
"""AdamW's averages of a parameter."""
SHARDED = "fsdp2"


@dataclass(frozen=True)
class Clip:
    """What the run trains on."""

    frames: int
    height: int
    """Pixels."""
    width: int
    """Pixels."""


@dataclass(frozen=True)
class Row:
    """One part of the memory of one rank."""

    name: str
    """A role, or a frozen component."""
    weights: int = 0
    """Bytes, as all others."""
    gradients: int = 0
    optimizer: int = 0


TEXTS = "keys and values of texts"
"""Of the roles that generate: the student, and the average that is evaluated."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank; ranks are alike."""

    card: str
    method: str
    plan: str
    devices: int
    clip: Clip
    micro_batch: int
    """Rows of a training forward."""
    max_rows: int
    """Rows of the engine's largest forward."""
    activation_checkpointing: bool
    rows: tuple[Row, ...]
    activations: int
    """Most that one micro batch holds at once beside weights and gradients."""
    gathered: int
    """Whole weights and gradients of the blocks at work, where they are sharded at rest."""
    generation: int
    """Most that a forward of a rollout or an evaluation holds."""
    encoding: int
    """Most that the VAE holds while it encodes the data set; 0 without one."""
    optimizer_step: int
    """What the optimizer makes anew while it steps, where it steps all parameters at once, as on a GPU."""
    rollouts: str = InProcessRollouts.name
    engine_process: int = 0
    """Weights that the engine process of a rank holds in memory of its own; 0 without one."""
    record: RecordPlan | None = None
    """What a sample of a rollout leaves with the method, in host memory or the device's; None where nothing is known
    before a run."""

    @property
    def held(self) -> int:
        """Weights, gradients and optimizer states."""
        return sum(row.weights + row.gradients + row.optimizer for row in self.rows)

    @property
    def peak(self) -> int:
        """What comes and goes takes turns."""
        gathers = max(self.activations, self.generation) + self.gathered
        return self.held + max(gathers, self.encoding, self.optimizer_step)

    def to_json(self) -> dict[str, Any]:
        record = None if self.record is None else self.record.to_json()
        return {**asdict(self), "record": record, "held": self.held, "peak": self.peak}


def plan_memory(
    card: ModelCard,
    method: Method,
    plan: Plan,
    *,
    devices: int,
    clip: Clip,
    max_rows: int,
    generates: bool,
    encode_rows: int = 0,
    rollouts: RolloutSettings | None = None,
    rewards: Mapping[str, ModelCard] | None = None,
) -> MemoryPlan:
    """The plan of a run from ``card``, the one that it starts from.

    Args:
        clip: what is trained on.
        max_rows: rows of the engine's largest forward.
        generates: whether the run rolls out or evaluates by generating; else one clip is generated at the end.
        encode_rows: clips that the VAE encodes at once; 0 encodes none.
        rollouts: how rollouts are executed; None: in this process.
        rewards: the cards that score, by name.
    """
    shards = devices if plan.name == SHARDED else 1
    micro_batch = _micro_batch(method, devices)
    settings = InProcessRollouts() if rollouts is None else rollouts
    module = _module(card, method, plan, settings)
    rows = [*_role_rows(module, shards), *_frozen_rows(card, module.roles)]
    if module.engine.kv_bytes:
        pools = len(language_models(module.card)) * (1 if method.ema is None else 2)
        rows.append(Row(TEXTS, weights=pools * module.engine.kv_bytes))
    rows += [
        Row(f"reward {name}", weights=_weights(judge)) for name, judge in ({} if rewards is None else rewards).items()
    ]
    gathered = _gathered(module, shards)
    with FakeTensorMode(allow_non_fake_inputs=True):  # buffers are real
        module.roles.to_empty(device="cpu")
        clips = _activations(module, clip, micro_batch) if STUDENT in module.optimizer_specs else 0
        activations = max(clips, *(_text_activations(module, c, *n) for c, n in method.token_batches(card).items()), 0)
    encoding = _encoding(card, clip, encode_rows) if encode_rows else 0
    return MemoryPlan(
        card=module.card.name,
        method=method.name,
        plan=plan.name,
        devices=devices,
        clip=clip,
        micro_batch=micro_batch,
        max_rows=max_rows if generates else 1,
        activation_checkpointing=plan.activation_checkpointing,
        rows=tuple(rows),
        activations=activations,
        gathered=gathered,
        generation=_generation(card, clip, max_rows if generates else 1, pixels=generates),
        encoding=encoding,
        optimizer_step=max(row.gradients for row in rows),
        rollouts=settings.name,
        engine_process=settings.engines * _engine_bytes(card, module.roles),
        record=plan_record(module.card, method, devices),
    )


def _micro_batch(method: Method, devices: int) -> int:
    """Rows of a training forward; the clips of a step bound them where the batch is of clips."""
    return min(method.micro_batch, method.batch_size // devices) if method.needs_clips else method.micro_batch


# -- the run's parts without memory


def _module(card: ModelCard, method: Method, plan: Plan, rollouts: RolloutSettings) -> PostTrainingModule:
    """The module that trains, on the meta device; text is padded in full, which is the most that it can be."""
    card = card.model_copy(update={"precision": card.precision.model_copy(update={"text_padding": "full"})})
    others = {role: _instance(other) for role, other in method.role_cards(card).items()}
    base, trained = _instance(card), method.derive_card(card)
    with torch.device("meta"):
        module = PostTrainingModule(trained, base, method, plan, reward=None, seed=0, others=others, rollouts=rollouts)
    if plan.activation_checkpointing:
        for part in module.roles.sharded_modules():
            if hasattr(part, "enable_gradient_checkpointing"):
                cast(Any, part).enable_gradient_checkpointing()
    return module


def _instance(card: ModelCard) -> ModelInstance:
    """An instance of the trainable components alone."""
    trainable = {cid: component for cid, component in card.components.items() if component.trainable}
    return ModelInstance(card, {cid: Resident(_built(card, c).eval()) for cid, c in trainable.items()}, None)


def _built(card: ModelCard, component: Component) -> nn.Module:
    """On the meta device, from the card's config, or the folder's where the card leaves it there."""
    folder = None if component.config else resolve_folder(card.source, card.root)
    module = build_on_meta(component, folder)
    if component.library == "transformers":
        cast(Any, module).tie_weights()
    return module if component.dtype == "float32" else module.to(getattr(torch, component.dtype))


# -- what is held


def _role_rows(module: PostTrainingModule, shards: int) -> Iterator[Row]:
    """Each role's own weights, a component with its own optimizer apart; of what is trained gradients and moments."""
    roles = module.roles
    own: dict[str, list[Tensor]] = {}
    for role in (*roles.names, *roles.apart):
        parts = [n for n in (role, *roles.joined(role).values()) if n in roles and (n == role or n not in roles.apart)]
        buffers = (b for name in parts for b in roles[name].buffers() if roles.adapter(role) is None or name != role)
        joined = (p for name in parts if name != STUDENT for p in roles[name].parameters())
        own[role] = [*roles.parameters_of(role).values(), *roles.trained(role), *joined, *buffers]
    claimed = {id(tensor) for tensors in own.values() for tensor in tensors}
    shared = [t for part in roles.values() for t in (*part.parameters(), *part.buffers()) if id(t) not in claimed]
    if shared:
        yield Row(BASE, weights=_bytes(shared, shards))
    for role in own:
        trained = _bytes(roles.trained(role), shards) if role in module.optimizer_specs else 0
        yield Row(role, _bytes(own[role], shards), gradients=trained, optimizer=MOMENTS * trained)


def _frozen_rows(card: ModelCard, roles: Roles) -> Iterator[Row]:
    """The components that no role replaces: whole on every rank."""
    replaced = {roles.component, *roles.joined(STUDENT)}
    for cid, component in needed_components(card).items():
        if component.kind in MODULE_KINDS and cid not in replaced:
            yield Row(cid, weights=_module_bytes(_built(card, component)))


def _weights(card: ModelCard) -> int:
    """Of all modules that a card's requests call."""
    return sum(_module_bytes(_built(card, c)) for c in needed_components(card).values() if c.kind in MODULE_KINDS)


def _module_bytes(module: nn.Module) -> int:
    return _bytes((*module.parameters(), *module.buffers()), 1)


def _engine_bytes(card: ModelCard, roles: Roles) -> int:
    """Of an engine process: the card once, whole, with the adapters of all roles."""
    parts = [roles.module(STUDENT), *(roles[name] for name in roles.joined(STUDENT).values())]
    own = _bytes((t for part in parts for t in (*part.parameters(), *part.buffers())), 1)
    return own + sum(row.weights for row in _frozen_rows(card, roles))


def _bytes(tensors: Iterable[Tensor], shards: int) -> int:
    """Of distinct tensors, each parameter cut along its first dim: the first rank's share, which is the largest."""
    return sum(_share(t, shards) * t.element_size() for t in {id(t): t for t in tensors}.values())


def _share(tensor: Tensor, shards: int) -> int:
    """Elements of a tensor on the first rank; buffers are whole on all."""
    if shards == 1 or not isinstance(tensor, nn.Parameter) or not tensor.shape:
        return tensor.numel()
    return math.ceil(tensor.shape[0] / shards) * math.prod(tensor.shape[1:])


def _gathered(module: PostTrainingModule, shards: int) -> int:
    """Under sharding: whole what is outside the blocks, two blocks (one at work, the next on its way) and the whole
    gradients of one, twice (as they are made and as they are sent)."""
    if shards == 1:
        return 0
    most = 0
    for part in module.roles.sharded_modules():
        inside = [list(block.parameters()) for block in blocks(part)]
        largest = max((_bytes(parameters, 1) for parameters in inside), default=0)
        trained = max((_bytes((p for p in ps if p.requires_grad), 1) for ps in inside), default=0)
        outside = _bytes(part.parameters(), 1) - sum(_bytes(parameters, 1) for parameters in inside)
        most = max(most, outside + 2 * largest + 2 * trained)
    return most


# -- what comes and goes


def _activations(module: PostTrainingModule, clip: Clip, rows: int) -> int:
    """Peak bytes of one micro batch, gradients there already, as from the second micro batch on."""
    roles = module.roles
    for parameter in (p for role in module.optimizer_specs for p in roles.trained(role)):
        parameter.grad = torch.empty_like(parameter)
    others = [role for role in roles.names if role not in (STUDENT, EMA)]
    tensors = _batch(module.card, module.roles.instance(STUDENT), clip, rows)
    with LiveBytes() as live:
        predicted = velocity(roles.instance(STUDENT), **tensors, gradient=True)
        for role in others:
            velocity(roles.instance(role), **tensors, gradient=False)
        (predicted - tensors["latents_BCTHW"]).square().mean().backward()
    return live.peak


def _text_activations(module: PostTrainingModule, component: str, rows: int, tokens: int) -> int:
    """As :func:`_activations`, of a language model over rows of so many tokens, its reference beside it."""
    roles, ids_BL = module.roles, torch.zeros(rows, tokens, dtype=torch.long)
    call = ModelCall(
        component, "token_log_probs", {"ids": ids_BL, "mask": torch.ones_like(ids_BL)}, {"temperature": 1.0}
    )
    for parameter in roles.trained(component):
        parameter.grad = torch.empty_like(parameter)
    with LiveBytes() as live:
        log_p_BL = roles.instance(STUDENT).call(call, Profile.TRAIN)
        if REFERENCE in roles.names:
            log_p_BL = log_p_BL - roles.instance(REFERENCE).call(call, Profile.ROLLOUT)
        log_p_BL.mean().backward()
    return live.peak


def _batch(card: ModelCard, instance: ModelInstance, clip: Clip, rows: int) -> dict[str, Any]:
    """What a training forward takes: latents, sigmas, texts and further conditions of the rows."""
    shape = card.geometry.latent_shape(clip.frames, clip.height, clip.width)
    width = _config(instance)["text_dim"]
    conditions = family(card.family).condition_shapes()
    configs = {cid: _settings(card, c) for cid, c in card.components.items() if c.kind in MODULE_KINDS and conditions}
    return {
        "latents_BCTHW": torch.empty(rows, *shape),
        "sigma_B": torch.empty(rows),
        "text_BLD": torch.empty(rows, card.sampling.max_sequence_length, width),
        "conditions": {name: torch.empty(rows, *of(configs, shape)) for name, of in conditions.items()},
    }


def _config(instance: ModelInstance) -> Mapping[str, Any]:
    return cast(Any, instance.module(trainable_component(instance.card))).config


def _encoding(card: ModelCard, clip: Clip, rows: int) -> int:
    """Peak bytes of the VAE's encode of that many clips, the clips with it."""
    component = next(c for c in card.components.values() if c.kind == "vae")
    vae = _built(card, component).eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        vae = vae.to_empty(device="cpu")
        with LiveBytes() as live:
            video_BCFHW = torch.empty(rows, 3, clip.frames, clip.height, clip.width)
            family(card.family).operations()[("vae", "encode")](vae, {"video": video_BCFHW}, {})
    return live.peak


def _generation(card: ModelCard, clip: Clip, rows: int, *, pixels: bool) -> int:
    """Worst case over the forwards of a request, by the family's own formulas; 0 where it has none."""
    _, frames, height, width = card.geometry.latent_shape(clip.frames, clip.height, clip.width)
    tokens = card.geometry.tokens(clip.frames, clip.height, clip.width)
    size = ForwardSize(rows, frames, height, width, tokens, card.sampling.max_sequence_length)
    most = 0
    for component in needed_components(card).values():
        if component.kind == "vae" and not pixels:
            continue
        for (kind, _), formula in family(card.family).peak_bytes().items():
            if kind == component.kind:
                most = max(most, formula(_settings(card, component), size))
    return most


def _settings(card: ModelCard, component: Component) -> Mapping[str, Any]:
    config: Any = getattr(_built(card, component), "config", {})
    return config.to_dict() if hasattr(config, "to_dict") else dict(config)
