"""Sleep and wake: memory is given up, and everything is as it was after, to the bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cards.errors import UserError
from inference.engine import Engine
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.request import Request
from inference.sleep import InUse, state_of
from inference.storage import ALIGNMENT, duplicate, layout, own_tensors, resident_bytes

PIXELS = Request(prompt="a red circle", seed=1, steps=2, guidance=1.0, frames=5, height=16, width=16)
LATENTS = replace(PIXELS, output="latents")
COMPONENTS = ("text_encoder", "transformer", "vae")


@pytest.fixture
def nap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that weights sleep in."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def instance(wan_folder: Path, nap: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return ModelInstance.load(card.model_copy(update={"sampling": short}), tasks=("t2v",))


def residues(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() % ALIGNMENT for tensor in own_tensors(module)]


# -- memory


@pytest.mark.parametrize("component", COMPONENTS)
def test_sleep_gives_up_every_byte_and_wake_brings_it_back(instance: ModelInstance, component: str, nap: Path) -> None:
    module = instance.module(component)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strides = [tensor.stride() for tensor in own_tensors(module)]
    places = residues(module)
    held = instance.resident_bytes(component)
    assert held >= sum(value.numel() * value.element_size() for value in module.parameters())
    instance.sleep(component)
    assert instance.asleep(component)
    assert instance.resident_bytes(component) == 0
    (file,) = nap.iterdir()
    assert file.stat().st_size == held
    instance.wake(component)
    assert not instance.asleep(component)
    assert instance.resident_bytes(component) == held
    assert list(nap.iterdir()) == []
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [tensor.stride() for tensor in own_tensors(module)] == strides
    assert residues(module) == places


SHRINKS = """
import gc
import os
import subprocess
import sys
from pathlib import Path
from torch import nn
from inference.sleep import state_of

def process_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

module = nn.Linear(4096, 4096, bias=False)
gc.collect()
awake = process_bytes()
state_of(module).sleep(module)
asleep = process_bytes()
state_of(module).wake()
print(awake, asleep, process_bytes())
"""


def test_the_process_shrinks_by_the_weights(nap: Path) -> None:
    """In a process of its own: whatever trained in this one has told the C library to keep what is freed."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", SHRINKS], capture_output=True, text=True, env={**clean, "TMPDIR": str(nap)}
    )
    assert done.returncode == 0, done.stderr
    awake, asleep, again = map(int, done.stdout.split())
    weights = 4096 * 4096 * 4
    assert awake - asleep > 0.9 * weights
    assert again > awake - 0.1 * weights


def test_the_file_goes_with_a_module_that_nobody_wakes(nap: Path) -> None:
    module = nn.Linear(4, 4)
    state_of(module).sleep(module)
    assert len(list(nap.iterdir())) == 1
    del module
    gc.collect()
    assert list(nap.iterdir()) == []


def test_what_was_never_built_stays_unbuilt(wan_folder: Path, nap: Path) -> None:
    instance = ModelInstance.load(card_of(wan_folder))
    instance.sleep("vae")
    instance.wake("vae")
    assert not instance.built("vae")
    assert not instance.asleep("vae")
    assert instance.resident_bytes("vae") == 0


# -- results


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_call_wakes_and_gives_the_same_bits(instance: ModelInstance, component: str) -> None:
    engine = Engine(cache_bytes=0)
    before = engine.run(PIXELS, instance)
    versions, uid = instance.versions(), instance.residents[component].uid
    instance.sleep(component)
    after = engine.run(PIXELS, instance)
    assert not instance.asleep(component)
    assert torch.equal(after.latents, before.latents)
    assert torch.equal(after.video, before.video)  # type: ignore[arg-type]
    assert instance.versions() == versions
    assert instance.residents[component].uid == uid


def test_a_cached_encoding_lets_the_encoder_sleep_on(instance: ModelInstance) -> None:
    engine = Engine()
    before = engine.run(LATENTS, instance)
    for component in ("text_encoder", "vae"):
        instance.sleep(component)
    after = engine.run(LATENTS, instance)
    assert torch.equal(after.latents, before.latents)
    assert engine.features.hits == 1
    assert instance.asleep("text_encoder")
    assert instance.asleep("vae")
    engine.run(replace(LATENTS, prompt="the left square"), instance)
    assert not instance.asleep("text_encoder")


