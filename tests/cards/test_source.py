"""Strictness of sources: every fault of a folder is found before a weight loads, and the message names it.

The folders are written by the libraries' own ``save_pretrained``; each test then breaks one thing in a copy.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cards.card import CARD_FILE, ModelCard, Source
from cards.errors import UserError
from cards.registry import family
from cards.source import (
    SourceError,
    build_on_meta,
    check_source,
    library_class,
    load_component,
    parse_source,
    resolve_folder,
    tensor_shapes,
    weight_files,
)
from inference.instance import ModelInstance
from inference.load import card_of

WEIGHTS = {
    "transformer": "transformer/diffusion_pytorch_model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
}


@pytest.fixture
def folder(wan_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(wan_folder, tmp_path / "model"))


def edit_weights(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refused(folder: Path) -> str:
    """The message of the check that runs before any weight loads; the load itself gives the same."""
    card = card_of(folder)
    with pytest.raises(SourceError) as error:
        check_source(card)
    with pytest.raises(SourceError) as again:
        ModelInstance.load(card)
    assert str(again.value) == str(error.value)
    return str(error.value)


def test_a_sound_folder_passes_and_loads_every_tensor(wan_folder: Path) -> None:
    card = card_of(wan_folder)
    assert check_source(card) == wan_folder
    for cid, file in WEIGHTS.items():
        module = load_component(card.components[cid], wan_folder)
        loaded = module.state_dict()
        stored = load_file(wan_folder / file)
        assert all(torch.equal(loaded[key], value) for key, value in stored.items())
        assert not module.training
        assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize(
    "name",
    [
        *WEIGHTS.values(),
        "transformer/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
        "model_index.json",
    ],
)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError) as error:
        check_source(card_of(folder))
    assert Path(name).name in str(error.value)
    assert str((folder / name).parent) in str(error.value)


@pytest.mark.parametrize("cid", WEIGHTS)
def test_a_missing_key_is_named(folder: Path, cid: str) -> None:
    gone: list[str] = []
    edit_weights(folder / WEIGHTS[cid], lambda t: (gone.append(sorted(t)[1]), t.pop(sorted(t)[1])))
    message = refused(folder)
    assert f"missing keys: {gone[0]}" in message
    assert cid in message


@pytest.mark.parametrize("cid", WEIGHTS)
def test_an_unexpected_key_is_named(folder: Path, cid: str) -> None:
    edit_weights(folder / WEIGHTS[cid], lambda t: t.update({"adapter.lora_A": torch.zeros(2)}))
    assert "unexpected keys: adapter.lora_A" in refused(folder)


@pytest.mark.parametrize("cid", WEIGHTS)
def test_a_wrong_shape_is_named_with_both_shapes(folder: Path, cid: str) -> None:
    seen: list[Any] = []

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        key = max(tensors, key=lambda k: tensors[k].ndim)
        seen.extend((key, list(tensors[key].shape)))
        tensors[key] = torch.zeros(*tensors[key].shape, 2)

    edit_weights(folder / WEIGHTS[cid], reshape)
    key, shape = seen
    assert f"wrong shapes: {key}: got {[*shape, 2]}, expected {shape}" in refused(folder)


def test_all_faults_of_a_component_are_named_at_once(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["proj_out.bias"]
        tensors["surplus"] = torch.zeros(1)
        tensors["scale_shift_table"] = torch.zeros(3)

    edit_weights(folder / WEIGHTS["transformer"], change)
    message = refused(folder)
    assert all(word in message for word in ("proj_out.bias", "surplus", "scale_shift_table: got [3]"))


def test_many_missing_keys_are_counted_not_dumped(folder: Path) -> None:
    edit_weights(folder / WEIGHTS["vae"], lambda t: [t.pop(key) for key in sorted(t)[1:]])
    assert len(load_file(folder / WEIGHTS["vae"])) == 1
    total = len(build_on_meta(card_of(folder).components["vae"], folder).state_dict())
    assert f"and {total - 1 - 8} more" in refused(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    file = folder / WEIGHTS["transformer"]
    file.write_bytes(file.read_bytes()[:keep])
    message = refused(folder)
    assert str(file) in message
    assert "truncated" in message


@pytest.mark.parametrize("body", [b"not json at all!", b"[1, 2]", b"\xff\xfe\xfd\xfc", b'{"a": {"shape": [1]}}'])
def test_a_header_that_is_no_safetensors_header_is_named(tmp_path: Path, body: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(body)) + body)
    with pytest.raises(SourceError, match=r"x\.safetensors"):
        tensor_shapes(file)


def test_shapes_are_those_of_the_tensors(wan_folder: Path) -> None:
    file = wan_folder / WEIGHTS["transformer"]
    assert tensor_shapes(file) == {key: tuple(value.shape) for key, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("library", "name"),
    [("diffusers", "FluxTransformer2DModel"), ("os", "system"), ("transformers", "AutoModel"), ("diffusers", "")],
)
def test_a_class_off_the_allow_list_is_refused_and_the_list_named(library: str, name: str) -> None:
    with pytest.raises(SourceError) as error:
        library_class(library, name)
    assert f"{library}.{name}" in str(error.value)
    assert "diffusers.WanTransformer3DModel" in str(error.value)


def test_a_card_with_a_class_off_the_allow_list_loads_nothing(wan_folder: Path) -> None:
    card = card_of(wan_folder)
    rogue = card.components["vae"].model_copy(update={"class_name": "AutoencoderKL"})
    with pytest.raises(SourceError, match=r"diffusers\.AutoencoderKL, expected one of"):
        check_source(card.model_copy(update={"components": {**card.components, "vae": rogue}}))


def test_an_index_that_names_another_class_is_refused(folder: Path) -> None:
    edit_json(folder / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    message = refused(folder)
    assert "diffusers.AutoencoderKL" in message
    assert "expected diffusers.AutoencoderKLWan" in message


@pytest.mark.parametrize("entry", [None, [None, None]])
def test_an_index_without_a_component_is_refused(folder: Path, entry: Any) -> None:
    edit_json(folder / "model_index.json", text_encoder=entry)
    assert "'text_encoder'" in refused(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"transformer_2": ["diffusers", "WanTransformer3DModel"]},
        {"boundary_ratio": 0.875},
        {"expand_timesteps": True},
    ],
)
def test_a_wan22_folder_is_not_taken_for_wan21(folder: Path, changes: dict[str, Any]) -> None:
    edit_json(folder / "model_index.json", **changes)
    with pytest.raises(SourceError, match=r"Wan2\.2"):
        card_of(folder)


def test_a_folder_of_another_pipeline_names_what_is_read(folder: Path) -> None:
    edit_json(folder / "model_index.json", _class_name="FluxPipeline")
    with pytest.raises(UserError, match=r"FluxPipeline.*WanPipeline"):
        card_of(folder)
    with pytest.raises(UserError, match=r"FluxPipeline.*WanPipeline"):
        family("wan21").card("tiny", str(folder))


def test_a_transformer_of_other_channels_than_the_vae_is_refused(folder: Path) -> None:
    edit_json(folder / "transformer/config.json", in_channels=9)
    with pytest.raises(SourceError, match=r"takes 9 channels, the VAE gives 4"):
        card_of(folder)


def test_a_config_that_builds_nothing_is_named(folder: Path) -> None:
    edit_json(folder / "transformer/config.json", num_attention_heads="many")
    with pytest.raises(SourceError, match=r"transformer/config\.json builds no WanTransformer3DModel"):
        check_source(card_of(folder))


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_config_that_is_no_object_is_named(folder: Path, text: str) -> None:
    (folder / "vae/config.json").write_text(text)
    with pytest.raises(SourceError, match=r"vae/config\.json"):
        card_of(folder)


# -- places


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such folder, and not a hub id"):
        parse_source(str(tmp_path / "absent"))
    with pytest.raises(SourceError, match="not a hub id"):
        parse_source("one-word")
    with pytest.raises(SourceError, match="not a hub id"):
        parse_source("./models/wan")
    with pytest.raises(UserError, match=r"no such folder, and not a card name \(.*wan21"):
        card_of(tmp_path / "absent")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(SourceError, match="not a folder"):
        family("wan21").card("tiny", str(file))


def test_an_empty_folder_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model_index\.json"):
        card_of(tmp_path)


def test_a_hub_id_and_its_revision_are_kept() -> None:
    assert parse_source("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "abc") == Source(
        kind="hub", location="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", revision="abc"
    )


def test_a_card_without_weights_or_root_says_so() -> None:
    with pytest.raises(SourceError, match="no weights"):
        resolve_folder(Source(kind="none"))
    with pytest.raises(SourceError, match="not read from a folder"):
        resolve_folder(Source(kind="folder", location="."))


def test_a_hub_id_without_network_fails_fast_and_names_it(tmp_path: Path) -> None:
    """In a process of its own: the hub library reads its switches when it is imported."""
    code = (
        "import time\n"
        "from cards.source import SourceError, parse_source, resolve_folder\n"
        "import huggingface_hub\n"
        "start = time.monotonic()\n"
        "try:\n"
        "    resolve_folder(parse_source('nobody/no-such-model', 'abc'))\n"
        "except SourceError as error:\n"
        "    print(time.monotonic() - start)\n"
        "    print(error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    seconds, message = out.stdout.split("\n", 1)
    assert float(seconds) < 10
    assert "'nobody/no-such-model' (revision abc)" in message
    assert "card.source=<folder>" in message


# -- shards


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The folder with its transformer and text encoder in several files, as the libraries shard them."""
    from diffusers import WanTransformer3DModel
    from transformers import UMT5EncoderModel

    for cid, cls in (("transformer", WanTransformer3DModel), ("text_encoder", UMT5EncoderModel)):
        module = cls.from_pretrained(folder / cid)
        (folder / WEIGHTS[cid]).unlink()
        module.save_pretrained(folder / cid, max_shard_size="20KB" if cid == "transformer" else "4KB")
        assert len(weight_files(folder / cid)) > 1
    return folder


