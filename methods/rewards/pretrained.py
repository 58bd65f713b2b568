"""Is a pretrained reward model there? Answers without loading weights.

Knows the file layout of a transformers folder and how to ask the Hugging Face hub for one header. Leaves loading to the
reward. Every complaint says what was got, what was expected and what to do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from cards.errors import UserError

HUB_TIMEOUT_SECONDS = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
_TOKENIZER = ("tokenizer.json", "vocab.json")
_IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def check_model(reward: str, source: str, *, revision: str | None, model_type: str) -> None:
    """``source`` (folder or hub id) holds a config of ``model_type`` and weights; ``UserError`` otherwise."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        _check_hub(reward, source, revision, "config.json")
        return
    problems = _config_problems(folder, model_type)
    index = folder / "model.safetensors.index.json"
    if not any((folder / name).is_file() for name in _WEIGHTS):
        problems.append(f"no weights (expected one of {', '.join(_WEIGHTS)})")
    elif index.is_file() and not (folder / "model.safetensors").is_file():
        problems += _shard_problems(index)
    _report(reward, folder, problems)


def check_processor(reward: str, source: str, *, revision: str | None) -> None:
    """``source`` (folder or hub id) holds a tokenizer and an image processor; ``UserError`` otherwise."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        _check_hub(reward, source, revision, "tokenizer_config.json")
        return
    wanted = {"tokenizer": _TOKENIZER, "image processor": _IMAGE_PROCESSOR}
    _report(
        reward,
        folder,
        [
            f"no {what} (expected one of {', '.join(names)})"
            for what, names in wanted.items()
            if not any((folder / name).is_file() for name in names)
        ],
    )


def _config_problems(folder: Path, model_type: str) -> list[str]:
    config = folder / "config.json"
    if not config.is_file():
        return ["no config.json"]
    try:
        got = json.loads(config.read_text()).get("model_type")
    except (ValueError, AttributeError):
        return ["config.json is not a JSON object"]
    return [] if got == model_type else [f"config.json has model_type {got!r}, expected {model_type!r}"]


def _shard_problems(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{index.name} is not a shard index"]
    return [f"no {shard}, which {index.name} names" for shard in shards if not (index.parent / shard).is_file()]


def _report(reward: str, folder: Path, problems: list[str]) -> None:
    if problems:
        raise UserError(
            f"reward {reward}: {folder} is not usable: {'; '.join(problems)}. Expected a transformers CLIP folder, as"
            " `huggingface-cli download <id> --local-dir <folder>` writes it; fetch it again or name another folder."
        )


def _check_hub(reward: str, source: str, revision: str | None, filename: str) -> None:
    """One small header from the local hub cache or the hub, without retries."""
    if not _HUB_ID.fullmatch(source):
        raise UserError(
            f"reward {reward}: got {source!r}, which is no existing folder; expected a transformers folder or a hub id"
            " like owner/name; correct the path."
        )
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(source, filename, revision=revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(source, filename, revision=revision), timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:  # no network, no such repository, no such revision, no permission, offline mode
        at = "" if revision is None else f" at revision {revision!r}"
        raise UserError(
            f"reward {reward}: got {source!r}{at}, which is neither an existing folder nor in the local hub cache, and"
            f" the Hugging Face hub does not give it ({type(error).__name__}: {str(error).splitlines()[0]}). Expected a"
            " reachable model: check the name, the revision and the network, or download it once and set the reward's"
            " model to that folder."
        ) from error
