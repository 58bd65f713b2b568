"""Where weights come from: bundled | local diffusers folder | hub id with revision. Loading is strict.

A missing, unexpected or misshapen key is an error that names it, found by reading safetensors headers before any
weight loads. Only classes on the card's allow-list are built: those of diffusers and transformers that a card names.
"""

from __future__ import annotations

import importlib
import json
import struct
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cards.card import Component, ModelCard, Source
from cards.errors import UserError
from cards.needs import MODULE_KINDS, needed_components, optional_components

BUNDLED = Path(__file__).parent
WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
"""Names that the libraries load without a variant; an ``fp16`` file beside them is not read."""
ALLOWED_CLASSES = {
    "diffusers": {
        "WanTransformer3DModel",
        "AutoencoderKLWan",
        "UniPCMultistepScheduler",
        "FlowMatchEulerDiscreteScheduler",
        "DPMSolverMultistepScheduler",
    },
    "transformers": {
        "UMT5EncoderModel",
        "T5TokenizerFast",
        "T5Tokenizer",
        "Qwen3ForCausalLM",
        "Qwen2Tokenizer",
        "CLIPModel",
        "CLIPProcessor",
        "CLIPVisionModel",
        "CLIPImageProcessor",
    },
}
"""Classes that a card or a model_index.json may name; anything else is refused."""
OWN_CLASSES = {"CausalWanTransformer3DModel": ("cards.wan_causal.transformer", "WanTransformer3DModel")}
"""Class of this repo that a card may name -> its module, and the diffusers class whose folders it reads and saves."""
BESIDE = {"ActionEmbedding": "cards.wan_causal.actions"}
"""Class of this repo that belongs to no pipeline -> its module. Its folder lies beside the pipeline's, which does not
name it; without one the card's config says how it is built, as new."""
IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Either holds how images are prepared: the first as transformers 5 saves it, the second as older ones did."""
_BUILDING = threading.RLock()
"""One module is built at a time: the libraries switch torch's own functions over while they build one."""
OWN_FOLDER = "."
"""Subfolder of a component that is the source's folder itself, as transformers saves a model with its tokenizer."""


class SourceError(UserError):
    """A source that is not there, is incomplete or does not fit the card."""


def resolve_folder(source: Source, root: Path | None = None) -> Path:
    """Local folder of a source; downloads a hub id. Raises :class:`SourceError`.

    ``root``: folder that holds the card, for a source of ".".
    """
    if source.kind == "none":
        raise SourceError("the card has no weights: give card.source=<diffusers folder or hub id>")
    if source.kind == "bundled":
        folder = BUNDLED / source.location
    elif source.kind == "folder":
        if source.location == ".":
            if root is None:
                raise SourceError('the card says its weights are beside it ("."), but it was not read from a folder')
            folder = root
        else:
            folder = Path(source.location)
    else:
        return _download(source)
    if not folder.is_dir():
        raise SourceError(f"got source {str(folder)!r}, which is not a folder; expected a diffusers model folder")
    return folder


def parse_source(source: str, revision: str | None = None) -> Source:
    """A local path when there is one, else a hub id such as ``Wan-AI/Wan2.1-T2V-1.3B-Diffusers``."""
    path = Path(source).expanduser()
    if path.exists():
        return Source(kind="folder", location=str(path.resolve()))
    looks_like_hub = source.count("/") == 1 and not source.startswith((".", "/", "~"))
    if not looks_like_hub:
        raise SourceError(f"got card.source={source!r}: no such folder, and not a hub id (owner/name)")
    return Source(kind="hub", location=source, revision=revision)


def _download(source: Source) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source.location,
                revision=source.revision,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            )
        )
    except Exception as error:
        raise SourceError(
            f"could not get {source.location!r} (revision {source.revision or 'main'}) from the hub: "
            f"{type(error).__name__}: {error}\nDownload it elsewhere and give the folder as card.source=<folder>"
        ) from None


