"""A sample of a text too long to keep, for the tokenizer to learn from: evenly spread, and the same every time."""

from collections.abc import Iterable, Iterator


def sample(texts: Iterable[str], budget: int) -> list[str]:
    """At most `budget` bytes of texts, evenly spread over a stream whose length nobody knows beforehand."""
    kept: list[str] = []
    size, stride = 0, 1
    for number, text in enumerate(texts):
        if number % stride:
            continue
        kept.append(text)
        size += _bytes(text)
        if size > 2 * budget:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(_bytes, kept))
    return _thin(kept, size, budget)


def head(texts: Iterable[str], budget: int) -> Iterator[str]:
    """The first texts, up to `budget` bytes."""
    for text in texts:
        budget -= _bytes(text)
        if budget < 0:
            return
        yield text


def _thin(texts: list[str], size: int, budget: int) -> list[str]:
    if size <= budget:
        return texts
    share = budget / size
    even = [text for number, text in enumerate(texts) if int((number + 1) * share) > int(number * share)]
    return list(head(even, budget))


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
