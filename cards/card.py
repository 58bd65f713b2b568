"""ModelCard: the (recipe, runtime) pair of a model as frozen data.

A card serialises to JSON, has a digest over its canonical JSON, and ``derive`` gives a child that records its parent.
It names loops and components by registry key and holds no Python object. ``validate`` runs before any weight loads
and reports ALL problems at once. Knows nothing about how a component is built (``cards.source``) or run
(``inference``).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError

from cards.errors import UserError
from cards.geometry import Geometry
from cards.program import Program

SCHEMA_VERSION = 1
CARD_FILE = "card.json"


class CardError(UserError):
    """A card that is not valid; the message lists every problem."""


class LoopMismatchError(UserError):
    """Weights that assume a loop which the card, or the request, does not run."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Part):
    """Where the weights come from."""

    kind: Literal["bundled", "folder", "hub", "none"]
    location: str = ""
    """Name of the bundled folder, absolute path, or hub id. A card inside its own folder says ".", wherever that is."""
    revision: str | None = None


class Component(_Part):
    """A module of the model: its class, where its weights are and which tasks need it."""

    kind: Literal[
        "transformer",
        "vae",
        "text_encoder",
        "image_encoder",
        "tokenizer",
        "image_processor",
        "scheduler",
        "causal_lm",
        "scorer",
        "processor",
        "action_embedding",
    ]
    library: Literal["diffusers", "transformers"]
    class_name: str
    subfolder: str
    """Folder of the component inside the source; "." where the source is the component's own folder."""
    source: Source | None = Field(default=None, exclude_if=lambda value: value is None)
    """Where its weights come from, where that is not the card's own source."""
    beside: bool = Field(default=False, exclude_if=lambda value: not value)
    """It is a folder that transformers saved, beside a pipeline whose model_index.json does not name it."""
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Config for building it without a source (memory plans, random weights); empty when the source has it."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trainable: bool = False
    required_for: tuple[str, ...] = ()
    optional_for: tuple[str, ...] = ()
    placement: Literal["device", "cpu"] = "device"
    layout: Literal["fast", "library"] = Field(default="fast", exclude_if=lambda value: value == "fast")
    """How weights lie in a CPU's memory: as its kernels like them best, or as the library lays them, which gives the
    library's own last bits; "fast" is neither in the JSON nor in the digest."""


class Guidance(_Part):
    """Classifier-free guidance: ``u + g (c - u)``; g = 1 means conditional only."""

    policy: Literal["sequential", "batched"] = "sequential"
    scale: float = 1.0
    convention: Literal["standard"] = "standard"


class Schedule(_Part):
    """The sigmas of a loop: a scheduler's own grid, or a static ladder that is never shifted a second time."""

    shift: float = 1.0
    """Flow shift S."""
    ladder: tuple[float, ...] | None = None
    """Sigmas in (0, 1], descending, of a distilled card; None for a grid of any number of steps."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of the diffusers scheduler class, as its folder stores them."""


class CostModel(_Part):
    """Predicted seconds of one forward: ``base + per_token * tokens`` for one sample; calibrated online."""

    base_seconds: float = 1e-3
    per_token_seconds: float = 1e-6


class LoopSpec(_Part):
    """A loop of the card, by registry key."""

    kind: str
    unit: str
    """Kind of its work units, e.g. DIFFUSION_STEP."""
    solver: str = "euler"
    """Solver, schedule and guidance are read by diffusion loops; other kinds leave the defaults."""
    schedule: Schedule = Schedule()
    guidance: Guidance = Guidance()
    components: dict[str, str]
    """Part in the loop -> component id. Two loops may bind one component: this is the weight-sharing graph."""
    semantics: str
    """Id of what the loop computes; a recipe that assumes another one cannot be sampled by it."""
    caches: tuple[str, ...] = ()
    cost: CostModel = CostModel()
    dynamic_stop: bool = False
    allows_interleaving: bool = True
    graph_capture: bool = False
    options: dict[str, JsonValue] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """What this kind alone reads, checked by the kind; a loop without any has none in its JSON nor in its digest."""


