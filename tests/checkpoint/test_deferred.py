"""Tensors that are computed when they are written: the files are the same, and one takes memory at a time."""

import random
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lmlong.checkpoint import manifest, read, write
from lmlong.checkpoint.write import Contents, Deferred


class Computed:
    """Tensors to defer, which are counted while they are alive."""

    def __init__(self) -> None:
        self.alive, self.most = 0, 0
        self.order: list[str] = []

    def defer(self, name: str, tensor: Tensor) -> Deferred:
        def compute() -> Tensor:
            copied = tensor.clone()
            self.alive, self.most = self.alive + 1, max(self.most, self.alive + 1)
            weakref.finalize(copied, self._free)
            self.order.append(name)
            return copied

        return Deferred(tensor.shape, tensor.dtype, compute)

    def _free(self) -> None:
        self.alive -= 1


@pytest.fixture
def computed() -> Computed:
    return Computed()


def draw_weights() -> dict[str, Tensor]:
    """Weights of any shape, dtype and order of names, some of them scalar or empty."""
    draw = random.Random(0)
    weights = {}
    for number in range(100):
        shape = [draw.randrange(5) for _ in range(draw.randrange(4))]
        dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
        weights[f"blocks.{draw.randrange(100)}.{number}"] = torch.randn(shape).to(dtype)
    return weights


def test_file_is_that_of_safetensors(tmp_path: Path, computed: Computed) -> None:
    weights = draw_weights()
    save_file(weights, tmp_path / "whole")
    mixed = {
        name: computed.defer(name, tensor) if number % 2 else tensor
        for number, (name, tensor) in enumerate(weights.items())
    }
    write.save_one_at_a_time(mixed, tmp_path / "deferred")
    assert (tmp_path / "deferred").read_bytes() == (tmp_path / "whole").read_bytes()
    assert computed.most == 1 and computed.alive == 0


def test_tensors_are_written_and_read_one_at_a_time(tmp_path: Path, computed: Computed) -> None:
    moments = {f"optimizer.{n}.exp_avg": torch.randn(n, 3) for n in range(9)}
    state = {"step": 3, "scaler": None, "carried.0": torch.tensor([2]), "recent": [1 / 3]}
    deferred = {name: computed.defer(name, tensor) for name, tensor in moments.items()}
    write.save_training({**state, **deferred}, tmp_path)
    assert computed.most == 1 and computed.alive == 0
    expected = {**state, **moments}
    for mapped in ((), moments):
        found = read.read_training(tmp_path, mapped=mapped)
        assert found.keys() == expected.keys()
        assert all(
            torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
            for name, value in expected.items()
        )


def test_ranks_that_do_not_write_compute_in_order(tmp_path: Path) -> None:
    """Otherwise they would exchange parts of different tensors."""
    orders = []
    for is_written in (True, False):
        computed, training = Computed(), {"a": torch.ones(3), "b": torch.ones(2)}
        weights = {name: computed.defer(name, tensor) for name, tensor in draw_weights().items()}
        state = {"step": 1, **{name: computed.defer(name, tensor) for name, tensor in training.items()}}
        contents = Contents(weights, state, "", b"", 1)
        if is_written:
            write.write(tmp_path / "step-00000001", contents)
            manifest.verify(tmp_path / "step-00000001")
        else:
            contents.gather()
        orders.append(computed.order)
    assert orders[0] == orders[1] and len(orders[0]) == 102
    assert read.read_training(tmp_path / "step-00000001")["a"].tolist() == [1, 1, 1]


def test_mapped_state_is_read_again_after_unloading(tmp_path: Path) -> None:
    momentum = torch.randn(5000)
    write.save_training({"momentum": momentum, "random": torch.arange(4)}, tmp_path)
    state = read.read_training(tmp_path, mapped={"momentum"})
    for _ in range(2):
        assert torch.equal(state["momentum"], momentum)
        read.unload(state["momentum"])
    (tmp_path / manifest.TRAINING_TENSORS).unlink()  # as training does with checkpoints that it no longer keeps
    assert torch.equal(state["momentum"], momentum) and state["random"].tolist() == [0, 1, 2, 3]