def test_a_sharded_folder_loads_the_same_weights(sharded: Path, wan_folder: Path) -> None:
    ours, whole = ModelInstance.load(card_of(sharded)), ModelInstance.load(card_of(wan_folder))
    for cid in WEIGHTS:
        expected = whole.module(cid).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in ours.module(cid).state_dict().items())


@pytest.mark.parametrize("cid", ["transformer", "text_encoder"])
def test_a_missing_shard_is_named(sharded: Path, cid: str) -> None:
    shard = weight_files(sharded / cid)[1]
    shard.unlink()
    assert f"missing weight shards {shard.name}" in refused(sharded)


def test_a_missing_key_in_a_shard_is_named(sharded: Path) -> None:
    gone: list[str] = []
    shard = weight_files(sharded / "transformer")[0]
    edit_weights(shard, lambda t: (gone.append(sorted(t)[0]), t.pop(sorted(t)[0])))
    assert gone[0] in refused(sharded)


def test_a_half_precision_variant_beside_the_weights_is_not_read(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"x": "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"}}
    (folder / "transformer/diffusion_pytorch_model.fp16.safetensors.index.json").write_text(json.dumps(index))
    check_source(card_of(folder))


# -- exports


def test_a_card_beside_its_weights_finds_them_after_a_move(folder: Path, tmp_path: Path) -> None:
    card = card_of(folder).derive(name="student", source=Source(kind="folder", location="."))
    (folder / CARD_FILE).write_text(card.to_json())
    moved = folder.rename(tmp_path / "elsewhere")
    again = ModelCard.load(moved)
    assert again.digest == card.digest
    assert check_source(again) == moved.resolve()


def test_an_export_given_as_the_source_of_a_card_keeps_its_own_card(folder: Path) -> None:
    card = card_of(folder).derive(name="student", source=Source(kind="folder", location="."))
    card = card.derive(sampling=card.sampling.model_copy(update={"frames": 5, "steps": 4}))
    (folder / CARD_FILE).write_text(card.to_json())
    assert family("wan21").card("tiny", str(folder)).digest == card.digest
    assert card_of(folder).digest == card.digest


def test_checks_read_headers_only(folder: Path) -> None:
    """A weights file of 2 GiB (sparse on disk) is checked in seconds: nothing of it is loaded."""
    file = folder / WEIGHTS["transformer"]
    header = {"huge": {"dtype": "F32", "shape": [2**29], "data_offsets": [0, 2**31]}}
    body = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(body)) + body)
        stream.truncate(8 + len(body) + 2**31)
    start = time.monotonic()
    message = refused(folder)
    assert "unexpected keys: huge" in message
    assert time.monotonic() - start < 60
