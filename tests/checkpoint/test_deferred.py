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


def draw_weights() -> dict[str, Tensor]:
    """Weights of any shape, dtype and order of names, some of them scalar or empty."""
    draw = random.Random(0)
    weights = {}
    for number in range(100):
        shape = [draw.randrange(5) for _ in range(draw.randrange(4))]
        dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
        weights[f"blocks.{draw.randrange(100)}.{number}"] = torch.randn(shape).to(dtype)
    column = torch.randn(3, 2)[:, 1]
    return {**weights, "column": column, "number": column[:1], "row": column[None, :, None]}


def test_file_is_that_of_safetensors(tmp_path: Path) -> None:
    weights, computed = draw_weights(), Computed()
    save_file({name: x.clone(memory_format=torch.contiguous_format) for name, x in weights.items()}, tmp_path / "whole")
    mixed = {
        name: computed.defer(name, tensor) if number % 2 else tensor
        for number, (name, tensor) in enumerate(weights.items())
    }
    write.save_one_at_a_time(mixed, tmp_path / "deferred")
    assert (tmp_path / "deferred").read_bytes() == (tmp_path / "whole").read_bytes()
    assert computed.most == 1 and computed.alive == 0


@pytest.mark.parametrize("is_mapped", [False, True])
def test_training_state_is_written_one_at_a_time_and_read_back(tmp_path: Path, is_mapped: bool) -> None:
    """What is mapped may be unloaded, and is read again, also when training has removed the checkpoint."""
    computed, plain = Computed(), {"step": 3, "scaler": None, "carried.0": torch.tensor([2]), "recent": [1 / 3]}
    moments = {f"optimizer.{n}.exp_avg": torch.randn(n, 3000) for n in range(9)}
    deferred = {name: computed.defer(name, tensor) for name, tensor in moments.items()}
    write.save_training({**plain, **deferred}, tmp_path)
    assert computed.most == 1 and computed.alive == 0
    expected = {**plain, **moments}
    found = read.read_training(tmp_path, mapped=moments if is_mapped else ())
    (tmp_path / manifest.TRAINING_TENSORS).unlink()
    assert found.keys() == expected.keys()
    for _ in range(2):
        for name, value in expected.items():
            if isinstance(value, Tensor):
                assert torch.equal(found[name], value), name
            else:
                assert found[name] == value
        for name in moments if is_mapped else ():
            read.unload(found[name])


def test_ranks_that_do_not_write_compute_in_order(tmp_path: Path) -> None:
    """Otherwise they would exchange parts of different tensors."""
    orders = []
    for use in (lambda contents: write.write(tmp_path / "step-00000001", contents), Contents.gather):
        computed = Computed()
        weights = {name: computed.defer(name, tensor) for name, tensor in draw_weights().items()}
        training = {name: computed.defer(name, torch.ones(size)) for name, size in (("a", 3), ("b", 2))}
        use(Contents(weights, {"step": 1, **training}, "", b"", 1))
        orders.append(computed.order)
    assert orders[0] == orders[1] and len(orders[0]) == 105
