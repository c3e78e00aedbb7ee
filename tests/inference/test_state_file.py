"""A text that was read once is gone on with from a file: the same, to the last bit, and by its own model only."""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from crafted_values import write_state
from safetensors.torch import load_file, save_file

from lmlong.attention.base import state_tensors
from lmlong.checkpoint.write import Contents, write
from lmlong.cli.generate import generate
from lmlong.cli.state import state
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference import sparse
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.session import append_token, next_logits
from lmlong.inference.state_file import describe
from lmlong.recipe import Attention, Downsample
from lmlong.recipe import file as recipe_file

from .conftest import tiny, write_run

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 60
MORE = "The wind howled; "
KINDS = {
    "mixed": {"attention": Attention(kind=["linear", "window"], window=20)},
    "softmax": {"attention": Attention(kind="softmax")},
    "hourglass": {"layers": 3, "downsample": Downsample(factor=4, kind="conv")},
    "learned": {},
}


def another(folder: Path, seed: int = 0, **options: object) -> TrainedLanguageModel:
    """A model with other options than that of the run."""
    torch.manual_seed(seed)
    return load(write_run(folder, ByteTokenizer(), "bytes", options=tiny().model_copy(update=options)), "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_continues_from_a_file_as_from_memory(tmp_path: Path, kind: str) -> None:
    loaded = another(tmp_path / "other", **KINDS[kind])
    session = loaded.read(TEXT, learn=kind == "learned")
    loaded.save_state(session, tmp_path / "book.state")
    again = load(tmp_path / "other", "cpu").load_state(tmp_path / "book.state")
    pairs = list(zip(*map(state_tensors, (again, session)), strict=True))
    assert all(torch.equal(x, y) for x, y in pairs)
    options = {"max_tokens": 30, "temperature": 1.0, "repetition_penalty": 1.3}
    texts = ["".join(loaded.stream(MORE, state=each, **options)) for each in (again, session)]
    assert texts[0] == texts[1]


def test_state_build_generate_and_info_continue_a_text(run: Path, tmp_path: Path) -> None:
    book, kept, later = tmp_path / "book.txt", tmp_path / "book.state", tmp_path / "later.state"
    book.write_text(TEXT)
    built = CliRunner().invoke(state, ["build", str(run), str(book), "-o", str(kept)], catch_exceptions=False)
    assert built.output == f"{kept}: {len(TEXT) + 1:,} tokens saved in {kept.stat().st_size:,} bytes\n"
    words = [str(run), "--load-state", str(kept), "--prompt", "Then ", "--max-tokens", "20", "--seed", "0"]
    text = CliRunner().invoke(generate, [*words, "--save-state", str(later)], catch_exceptions=False).output
    loaded = load(run, "cpu")
    assert text == "".join(loaded.stream("Then ", state=loaded.load_state(kept), max_tokens=20))
    told = json.loads(CliRunner().invoke(state, ["info", str(later), "--json"], catch_exceptions=False).output)
    assert told["tokens"] == len(TEXT) + 1 + 5 + 20 and told["tail"].endswith(text)
    assert "tokens       3,541" in CliRunner().invoke(state, ["info", str(kept)], catch_exceptions=False).output


def test_a_state_of_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    favor = Attention(kind="linear", feature_map="favor")
    mine, drawn_anew = (another(tmp_path / str(seed), seed, attention=favor) for seed in (0, 1))
    mine.save_state(mine.read(TEXT), tmp_path / "book.state")
    with pytest.raises(CheckpointError, match=r"book\.state: made with another draw of random features"):
        drawn_anew.load_state(tmp_path / "book.state")

    weights = mine.model.state_dict()
    weights["norm.weight"] = weights["norm.weight"] + 1
    write(tmp_path / "tuned", Contents(weights, {}, recipe_file.dump(mine.recipe), mine.tokenizer.file))
    with pytest.raises(
        CheckpointError, match=r"another weights \(.{12}\) than that of .*tuned \(.{12}\)\. Use it with"
    ):
        load(tmp_path / "tuned", "cpu").load_state(tmp_path / "book.state")


@pytest.fixture
def saved(run: Path, tmp_path: Path) -> tuple[TrainedLanguageModel, Path]:
    """A model, and a state file of it."""
    loaded, file = load(run, "cpu"), tmp_path / "book.state"
    loaded.save_state(loaded.read(TEXT), file)
    return loaded, file


def test_every_bit_of_a_state_file_counts(saved: tuple[TrainedLanguageModel, Path]) -> None:
    """A sample of its header, and of its data."""
    loaded, file = saved
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    draw = random.Random(0)
    places = [*draw.sample(range(8 * header), 120), *draw.sample(range(8 * header, 8 * len(good)), 30)]
    for place in places:
        byte, bit = divmod(place, 8)
        file.write_bytes(good[:byte] + bytes([good[byte] ^ 1 << bit]) + good[byte + 1 :])
        with pytest.raises(CheckpointError):
            loaded.load_state(file)
    file.write_bytes(good)
    loaded.load_state(file)


NO_STATES: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda file, good: file.write_bytes(b""),
    "begin of a header": lambda file, good: file.write_bytes(good[:100]),
    "cut off": lambda file, good: file.write_bytes(good[:-5]),
    "longer": lambda file, good: file.write_bytes(good + b"\0"),
    "other bytes": lambda file, good: file.write_bytes(b"{}" * 50),
    "huge header": lambda file, good: file.write_bytes(struct.pack("<Q", 2**63) + good[8:]),
    "other tensors": lambda file, good: save_file({"a": torch.zeros(1)}, file),
    "folder": lambda file, good: file.mkdir(),
    "device": lambda file, good: file.symlink_to(os.devnull),
}