class Recipe(_Part):
    """How the weights came about."""

    method: str
    parents: tuple[str, ...] = ()
    """Digests of the cards that it was derived from, nearest first."""
    assumes_loop: str
    """``semantics`` id of the loop that the weights were made for."""
    assumes_precision: str = "float32"
    consistency_required: Literal["none", "C1", "C2"] = "C2"
    data: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)
    weights: dict[str, str] = Field(default_factory=dict)
    """Trained component -> sha256 of its weights file, so that the digest stands for the weights too."""


class Parity(_Part):
    """What the card promises, and how far a check may be off."""

    levels: tuple[Literal["C0", "C1", "C2", "C3", "C4"], ...] = ("C0", "C1", "C2", "C3")
    tolerances: dict[str, float] = Field(default_factory=lambda: {"C0": 0.0, "C1": 0.0, "C2": 0.0, "C3": 1e-4})
    """Largest absolute difference a level allows, on latents of unit scale."""
    output_determinism: Literal["bit_identical", "distributional"] = "bit_identical"
    interleave_required: bool = True


class Precision(_Part):
    """The numerics that serving and training share."""

    serve: str = "float32"
    train: str = "float32"
    text_padding: Literal["full", "folded"] = "full"
    """Whether attention sees every padding token of a prompt, bit for bit as the library does, or one that stands for
    all: the same function at less cost, different in the last bits."""


class TextSampling(_Part):
    """Defaults of a text request, and what bounds it."""

    context: int
    """Tokens that prompt and completion may fill together."""
    eos: tuple[int, ...]
    """Token ids that end a completion."""
    max_tokens: int = 256
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""


class ScoreSampling(_Part):
    """Defaults of a score request."""

    frames: int | None = 4
    """Frames of a clip that are looked at, spread evenly; None = all."""
    rows: int = 8
    """Pictures in one forward, at most."""
    divisor: float = 100.0
    """Similarities are divided by it. The logit scale of the released CLIPs is 100, so theirs are plain cosines."""
    grid: int = Field(default=1, ge=1, exclude_if=lambda value: value == 1)
    """A picture holds ``grid`` x ``grid`` of the frames, for a model that was trained on such pictures; a card without
    has it neither in its JSON nor in its digest."""


class Sampling(_Part):
    """Defaults of a request."""

    frames: int
    height: int
    """Pixels."""
    width: int
    """Pixels."""
    fps: float
    steps: int
    negative_prompt: str = ""
    max_sequence_length: int = 512
    """Tokens that the prompt is padded to."""
    text: TextSampling | None = Field(default=None, exclude_if=lambda value: value is None)
    """For the text task; a card without one has it neither in its JSON nor in its digest."""
    score: ScoreSampling | None = Field(default=None, exclude_if=lambda value: value is None)
    """For the score task; as ``text``."""


