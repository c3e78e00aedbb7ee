"""Labels stay with their documents, through splits, skips and the cache; documents become rows with their labels."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from labelled import label_recipe, write_table
from machine import new_cache

from lmlong import recipe
from lmlong.data.data_module import DATA_MODULES
from lmlong.data.labels import label_ids, with_label_names
from lmlong.data.rows import IGNORED
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.data.token_file import TokenFile
from lmlong.errors import RecipeError, UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    return tmp_path / "cache"


def text_of(paths: list[Path], **options: Any) -> recipe.Text:
    source = recipe.Files(kind="files", paths=list(map(str, paths)))
    tokenizer = recipe.Tokenizer(kind="bytes")
    options = {"labels": recipe.Labels(), "sequence_length": 8, "rows": "documents", **options}
    return recipe.Text(sources=[source], tokenizer=tokenizer, **options)


def documents(tokens: TokenDataset, file: TokenFile) -> list[str]:
    return [tokens.tokenizer.decode(part[1:-1].tolist()) for part in np.split(file.tokens, file.starts[1:])]


def pairs(tokens: TokenDataset) -> dict[str, str]:
    """The text of each document of all splits, with its label."""
    files = [*tokens.train, tokens.validation]
    return {text: label for file in files for text, label in zip(documents(tokens, file), file.labels, strict=True)}


def test_labels_stay_with_documents_of_tables_through_split_and_skips(tmp_path: Path) -> None:
    draw = Random(0)
    wanted = {f"document {number} " + "z" * draw.randrange(300): draw.choice(["x", "y", "z"]) for number in range(80)}
    records = [json.dumps({"label": label, "text": text}) for text, label in wanted.items()]
    records[5:5] = [json.dumps({"label": "x", "text": ""}), json.dumps({"label": "y", "text": None}), records[2]]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    options = {"validation": recipe.Validation(fraction=0.3), "duplicates": "drop"}
    tokens = prepare(text_of([tmp_path / "a.jsonl"], **options))
    assert 10 < len(tokens.validation.labels) < 40 and len(tokens.train[0].labels) + len(tokens.validation.labels) == 80
    assert pairs(tokens) == wanted == pairs(prepare(text_of([tmp_path / "a.jsonl"], **options)))  # also from the cache
    first = tokens.validation.first(int(tokens.validation.starts[3]) + 1)
    assert len(first.labels) == len(first.starts) == 4


def test_labels_are_numbers_switches_or_folders_too(tmp_path: Path) -> None:
    lines = [f"{number % 2 == 0},{number % 3},text {number}" for number in range(30)]
    (tmp_path / "a.csv").write_text("even,third,text\n" + "\n".join(lines))
    for field, names in (("even", ["False", "True"]), ("third", ["0", "1", "2"])):
        tokens = prepare(text_of([tmp_path / "a.csv"], labels=recipe.Labels(field=field)))
        assert (
            sorted(set(pairs(tokens).values())) == names and pairs(tokens)["text 7"] == ["False", "1"][len(names) - 2]
        )
    for name in ("cats", "dogs"):
        (tmp_path / "of" / name).mkdir(parents=True)
        for number in range(15):
            (tmp_path / "of" / name / f"{number}.txt").write_text(f"{number} {name}")
    tokens = prepare(text_of([tmp_path / "of"], labels=recipe.Labels(field="folder")))
    assert len(pairs(tokens)) == 30 and all(text.endswith(label) for text, label in pairs(tokens).items())


def test_labels_that_cannot_be_learned_are_named(tmp_path: Path) -> None:
    def refused(records: list[dict[str, Any]], **labels: Any) -> str:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        options = {"labels": recipe.Labels(**labels), "validation": recipe.Validation(fraction=0.3)}
        text = text_of([tmp_path / "a.jsonl"], **options)
        with pytest.raises(UsageError) as error:
            tokens = prepare(text)
            with_label_names(text, [*tokens.train, tokens.validation])
        return str(error.value)

    good = [{"text": f"t{number}", "label": "x"} for number in range(40)]
    why = refused([{"text": "t", "lable": "x"}])
    assert ":0: no field 'label', only lable. Set text.labels.field. Did you mean 'lable'?" in why
    assert ":0: the label in field 'label' is empty" in refused([{"text": "t", "label": None}, *good])
    assert "is a float" in refused([{"text": "t", "label": 0.5}])
    assert "has the value 'x' in all documents" in refused(good)
    many = [{"text": f"t{number}", "label": number} for number in range(1001)]
    assert "has 1,001 different values, and a model chooses from at most 1,000" in refused(many)
    named = refused([*good, {"text": "t", "label": "yy"}], names=["x", "yyy"])
    assert named.startswith("'yy' is a label of a document, but not one of text.labels.names: x, yyy. Did you mean")
    with pytest.raises(RecipeError, match="'x' is named twice"):
        recipe.Labels(names=["x", "y", "x"])
    with pytest.raises(RecipeError, match="nothing to choose"):
        recipe.Labels(names=["x"])


def test_named_labels_keep_their_order(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.jsonl", 30)
    text = text_of([path], labels=recipe.Labels(names=["yes", "maybe", "no"]))
    tokens = prepare(text)
    labels = with_label_names(text, tokens.train).labels
    assert labels is not None and labels.names == ["yes", "maybe", "no"]
    assert label_ids(["no", "yes"], labels.names).tolist() == [2, 0]
    plain = text.model_copy(update={"labels": recipe.Labels()})
    assert with_label_names(plain, tokens.train).labels.names == ["no", "yes"]  # type: ignore[union-attr]


def test_damaged_labels_are_made_again(tmp_path: Path, cache: Path) -> None:
    text = text_of([write_table(tmp_path / "a.jsonl", 30)])
    tokens = prepare(text)
    wanted, file = pairs(tokens), tokens.folder / "labels.json"
    for damaged in ("{}", "[]", "no json", file.read_text().replace('"yes", ', "", 1), '{"train-0.tokens": 3}'):
        file.write_text(damaged)
        assert pairs(prepare(text)) == wanted
    other = prepare(text.model_copy(update={"labels": None}))
    assert other.folder != tokens.folder and not other.validation.labels and other.identity != tokens.identity


@pytest.mark.parametrize("kind", ["encoder", "causal", "downsampled"])
def test_each_document_is_a_row_with_its_label_at_the_last_token(tmp_path: Path, kind: str) -> None:
    chosen = label_recipe(tmp_path, kind, **{"text.sequence_length": 12})
    tokens = prepare(chosen.text)
    names = with_label_names(chosen.text, tokens.train)
    module = DATA_MODULES["label"](chosen.model_copy(update={"text": names}), tokens)
    wanted = sorted((text[:10].encode(), label) for text, label in pairs(tokens).items())  # 11 bytes are one too many
    seen = []
    batches = [module.training().batch(number) for number in range(8)]  # an epoch of 64 documents
    for batch in [*batches, *module.validation()]:
        rows, targets, mask = batch
        assert rows.shape[1] <= 12 and ((targets != IGNORED).sum(1) == 1).all()
        for row, target, masked in zip(rows, targets, mask, strict=True):
            last = int((target != IGNORED).argmax())
            assert row[0] == tokens.tokenizer.bos and row[last] == tokens.tokenizer.eos
            expected = np.arange(len(row)) > last if kind == "encoder" else np.arange(len(row)) == 0
            assert (masked == expected).all()
            seen.append((tokens.tokenizer.decode_bytes(row[1:last]), ["no", "yes"][target[last]]))
    assert sorted(seen) == wanted
    assert module.epoch_tokens == 64 * 12 and module.tokens_per_target == 12
    few = list(module.validation(limit=5 * 13))
    assert sum(len(batch[0]) for batch in few) == 5
    ranks = [list(module.validation(rank=rank, ranks=2)) for rank in (0, 1)]
    assert [len(part) for part in ranks] == [2, 2] and (ranks[1][1][1] == IGNORED).all()  # 20 documents are 3 batches
