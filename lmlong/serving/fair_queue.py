"""A queue in which owners take turns: an owner with many items does not delay the others by all of them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of owners; those of one owner keep their order."""

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}  # the owner whose turn is next first; none is empty
        self._size = 0  # counted, so that any thread may ask for it

    def put(self, owner: str, item: Item) -> None:
        self._items.setdefault(owner, deque()).append(item)
        self._size += 1

    def next_owner(self, load: Mapping[str, int] | None = None) -> str:
        """Return the owner whose turn is next, of those with the least `load`."""
        return next(iter(self._items)) if load is None else min(self._items, key=lambda owner: load.get(owner, 0))

    def take(self, owner: str) -> Item:
        """Return the first item of an owner, whose next turn comes after those of the others."""
        items = self._items.pop(owner)
        item = items.popleft()
        self._size -= 1
        if items:
            self._items[owner] = items
        return item

    def remove(self, unwanted: Callable[[Item], bool]) -> int:
        """Remove items, and return how many they were."""
        kept = {owner: deque(item for item in items if not unwanted(item)) for owner, items in self._items.items()}
        self._items = {owner: items for owner, items in kept.items() if items}
        removed = self._size - sum(map(len, kept.values()))
        self._size -= removed
        return removed

    def of(self, owner: str) -> int:
        """Return the number of an owner's items."""
        return len(self._items.get(owner, ()))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        for items in self._items.values():
            yield from items