class ModelCard(_Part):
    """A model as data; see the module's docstring."""

    schema_version: Literal[1] = 1
    name: str
    family: str
    size: str
    source: Source
    geometry: Geometry
    components: dict[str, Component]
    loops: dict[str, LoopSpec]
    programs: dict[str, Program]
    """Task -> nodes."""
    recipe: Recipe
    sampling: Sampling
    parity: Parity = Parity()
    precision: Precision = Precision()
    costs: dict[str, CostModel] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Component -> its cost model, where it is not that of the loop which binds it. Tokens are the transformer's."""
    caches: tuple[str, ...] = ("feature",)
    parallelism: tuple[str, ...] = ("single", "ddp", "fsdp2")
    capabilities: tuple[str, ...] = ()

    _root: Path | None = PrivateAttr(default=None)
    """Folder that a card.json was read from; what a source of "." points at. Not part of the data."""

    @property
    def root(self) -> Path | None:
        return self._root

    # -- identity

    def canonical_json(self) -> str:
        """JSON with sorted keys and no white space: what the digest is taken of."""
        data = self.model_dump(mode="json")
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over :meth:`canonical_json`."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> ModelCard:
        """As pydantic has it; the copy has a digest of its own."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("digest", None)
        return copied

    def derive(self, **changes: Any) -> ModelCard:
        """A child card with ``changes`` to top-level fields, whose recipe names this card as its nearest parent."""
        unknown = sorted(set(changes) - set(type(self).model_fields))
        if unknown:
            raise CardError(f"got card fields {unknown}, expected some of: {', '.join(type(self).model_fields)}")
        recipe: Recipe = changes.pop("recipe", self.recipe)
        parents = (self.digest, *self.recipe.parents)
        return self.model_copy(update={**changes, "recipe": recipe.model_copy(update={"parents": parents})})

    # -- JSON

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = CARD_FILE) -> ModelCard:
        """Parses a card; raises :class:`CardError` that lists every unknown or wrong field."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise CardError(f"{where} is not JSON: {error}") from None
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise CardError(
                f"{where}: got schema_version {version!r}, this release reads {SCHEMA_VERSION}; export the run again"
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            rows = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise CardError(f"{where} is not a valid card:\n  " + "\n  ".join(rows)) from None

    @classmethod
    def load(cls, folder: Path) -> ModelCard:
        """The card of an export folder."""
        path = folder / CARD_FILE
        card = cls.from_json(path.read_text(), where=str(path))
        card._root = folder.resolve()
        return card

    # -- checks

    def problems(self) -> list[str]:
        """Everything that is wrong with the card, without touching a weight."""
        found: list[str] = []
        tasks = set(self.programs)
        for cid, component in self.components.items():
            for task in (*component.required_for, *component.optional_for):
                if task not in tasks:
                    found.append(f"component {cid!r}: task {task!r} has no program ({', '.join(tasks)})")
        for lid, loop in self.loops.items():
            for part, cid in loop.components.items():
                if cid not in self.components:
                    found.append(f"loop {lid!r}: {part} is bound to {cid!r}, which is not a component")
            ladder = loop.schedule.ladder
            if ladder is not None and (
                not ladder or any(not 0 < s <= 1 for s in ladder) or any(a <= b for a, b in itertools.pairwise(ladder))
            ):
                found.append(f"loop {lid!r}: ladder {list(ladder)} is not descending within (0, 1]")
            if not (math.isfinite(loop.schedule.shift) and loop.schedule.shift > 0):
                found.append(f"loop {lid!r}: shift is {loop.schedule.shift}, expected > 0")
            if not (math.isfinite(loop.guidance.scale) and loop.guidance.scale >= 0):
                found.append(f"loop {lid!r}: guidance scale is {loop.guidance.scale}, expected >= 0")
        for task, program in self.programs.items():
            found += [f"program {task!r}: {p}" for p in program.problems(self.components, self.loops)]
        for level in self.parity.levels:
            if level not in self.parity.tolerances:
                found.append(f"parity: level {level} has no tolerance")
        known = {loop.semantics for loop in self.loops.values()}
        if self.recipe.assumes_loop not in known:
            found.append(
                f"recipe: the weights assume the loop {self.recipe.assumes_loop!r}, the card runs {sorted(known)}"
            )
        try:
            self.geometry.check(self.sampling.frames, self.sampling.height, self.sampling.width)
        except UserError as error:
            found.append(f"sampling: {error}")
        return found

    def validate(self) -> None:  # type: ignore[override]
        """Raises :class:`CardError` that lists every problem; :class:`LoopMismatchError` when that is the only one."""
        found = self.problems()
        if not found:
            return
        message = f"card {self.name!r} is not valid:\n  " + "\n  ".join(found)
        if all(problem.startswith("recipe: the weights assume the loop") for problem in found):
            raise LoopMismatchError(message)
        raise CardError(message)
