"""Ratios of sums, and whether their standard errors over documents and clusters are what they say."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import lmlong
from lmlong.errors import UsageError
from lmlong.evaluation.document_sums import Sums, clusters_by, error_of_ratio
from lmlong.evaluation.perplexity_report import table, to_json


def test_an_error_of_a_ratio_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    inside, draws = 0, 2000
    for _ in range(draws):
        tokens = random.integers(50, 500, size=40)
        nats = tokens * random.normal(3.0, 0.5, size=40)  # a document's tokens are all alike
        inside += abs(nats.sum() / tokens.sum() - 3.0) < 2 * error_of_ratio(nats, tokens)
    assert 0.92 < inside / draws < 0.96


def test_the_error_counts_a_document_that_is_most_of_the_text() -> None:
    """The formula that is linear in the documents says less than half of it here."""
    nats, tokens = np.array([300.0, 22.0, 19.0, 24.0, 18.0]), np.array([100.0, 5.0, 5.0, 5.0, 5.0])
    ratios = [np.delete(nats, one).sum() / np.delete(tokens, one).sum() for one in range(5)]
    jackknife = math.sqrt(4 / 5 * sum((ratio - np.mean(ratios)) ** 2 for ratio in ratios))
    linear = math.sqrt(5 / 4 * ((nats - nats.sum() / tokens.sum() * tokens) ** 2).sum()) / tokens.sum()
    assert error_of_ratio(nats, tokens) == pytest.approx(jackknife)
    assert error_of_ratio(np.append(nats, 0), np.append(tokens, 0)) == pytest.approx(jackknife)
    assert math.isnan(error_of_ratio(nats[:1], tokens[:1]))
    assert linear < jackknife / 2


def test_differences_are_taken_document_by_document() -> None:
    one, other = Sums(3), Sums(3)
    for document, (mine, others) in enumerate([(9.0, 8.0), (90.0, 89.0), (19.0, 18.0)]):
        one.add(document, mine, 10, 5)
        other.add(document, others, 10, 5)
    change, error = one.above(other)
    assert (change, error) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-15))
    assert one.nats_error > 1  # the documents themselves differ by far more
    assert (one.documents, one.totals.tokens, one.totals.bytes) == (3, 30, 15)
    with pytest.raises(AssertionError, match="not the same targets"):
        one.above(Sums(3))


def test_errors_are_over_clusters() -> None:
    nats, tokens = np.array([5.0, 6.0, 9.0, 3.0, 4.0]), np.array([2.0, 3.0, 2.0, 1.0, 2.0])
    clustered, others = (Sums(5, np.array([0, 0, 1, 2, 2])) for _ in range(2))
    for document in range(5):
        clustered.add(document, nats[document], int(tokens[document]), 7)
        others.add(document, 1.0, int(tokens[document]), 7)
    expected = error_of_ratio(np.array([11.0, 9.0, 7.0]), np.array([5.0, 2.0, 3.0]))
    assert clustered.nats_error == pytest.approx(expected)
    assert clustered.above(others)[1] == pytest.approx(
        error_of_ratio(np.array([9.0, 8.0, 5.0]), np.array([5.0, 2.0, 3.0]))
    )
    assert (clustered.documents, clustered.clusters) == (5, 3)
    assert clustered.totals.nats == 27


def test_authors_are_told_by_the_names_of_files() -> None:
    names = ["burroughs-tarzan-of-the-apes.txt", "kipling-kim.txt.gz", "burroughs-pellucidar.txt", "anonymous.txt"]
    documents = [{"file": name, "folder": "books"} for name in names]
    assert clusters_by("author", documents).number.tolist() == [0, 1, 0, 2]
    assert clusters_by("folder", documents).number.tolist() == [0, 0, 0, 0]
    assert clusters_by("file", documents).number.tolist() == [0, 1, 2, 3]


def test_a_record_without_a_value_is_a_cluster_of_its_own() -> None:
    records = [{"author": "a"}, {"author": None}, {"author": "a"}, {"author": None}, {"author": 1}]
    assert clusters_by("author", records).number.tolist() == [0, 1, 0, 2, 3]
    with pytest.raises(UsageError, match=r"^--cluster-by: a document has no field 'autor', only author\. Did you mean"):
        clusters_by("autor", records)


def test_files_and_records_are_clustered_from_python(run: Path, tmp_path: Path) -> None:
    texts = {f"{author}-{number}.txt": f"{author} wrote {number} " * 9 for author in "abc" for number in range(2)}
    records = [{"text": text, "writer": name[0]} for name, text in texts.items()]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"lengths": [8], "views": ["context"], "min_documents": 6, "targets": 96, "name": "same"}
    plain = lmlong.evaluate(run, [tmp_path / name for name in texts], **options)
    by_name = lmlong.evaluate(run, [tmp_path / name for name in texts], cluster_by="author", **options)
    by_field = lmlong.evaluate(run, tmp_path / "records.jsonl", cluster_by="writer", **options)
    sums = [report.context[0].sums for report in (plain, by_name, by_field)]
    assert sums[0].nats.tolist() == sums[1].nats.tolist() == sums[2].nats.tolist()
    pairs = (sums[0].nats.reshape(3, 2).sum(1), sums[0].tokens.reshape(3, 2).sum(1))
    assert sums[1].nats_error == sums[2].nats_error == pytest.approx(error_of_ratio(*pairs))
    assert sums[1].nats_error != sums[0].nats_error
    assert "  documents in 3 clusters by author: the errors are over clusters\n" in table([by_name])
    assert "tokens of 6 documents in 3 clusters each time" in table([by_name])
    assert to_json([by_name])["runs"][0]["context"][0]["clusters"] == 3
    assert (to_json([by_field])["runs"][0]["cluster_by"], by_field.clusters, plain.clusters) == ("writer", 3, None)
    with pytest.raises(UsageError, match="no field 'writer', only file, folder, author"):
        lmlong.evaluate(run, tmp_path / "a-0.txt", cluster_by="writer", **options)
