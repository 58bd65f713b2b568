"""EngineProcess: the same bits as an engine in this process, weights that arrive whole or not at all, and ends."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cards.errors import UserError
from inference.engine import Engine
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.remote import wire
from inference.remote.process import EngineProcess, EngineProcessDied, EngineProcessError
from inference.remote.skeleton import Skeleton
from inference.remote.weight_stream import DamagedWeights, policy_tensors, receive_weights, send_weights
from inference.request import Request
from loops.loop import Profile

REPO = Path(__file__).resolve().parents[2]
PROMPTS = ("a red circle", "the blue square moves left", "a red circle")


def requests(**options: Any) -> list[Request]:
    settings: dict[str, Any] = {"steps": 2, "guidance": 1.0, "solver": "euler", "profile": Profile.ROLLOUT}
    return [Request(prompt=prompt, seed=seed, **(settings | options)) for seed, prompt in enumerate(PROMPTS)]


def make_instance(folder: Path) -> ModelInstance:
    card = card_of(folder)
    sampling = card.sampling.model_copy(update={"max_sequence_length": 12})
    return ModelInstance.from_folder(card.model_copy(update={"sampling": sampling}), folder)


def moved(instance: ModelInstance, by: float = 0.01) -> ModelInstance:
    """A role of it with weights of its own: some moved, most not."""
    module = copy.deepcopy(instance.module("transformer"))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "proj_out" in name:
                parameter.add_(by)
    return instance.view({"transformer": Resident(module)})


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    return make_instance(wan_folder)


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    made = EngineProcess(threads=torch.get_num_threads(), chunk=1000)
    made.start()
    yield made
    made.close()


def pieces(artifact: Any) -> dict[str, Tensor]:
    """Every tensor of an artifact."""
    record = {name: value for name, value in vars(artifact.behaviour).items() if isinstance(value, Tensor)}
    return {"latents": artifact.latents, "video": artifact.video, **record}


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) == len(PROMPTS)
    for a, b in zip(ours, theirs, strict=True):
        assert pieces(a).keys() == pieces(b).keys()
        assert all(torch.equal(value, pieces(b)[name]) for name, value in pieces(a).items())
        assert a.provenance.params == b.provenance.params and a.provenance.card_digest == b.provenance.card_digest


# -- the wire


def test_a_message_arrives_as_it_was_and_a_view_sends_its_own_rows_alone() -> None:
    ours, theirs = Pipe()
    whole = torch.randn(1000, 4)
    message = {
        "row": whole[3],
        "turned": whole[:2].T,
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "words": ("a", None, 0),
    }
    sent = wire.send(ours, message)
    got, received = wire.receive_counted(theirs)
    assert sent == received < 3000
    assert got["words"] == ("a", None, 0)
    for name, tensor in message.items():
        if isinstance(tensor, Tensor):
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_weights_arrive_in_chunks_and_what_is_known_is_not_sent_again(chunk: int) -> None:
    ours, theirs = Pipe()
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(4, dtype=torch.int16), "none": torch.empty(0)}
    sent, size = send_weights(ours, tensors, {}, chunk)
    got = dict(receive_weights(theirs))
    assert size == 3 * 5 * 4 + 4 * 2 and got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in tensors.items())
    tensors["a"] = tensors["a"] + 1
    again, size = send_weights(ours, tensors, sent, chunk)
    assert list(again) == ["a"] and size == 60
    assert torch.equal(dict(receive_weights(theirs))["a"], tensors["a"])


def test_a_damaged_tensor_is_found_and_the_stream_is_read_to_its_end() -> None:
    ours, theirs = Pipe()

    class Flipping:
        """A connection that turns one bit of the first long piece."""

        flipped = False

        def send_bytes(self, data: Any) -> None:
            data = bytearray(data)
            if len(data) == 40 and not self.flipped:
                self.flipped = True
                data[17] ^= 4
            ours.send_bytes(data)

    broken: Any = Flipping()
    send_weights(broken, {"good": torch.zeros(3), "bad": torch.zeros(10), "late": torch.ones(3)}, {}, 1 << 20)
    wire.send(ours, "what follows")
    arrived = []
    with pytest.raises(DamagedWeights, match=r"1 tensor.*bad"):
        for name, _ in receive_weights(theirs):
            arrived.append(name)
    assert arrived == ["good"] and wire.receive(theirs) == "what follows"


# -- skeletons


def test_a_skeleton_has_the_structure_and_the_memory_layout_but_no_weights(instance: ModelInstance) -> None:
    module = instance.module("transformer")
    skeleton = Skeleton.of(module)
    weights = sum(p.numel() * 4 for p in module.parameters())
    built = skeleton.build("cpu")
    assert sum(size for size, _ in skeleton.blocks) >= weights
    assert len(skeleton.pickled) < 0.5 * weights + sum(b.numel() * 8 for b in module.buffers()) + 300_000
    ours, theirs = dict(module.named_parameters()), dict(built.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        other = theirs[name]
        assert other.shape == parameter.shape and other.stride() == parameter.stride()
        assert other.dtype == parameter.dtype and other.requires_grad == parameter.requires_grad
        assert (other.data_ptr() - parameter.data_ptr()) % 64 == 0 and other.data_ptr() != parameter.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), built.buffers(), strict=True))
    built.load_state_dict(module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), built.parameters(), strict=True))


def test_a_skeleton_keeps_ties_and_refuses_what_cannot_travel() -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    built = Skeleton.of(tied).build("cpu")
    assert built[0].weight is built[1].weight
    tied[0].helper = lambda x: x  # type: ignore[assignment]
    with pytest.raises(UserError, match="Sequential cannot be sent"):
        Skeleton.of(tied)


# -- the process


def test_rollouts_have_the_bits_of_this_process_and_the_version_of_their_weights(
    process: EngineProcess, instance: ModelInstance
) -> None:
    engine = Engine(batching="shape")
    captured = requests(capture=("trajectory", "velocities"))
    process.host("policy", instance)
    first = process.sync("policy", instance, 0)
    names = policy_tensors(instance, "transformer", None, whole=True)
    assert (first.tensors, first.bytes) == (len(names), sum(t.numel() * t.element_size() for t in names.values()))
    rolled = process.roll_out("policy", captured)
    assert_same(rolled.artifacts, engine.run_interleaved(captured, instance))
    assert {a.provenance.weights_versions["transformer"] for a in rolled.artifacts} == {0}

    role = moved(instance)
    second = process.sync("policy", role, 1)
    assert 0 < second.tensors < 5 and second.bytes < first.bytes / 4
    again = process.roll_out("policy", captured)
    assert_same(again.artifacts, engine.run_interleaved(captured, role))
    assert not torch.equal(again.artifacts[0].latents, rolled.artifacts[0].latents)
    assert {a.provenance.weights_versions["transformer"] for a in again.artifacts} == {1}
    assert process.sync("policy", role, 2).tensors == 0
    third = process.roll_out("policy", captured).artifacts[0]
    assert third.provenance.weights_versions["transformer"] == 2 and torch.equal(
        third.latents, again.artifacts[0].latents
    )


def test_what_fails_inside_is_told_and_the_process_goes_on(process: EngineProcess, instance: ModelInstance) -> None:
    process.host("policy", instance)
    process.sync("policy", instance, 5)
    with pytest.raises(UserError, match="steps"):
        process.roll_out("policy", requests(steps=-1))
    wrong: Any = [*requests()[:2], "no request"]
    with pytest.raises(EngineProcessError, match="Traceback"):
        process.roll_out("policy", wrong)
    assert_same(
        process.roll_out("policy", requests()).artifacts, Engine(batching="shape").run_interleaved(requests(), instance)
    )


def test_weights_that_do_not_fit_leave_the_old_ones_whole(process: EngineProcess, instance: ModelInstance) -> None:
    process.host("policy", instance)
    process.sync("policy", instance, 7)
    before = process.roll_out("policy", requests()).artifacts
    other = moved(instance, 0.5)
    other.module("transformer").proj_out.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"wrong shape: proj_out\.bias"):
        process.sync("policy", other, 8)
    process._versions["policy"] = 7
    assert_same(process.roll_out("policy", requests()).artifacts, before)
    process.sync("policy", moved(instance, 0.5), 9)  # all is sent again: what is there is not known


def test_a_lora_role_sends_its_own_adapter_alone_under_the_name_of_the_first(
    process: EngineProcess, training: Any
) -> None:
    from methods.diffusion_nft import DiffusionNFT
    from methods.roles import OLD, REFERENCE, STUDENT

    method = DiffusionNFT(lr=1e-3, steps=2, batch_size=2, kl=0.1, lora={"rank": 2})
    ctx = training.context(method)
    generator = torch.Generator().manual_seed(1)
    for role in (STUDENT, OLD):
        for parameter in ctx.roles.parameters_of(role).values():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    old, student = ctx.roles.instance(OLD), ctx.roles.instance(STUDENT)
    process.host("lora", old)
    process.sync("lora", old, 0)
    assert_same(process.roll_out("lora", requests()).artifacts, ctx.engine.run_interleaved(requests(), old))
    cost = process.sync("lora", student, 1)
    own = ctx.roles.parameters_of(STUDENT)
    assert cost.tensors == len(own) and cost.bytes == sum(p.numel() * 4 for p in own.values())
    theirs = process.roll_out("lora", requests()).artifacts
    assert_same(theirs, ctx.engine.run_interleaved(requests(), student))
    reference = ctx.engine.run_interleaved(requests(), ctx.roles.instance(REFERENCE))
    assert not torch.equal(theirs[0].latents, reference[0].latents)


def test_a_killed_process_is_an_error_at_once_and_may_be_started_again(instance: ModelInstance) -> None:
    process = EngineProcess(threads=1)
    with pytest.raises(EngineProcessDied, match="does not run"):
        process.host("policy", instance)
    process.start()
    process.host("policy", instance)
    process.sync("policy", instance, 0)
    process.submit("policy", requests(steps=2000))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineProcessDied, match="signal 9"):
        process.results()
    assert time.monotonic() - began < 10 and not process.alive
    process.start()
    process.host("policy", instance)
    process.sync("policy", instance, 0)
    process.submit("policy", requests(steps=2000))
    pid = process.pid
    began = time.monotonic()
    process.close()  # in the middle of the requests
    assert time.monotonic() - began < 10 and not exists(pid)


def exists(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


OWNER = """
import sys
from pathlib import Path
sys.path[:0] = [{repo!r}, {tests!r}]
from test_engine_process import make_instance, requests
from inference.remote.process import EngineProcess
if __name__ == "__main__":
    instance = make_instance(Path({folder!r}))
    process = EngineProcess(threads=1)
    process.start()
    process.host("policy", instance)
    process.sync("policy", instance, 0)
    process.submit("policy", requests(steps=20000))
    print(process.pid, flush=True)
    process.results()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_it_does_not_outlive_its_owner(how: signal.Signals, wan_folder: Path, tmp_path: Path) -> None:
    """In the middle of a long rollout; SIGINT goes to both, as from a terminal."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(repo=str(REPO), tests=str(Path(__file__).parent), folder=str(wan_folder)))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        try:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            assert exists(pid)
            if how == signal.SIGINT:
                os.killpg(owner.pid, how)
            else:
                os.kill(owner.pid, how)
            _, errors = owner.communicate(timeout=240)
            deadline = time.monotonic() + 240
            while exists(pid):
                assert time.monotonic() < deadline, "an orphan"
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(owner.pid, signal.SIGKILL)
    assert owner.returncode != 0
    assert errors.count("Traceback") == (1 if how == signal.SIGINT else 0), errors
