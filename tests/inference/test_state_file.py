"""A text that was read once is gone on with from a file: the same, to the last bit, and by its own model only."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from commands import lmlong as command
from crafted_values import write_state
from safetensors.torch import load_file, save_file

from lmlong.attention.base import state_tensors
from lmlong.checkpoint.write import Contents, write
from lmlong.cli.generate import generate
from lmlong.cli.state import state
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.state_file import describe
from lmlong.recipe import Attention, Downsample
from lmlong.recipe import file as recipe_file

from .conftest import tiny, write_run

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 60
KINDS = {
    "mixed": {"attention": Attention(kind=["linear", "window"], window=20)},
    "softmax": {"attention": Attention(kind="softmax")},
    "hourglass": {"layers": 3, "downsample": Downsample(factor=4, kind="conv")},
}


def another(folder: Path, seed: int = 0, **options: object) -> TrainedLanguageModel:
    """A model with other options than that of the run."""
    torch.manual_seed(seed)
    return load(write_run(folder, ByteTokenizer(), "bytes", options=tiny().model_copy(update=options)), "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_continues_from_a_file_as_from_memory(tmp_path: Path, kind: str) -> None:
    loaded = another(tmp_path / "other", **KINDS[kind])
    session = loaded.read(TEXT)
    loaded.save_state(session, tmp_path / "book.state")
    again = load(tmp_path / "other", "cpu").load_state(tmp_path / "book.state")
    assert all(map(torch.equal, state_tensors(again), state_tensors(session)))
    options = {"max_tokens": 30, "temperature": 1.0, "repetition_penalty": 1.3}
    assert list(loaded.stream("", state=again, **options)) == list(loaded.stream("", state=session, **options))


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

    whole = "".join(loaded.stream("Then ", state=loaded.load_state(kept), max_tokens=29, temperature=0))
    first = CliRunner().invoke(generate, [*words, "--temperature", "0", "--save-state", str(later)]).output
    more = [str(run), "--load-state", str(later), "--max-tokens", "9", "--temperature", "0"]
    assert first + CliRunner().invoke(generate, more, catch_exceptions=False).output == whole


def test_the_state_after_a_stop_string_is_that_of_the_printed_text(run: Path, tmp_path: Path) -> None:
    kept, words = tmp_path / "text.state", [str(run), "--prompt", "to be", "--max-tokens", "40", "--temperature", "0"]
    whole = CliRunner().invoke(generate, words, catch_exceptions=False).output
    stop = ["--stop", whole[9:11], "--save-state", str(kept)]
    text = CliRunner().invoke(generate, [*words, *stop], catch_exceptions=False).output
    assert text == whole[: whole.index(whole[9:11])]
    told = json.loads(CliRunner().invoke(state, ["info", str(kept), "--json"], catch_exceptions=False).output)
    assert told["tail"] == "to be" + text
    more = [str(run), "--load-state", str(kept), "--max-tokens", "9", "--temperature", "0"]
    assert whole.startswith(text + CliRunner().invoke(generate, more, catch_exceptions=False).output)


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


def test_every_bit_of_a_state_file_counts(run: Path, tmp_path: Path) -> None:
    """A sample of its header, and of its data."""
    loaded, file = load(run, "cpu"), tmp_path / "book.state"
    loaded.save_state(loaded.read(TEXT), file)
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


@pytest.mark.parametrize(("version", "words"), [(99, "of a newer lmlong, this one reads"), (1, "by an older lmlong")])
def test_a_state_file_of_another_version_is_refused(run: Path, tmp_path: Path, version: int, words: str) -> None:
    loaded, file = load(run, "cpu"), tmp_path / "book.state"
    loaded.save_state(loaded.read(TEXT), file)
    found = load_file(file)
    write_state(file, {**describe(file), "format": version}, found)
    with pytest.raises(CheckpointError, match=words):
        loaded.load_state(file)


def test_a_damaged_or_foreign_file_is_refused(run: Path, tmp_path: Path) -> None:
    loaded, file = load(run, "cpu"), tmp_path / "book.state"
    loaded.save_state(loaded.read(TEXT), file)
    good = file.read_bytes()
    with pytest.raises(UsageError, match="no such file"):
        loaded.load_state(tmp_path / "none")
    for bad in (b"", good[:100], good[:-5], b"{}" * 50):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match="damaged"):
            loaded.load_state(file)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="damaged"):
        describe(file)

    file.write_bytes(good)
    found, about = load_file(file), describe(file)
    for change, why in (
        ({"state.blocks.0.attention.S": torch.zeros(1, 2, 8, 9)}, "has the shape"),
        ({"state.position": torch.zeros(1)}, "is torch.float32"),
        ({"more": torch.zeros(1)}, "is missing, or not a tensor"),
        ({"last": torch.tensor([-1])}, "holds -1, which is not from 0 to"),
        ({"last": torch.tensor([10**6])}, "holds 1000000, which is not from 0 to"),
    ):
        write_state(file, about, {**found, **change})
        with pytest.raises(CheckpointError, match=f"{next(iter(change))} {why}"):
            loaded.load_state(file)


def test_only_one_text_goes_into_a_file(run: Path, tmp_path: Path) -> None:
    for words in (["--samples", "2"], ["--prompts", __file__]):
        with pytest.raises(UsageError, match="--save-state: saves the state of one text"):
            options = [*words, "--save-state", str(tmp_path / "two.state")]
            CliRunner().invoke(generate, [str(run), *options], catch_exceptions=False)
    assert not list(tmp_path.glob("*.state")) and not list(tmp_path.glob(".*partial"))


def test_a_file_of_the_user_beside_it_stays(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".a.state.partial").write_text("mine")
    loaded = load(run, "cpu")
    loaded.save_state(loaded.read("a"), tmp_path / "a.state")
    assert (tmp_path / ".a.state.partial").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


def test_a_file_that_cannot_be_written_leaves_nothing(run: Path, tmp_path: Path) -> None:
    loaded = load(run, "cpu")
    with pytest.raises(UsageError, match=r"No such file or directory\. Correct the path"):
        loaded.save_state(loaded.read("a"), tmp_path / "no" / "such" / "folder.state")


def test_the_command_refuses_what_is_not_a_state_file(run: Path, tmp_path: Path) -> None:
    loaded, good, file = load(run, "cpu"), tmp_path / "good.state", tmp_path / "drawn.state"
    loaded.save_state(loaded.read("once upon"), good)
    state = good.read_bytes()
    words = ("generate", run, "--load-state", file, "--prompt", "", "--max-tokens", "8")
    places: dict[str, Callable[[], object]] = {
        "folder": file.mkdir,
        "device": lambda: file.symlink_to(os.devnull),
        "link to itself": lambda: file.symlink_to(file),
        "huge header": lambda: file.write_bytes(struct.pack("<Q", 2**63) + state[8:]),
        "longer": lambda: file.write_bytes(state + b"\0"),
        "good": lambda: file.symlink_to(good),
    }
    for name, put in places.items():
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        put()
        done = command(*words)
        if name == "good":
            assert done.returncode == 0 and done.stdout
        else:
            assert done.returncode in (2, 4) and not done.stdout, name
            assert file.name in done.stderr and "Traceback" not in done.stderr, name