def test_sleep_between_two_steps_of_a_request_changes_nothing(instance: ModelInstance) -> None:
    expected = Engine().run(PIXELS, instance)
    engine = Engine()
    handle = engine.submit(PIXELS, instance)
    while engine.tick():
        for component in COMPONENTS:
            instance.sleep(component)
    assert torch.equal(handle.result().video, expected.video)  # type: ignore[arg-type]


def test_views_share_the_sleep_of_a_shared_module(instance: ModelInstance) -> None:
    own = copy.deepcopy(instance.module("transformer"))
    role = instance.view({"transformer": Resident(own)})
    role.sleep("text_encoder")
    role.sleep("transformer")
    assert instance.asleep("text_encoder")
    assert not instance.asleep("transformer")
    other = Resident(own, adapter="")
    assert other.module is own
    assert not role.asleep("transformer")


def test_an_optimizer_goes_on_after_a_sleep(instance: ModelInstance) -> None:
    module = instance.module("transformer").requires_grad_(True)
    parameter = next(module.parameters())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    before = parameter.detach().clone()
    instance.sleep("transformer")
    instance.wake("transformer")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(next(instance.module("transformer").parameters()).detach(), before - 1)


# -- sharing and refusals


class Shared(nn.Module):
    """Tied weights, two parameters in one storage, an empty buffer."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(24.0)
        self.a = nn.Parameter(whole[3:11])
        self.b = nn.Parameter(whole[7:23:2])
        self.tied = nn.Linear(4, 4)
        self.again = self.tied
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("turned", torch.arange(6).reshape(2, 3).t(), persistent=False)


def test_memory_that_tensors_share_stays_shared(nap: Path) -> None:
    for module in (Shared(), duplicate(Shared())):
        assert isinstance(module, Shared)
        blocks, places = layout(own_tensors(module))
        assert len(places) == 5
        assert len(blocks) == 4
        before = [tensor.detach().clone() for tensor in own_tensors(module)]
        state_of(module).sleep(module)
        assert resident_bytes(module) == 0
        state_of(module).wake()
        assert all(torch.equal(a, b) for a, b in zip(own_tensors(module), before, strict=True))
        assert module.again is module.tied
        assert not module.turned.is_contiguous()  # type: ignore[operator]
        with torch.no_grad():
            module.a[4] = 99.0
        assert module.b[0] == 99.0


def test_a_duplicate_computes_the_same_bits_in_memory_of_its_own(instance: ModelInstance) -> None:
    module = instance.module("transformer")
    double = duplicate(module)
    assert residues(double) == residues(module)
    expected = Engine().run(LATENTS, instance).latents
    assert torch.equal(Engine().run(LATENTS, instance.view({"transformer": Resident(double)})).latents, expected)
    with torch.no_grad():
        for parameter in double.parameters():
            parameter.zero_()
    assert torch.equal(Engine().run(LATENTS, instance).latents, expected)


def test_a_component_in_a_call_is_not_put_to_sleep(instance: ModelInstance) -> None:
    with instance.residents["vae"].active():
        with pytest.raises(InUse, match="in the middle of a call"):
            instance.sleep("vae")
        assert not instance.asleep("vae")
    instance.sleep("vae")


def test_a_full_disk_leaves_the_component_awake(
    instance: ModelInstance, nap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = instance.resident_bytes("vae")
    monkeypatch.setattr(tempfile, "tempdir", str(nap / "gone"))
    with pytest.raises(FileNotFoundError):
        instance.sleep("vae")
    assert not instance.asleep("vae")
    assert instance.resident_bytes("vae") == held


def test_weights_lost_from_the_file_are_an_error_and_not_wrong_weights(instance: ModelInstance, nap: Path) -> None:
    instance.sleep("vae")
    (file,) = nap.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match="shorter than it was written"):
        instance.wake("vae")
    assert instance.asleep("vae")


def test_an_unknown_component_lists_the_names(instance: ModelInstance) -> None:
    with pytest.raises(UserError, match="Did you mean 'vae'"):
        instance.sleep("vea")


def test_threads_wake_and_sleep_without_a_wrong_result(instance: ModelInstance) -> None:
    """Calls and sleeps from several threads: a sleep is refused or waits, a call sees whole weights."""
    resident = instance.residents["transformer"]
    expected = [tensor.clone() for tensor in own_tensors(resident.module)]
    wrong: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with resident.active() as module:
                if not all(map(torch.equal, own_tensors(module), expected)):
                    wrong.append("read")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with contextlib.suppress(InUse):
            instance.sleep("transformer")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