@pytest.mark.parametrize("kind", NO_STATES)
def test_a_damaged_or_foreign_file_is_refused(saved: tuple[TrainedLanguageModel, Path], kind: str) -> None:
    loaded, file = saved
    good = file.read_bytes()
    file.unlink()
    NO_STATES[kind](file, good)
    with pytest.raises(CheckpointError, match=r"book\.state: .*damaged"):
        loaded.load_state(file)


def test_a_file_of_another_version_is_refused_and_a_missing_one_named(
    saved: tuple[TrainedLanguageModel, Path],
) -> None:
    loaded, file = saved
    for version, words in ((99, "of a newer lmlong, this one reads"), (1, "by an older lmlong")):
        write_state(file, {**describe(file), "format": version}, load_file(file))
        with pytest.raises(CheckpointError, match=words):
            loaded.load_state(file)
        loaded.save_state(loaded.read(TEXT), file)
    file.with_name("circle").symlink_to("circle")
    for missing in ("none", "circle"):
        with pytest.raises(UsageError, match="no such file"):
            loaded.load_state(file.with_name(missing))
    with pytest.raises(UsageError, match=r"No such file or directory\. Correct the path"):
        loaded.save_state(loaded.read("a"), file.with_name("no") / "folder.state")


def test_a_link_is_followed_and_a_file_of_the_user_beside_it_stays(
    saved: tuple[TrainedLanguageModel, Path], tmp_path: Path
) -> None:
    loaded, file = saved
    (tmp_path / ".a.state.partial").write_text("mine")
    (tmp_path / "link.state").symlink_to(file)
    loaded.save_state(loaded.load_state(tmp_path / "link.state"), tmp_path / "a.state")
    assert {path.name for path in tmp_path.iterdir()} == {"book.state", "link.state", "a.state", ".a.state.partial"}
    assert (tmp_path / ".a.state.partial").read_text() == "mine"


def test_a_short_text_makes_a_small_file(tmp_path: Path) -> None:
    loaded = another(tmp_path / "run", attention=Attention(kind=["ngram", "linear"]))
    session = loaded.read("to be or not to be, that is the question " * 3)
    for _ in range(3):  # values that are not in a table yet
        _, after = next_logits(loaded.model, session)
        session = append_token(session, after, 101)
    loaded.save_state(session, tmp_path / "text.state")
    again = loaded.load_state(tmp_path / "text.state")
    settled = session._replace(state=loaded.model.settle(session.state))
    assert all(map(torch.equal, state_tensors(again), state_tensors(settled)))
    assert (tmp_path / "text.state").stat().st_size < sum(x.nbytes for x in state_tensors(session)) / 20


def test_only_rows_that_differ_from_an_empty_state_are_stored() -> None:
    empty = {"table": torch.zeros(1, 2, 3000, 4), "names": torch.full((1, 2, 3000), -1), "few": torch.zeros(5)}
    tensors = {name: x.clone() for name, x in empty.items()}
    tensors["table"][0, 1, 7] = torch.tensor([1.0, 0.0, -0.0, torch.nan])
    tensors["table"][0, 0, 9] = -0.0
    tensors["names"][0, 0, 2999] = 5
    kept = sparse.pack(tensors, empty)
    assert sum(x.numel() for x in kept.values()) < 20
    for name, x in sparse.unpack(kept, empty).items():
        assert torch.equal(x.view(torch.uint8), tensors[name].view(torch.uint8)), "to the bit"
    full = {**tensors, "table": torch.ones(1, 2, 3000, 4)}
    assert sparse.pack(full, empty)["table"] is full["table"]
    rows = {"table.sparse_rows": torch.ones(1, 4)}
    for places in (torch.tensor([-1]), torch.tensor([6000]), torch.tensor([0.5]), torch.zeros(1, 1, dtype=torch.long)):
        with pytest.raises(ValueError, match="table"):
            sparse.unpack({"table.sparse_places": places, **rows}, empty)
