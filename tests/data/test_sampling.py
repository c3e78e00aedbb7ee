"""The tokenizer's sample is small enough, and from everywhere."""

from lmlong.data.tokenizers.training import head, sample


def test_a_short_text_is_taken_whole() -> None:
    assert sample(["ab", "cd"], 4) == ["ab", "cd"]


def test_a_long_text_is_thinned_evenly() -> None:
    texts = [f"{number:07}" for number in range(10_000)]
    found = [int(text) for text in sample(texts, 3_500)]
    assert 450 <= len(found) <= 500
    assert found == sorted(found)
    for begin in range(0, 10_000, 1_000):
        assert 35 <= sum(begin <= number < begin + 1_000 for number in found) <= 65


def test_the_head_counts_bytes() -> None:
    assert list(head(["é", "é", "a"], 4)) == ["é", "é"]