def library_class(library: str, class_name: str) -> Any:
    """The class, if the allow-list has it."""
    if library == "diffusers" and class_name in OWN_CLASSES:
        return getattr(importlib.import_module(OWN_CLASSES[class_name][0]), class_name)
    if library == "diffusers" and class_name in BESIDE:
        return getattr(importlib.import_module(BESIDE[class_name]), class_name)
    if class_name not in ALLOWED_CLASSES.get(library, set()):
        allowed = ", ".join(f"{lib}.{c}" for lib, names in ALLOWED_CLASSES.items() for c in sorted(names))
        raise SourceError(f"got class {library}.{class_name}, expected one of: {allowed}")
    module = __import__(library)
    return getattr(module, class_name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a source, with errors that name the file."""
    if not path.is_file():
        raise SourceError(f"missing file {path}; expected a complete diffusers folder")
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise SourceError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path}: got a JSON {type(data).__name__}, expected an object")
    return data


def component_folder(component: Component, folder: Path) -> Path:
    """Where a component's files are: in the card's ``folder``, or in a source of the component's own."""
    return (folder if component.source is None else resolve_folder(component.source)) / component.subfolder


def is_new(component: Component, folder: Path) -> bool:
    """Whether the folder has no weights of a component that may begin as new."""
    return component.class_name in BESIDE and not component_folder(component, folder).is_dir()


# -- strict checks without loading


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component's folder, by its index where it is sharded."""
    for index in (folder / f"{stem}.safetensors.index.json" for stem in WEIGHT_STEMS):
        if not index.is_file():
            continue
        names = sorted(set(read_json(index)["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise SourceError(f"{folder}: missing weight shards {', '.join(missing)} that {index.name} names")
        return [folder / name for name in names]
    for stem in WEIGHT_STEMS:
        if (folder / f"{stem}.safetensors").is_file():
            return [folder / f"{stem}.safetensors"]
    raise SourceError(f"missing file: {folder} holds no diffusion_pytorch_model.safetensors or model.safetensors")


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Key -> shape from the header of a safetensors file, checked against the file's length."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise SourceError(f"{file} is truncated or not a safetensors file; download or export it again")
        head = stream.read(length)
    try:
        header = {key: entry for key, entry in json.loads(head).items() if key != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {key: tuple(entry["shape"]) for key, entry in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise SourceError(f"{file} is not a safetensors file; download or export it again") from None
    if 8 + length + end != size:
        raise SourceError(f"{file} is truncated: got {size} bytes, its header says {8 + length + end}")
    return shapes


def build_on_meta(component: Component, folder: Path | None = None) -> nn.Module:
    """The module without storage, from the source's config or the card's own."""
    from accelerate import init_empty_weights

    cls = library_class(component.library, component.class_name)
    folder = None if folder is not None and is_new(component, folder) else folder
    where = None if folder is None else component_folder(component, folder) / "config.json"
    config = dict(component.config) if where is None else read_json(where)
    try:
        with _BUILDING, init_empty_weights(include_buffers=False):
            if component.library == "diffusers":
                return cls.from_config(config)
            return cls(cls.config_class.from_dict(config))
    except Exception as error:
        said = "the card's config" if where is None else where
        raise SourceError(
            f"{said} builds no {component.class_name}: {type(error).__name__}: {error}; expected its own config"
        ) from error


def check_weights(component: Component, folder: Path) -> None:
    """Raises :class:`SourceError` that names every missing, unexpected and misshapen key of a component."""
    where = component_folder(component, folder)
    module = build_on_meta(component, folder)
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    tied: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    got: dict[str, tuple[int, ...]] = {}
    for file in weight_files(where):
        got |= tensor_shapes(file)
    missing = [name for name in expected if name not in got and tied.get(name) not in got]
    rebuilt = {name for name, _ in module.named_buffers()}  # older files hold some, which the library makes anew
    unexpected = [name for name in got if name not in expected and name not in rebuilt]
    misshapen = [
        f"{name}: got {list(shape)}, expected {list(expected[name])}"
        for name, shape in got.items()
        if name in expected and shape != expected[name]
    ]
    problems = [
        f"{label}: {', '.join(rows[:8])}{f' and {len(rows) - 8} more' if len(rows) > 8 else ''}"
        for label, rows in (("missing keys", missing), ("unexpected keys", unexpected), ("wrong shapes", misshapen))
        if rows
    ]
    if problems:
        raise SourceError(f"the weights in {where} do not fit {component.class_name}: " + "; ".join(problems))


def check_source(card: ModelCard, tasks: Collection[str] | None = None) -> Path:
    """Checks that the card's source is complete and fits, before any weight loads; gives its folder.

    What the tasks (all by default) require must be there; what is optional for them is checked where it is there.
    """
    folder = resolve_folder(card.source, card.root)
    needed, optional = needed_components(card, tasks), optional_components(card, tasks)
    whole = all(stands_alone(component) for component in (*needed.values(), *optional.values()))
    index = {} if whole else read_json(folder / "model_index.json")
    for cid, component in needed.items():
        if is_new(component, folder) and cid in card.recipe.weights:
            raise SourceError(f"{folder} holds no {component.subfolder!r}, whose weights the card was trained with")
        _check_component(cid, component, folder, index)
    for cid, component in optional.items():
        if stands_alone(component) or (index.get(component.subfolder) or [None])[0] is not None:
            _check_component(cid, component, folder, index)
    return folder


def stands_alone(component: Component) -> bool:
    """Whether no model_index.json has to name it."""
    return component.subfolder == OWN_FOLDER or component.source is not None or component.beside


def _check_component(cid: str, component: Component, folder: Path, index: Mapping[str, Any]) -> None:
    """Raises :class:`SourceError` unless the folder holds the component whole; ``index`` is its model_index.json."""
    library_class(component.library, component.class_name)
    if component.class_name in BESIDE:
        if not is_new(component, folder):
            check_weights(component, folder)
        return
    where = component_folder(component, folder)
    entry = _own_entry(component, where) if stands_alone(component) else index.get(component.subfolder)
    if not entry or entry[0] is None:
        raise SourceError(f"{folder / 'model_index.json'} names no {component.subfolder!r}, which {cid!r} needs")
    if component.kind in MODULE_KINDS:
        stored = OWN_CLASSES[component.class_name][1] if component.class_name in OWN_CLASSES else component.class_name
        if entry != [component.library, stored]:
            raise SourceError(f"{where}: got {'.'.join(entry)} for {cid!r}, expected {component.library}.{stored}")
        check_weights(component, folder)
    elif component.kind == "image_processor":
        if not any((where / name).is_file() for name in IMAGE_PROCESSOR_FILES):
            raise SourceError(f"{where} holds no {' or '.join(IMAGE_PROCESSOR_FILES)}")
    elif component.kind in ("tokenizer", "processor"):
        if not (where / "tokenizer_config.json").is_file():
            raise SourceError(f"missing file {where / 'tokenizer_config.json'}")
        if component.kind == "processor" and not any((where / name).is_file() for name in IMAGE_PROCESSOR_FILES):
            raise SourceError(f"{where} holds no {' or '.join(IMAGE_PROCESSOR_FILES)}")
    elif not (where / "scheduler_config.json").is_file():
        raise SourceError(f"missing file {where / 'scheduler_config.json'}")


def _own_entry(component: Component, folder: Path) -> list[str]:
    """What model_index.json would say of a component that is in a ``folder`` of its own: its config names the class."""
    if component.kind not in MODULE_KINDS:
        return [component.library, component.class_name]
    architectures = read_json(folder / "config.json").get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise SourceError(
            f"{folder / 'config.json'}: got architectures {architectures!r}, expected a list of one class"
        )
    return [component.library, str(architectures[0])]


# -- loading


Stamp = tuple[tuple[str, int, int], ...]
"""(file name, bytes, time of its last change in ns) of each weight file."""


def weights_stamp(component: Component, folder: Path) -> Stamp:
    """Tells whether a component's files are still those that were checked; empty where the folder has none."""
    where = component_folder(component, folder)
    if not where.is_dir():
        return ()
    stats = [(file.name, file.stat()) for file in weight_files(where)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def load_unchanged(component: Component, folder: Path, stamp: Stamp, device: torch.device | str = "cpu") -> Any:
    """:func:`load_component` for a component whose files were stamped when they were checked.

    Raises :class:`SourceError` when they are missing or are other files now: half of a model would be of other weights.
    The global random numbers stay where they are, whenever it is called.
    """
    _check_there(component, folder, stamp)
    if weights_stamp(component, folder) != stamp:
        raise SourceError(
            f"the weights in {component_folder(component, folder)} changed since the model was loaded: load again"
        )
    # The lock first: random numbers are the process's, not the thread's.
    with _BUILDING, torch.inference_mode(False), torch.random.fork_rng(devices=()):
        return load_component(component, folder, device)


def plan_component(component: Component, folder: Path, stamp: Stamp) -> nn.Module:
    """:func:`build_on_meta` for a component whose files were stamped; raises ``SourceError`` where there were none."""
    _check_there(component, folder, stamp)
    return build_on_meta(component, folder)


def _check_there(component: Component, folder: Path, stamp: Stamp) -> None:
    if not stamp and component.class_name not in BESIDE:
        raise SourceError(
            f"{folder} holds no {component.subfolder!r}: the card calls it optional, but this request needs it; "
            "add it to the folder, or ask for less"
        )


def load_component(component: Component, folder: Path, device: torch.device | str = "cpu") -> Any:
    """One component of a folder, in the card's dtype, eval mode, without gradients. Strict."""
    cls = library_class(component.library, component.class_name)
    where = component_folder(component, folder)
    if component.kind == "tokenizer":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(where)
    if component.kind in ("scheduler", "processor", "image_processor"):
        return cls.from_pretrained(where)
    dtype = getattr(torch, component.dtype)
    if is_new(component, folder):
        module = nn.Module.to(cls.from_config(dict(component.config)), device, dtype)
        return module.eval().requires_grad_(False)
    options = {"torch_dtype": dtype} if component.library == "diffusers" else {"dtype": dtype}
    with _BUILDING:
        module, info = cls.from_pretrained(where, output_loading_info=True, **options)
    lost = [f"{key}: {sorted(info[key])[:8]}" for key in ("missing_keys", "unexpected_keys") if info.get(key)]
    if lost:
        raise SourceError(f"the weights in {where} do not fit {component.class_name}: " + "; ".join(lost))
    module = module.to(device).eval().requires_grad_(False)
    if component.kind == "vae" and component.layout == "fast" and torch.device(device).type == "cpu":
        _channels_last(module)
    return module


def _channels_last(module: Any) -> None:
    """Lays convolution weights out as the CPU's kernels want them: a decode takes a third to two thirds of the time,
    with other roundings in the last bit."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in module.parameters():
        if parameter.ndim in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.ndim])
