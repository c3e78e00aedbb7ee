"""A synthetic log of a web service, the same for the same seed, into which anomalies can be planted.

Requests pass through several components, whose lines share a request id; there are also normal lines that are rare,
such as those of a nightly job, and long ones. Users, paths, ids and times are random, so hardly any line occurs twice.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

NAMES = (
    "anna",
    "bela",
    "chen",
    "dora",
    "emil",
    "fatma",
    "goran",
    "hana",
    "ivan",
    "jana",
    "kofi",
    "lena",
    "mats",
    "nora",
)
FAMILIES = ("koch", "silva", "ito", "okafor", "novak", "berg", "rossi", "khan", "meyer", "dubois", "costa", "wolf")
GOODS = ("lamp", "chair", "table", "kettle", "bottle", "jacket", "tent", "rope", "drill", "paint", "brush", "clock")
COLOURS = ("red", "blue", "green", "black", "white", "grey", "brown", "yellow")
TABLES = ("orders", "users", "invoices", "sessions", "stock", "payments")


class Planted(NamedTuple):
    """One anomaly: its kind, and its lines, counted from 1."""

    kind: str
    first: int
    last: int


class ServiceLog(NamedTuple):
    """Lines without their ends, and the anomalies among them."""

    lines: list[str]
    planted: list[Planted]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


class Entry(NamedTuple):
    """The content of one line, and its format."""

    component: str
    message: str
    level: str = "INFO"
    form: Literal["plain", "json", "syslog"] = "plain"
    share: float = 1.0  # of the line's characters, from its beginning


class Service:
    """Draws the random values of a service, and keeps its clock."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self._hours = 8.0

    def line(self, entry: Entry) -> str:
        """Return the line of an entry, a random time after the last."""
        self.wait(self.draw.expovariate(1 / 40) / 3_600_000)
        days, milliseconds = divmod(int(self._hours * 3_600_000), 24 * 3_600_000)
        seconds, milliseconds = divmod(milliseconds, 1000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        time = f"2026-{3 + days // 28 % 10:02}-{days % 28 + 1:02}T{clock}.{milliseconds:03}Z"
        if entry.form == "json":
            level = entry.level.lower()
            line = json.dumps({"ts": time, "level": level, "logger": entry.component, "msg": entry.message})
        elif entry.form == "syslog":
            line = (
                f"Mar {days % 28 + 1:2} {clock} host7 {entry.component}[{self.draw.randrange(9999)}]: {entry.message}"
            )
        else:
            line = f"{time} {entry.level:<5} {entry.component:<8} {entry.message}"
        return line[: round(len(line) * entry.share)]

    def wait(self, hours: float) -> None:
        self._hours += hours

    def user(self) -> str:
        return f"{self.draw.choice(NAMES)}.{self.draw.choice(FAMILIES)}"

    def latency(self, typical: float) -> str:
        return f"{max(1, round(self.draw.lognormvariate(0, 0.5) * typical))}ms"


def request(service: Service) -> list[Entry]:
    """Return the entries of one request, in order."""
    name = f"req={service.draw.randrange(16**6):06x}"
    kind = service.draw.choices([_search, _order, _basket, _login], [5, 2, 4, 1])[0]
    entries = [entry._replace(message=f"{name} {entry.message}") for entry in kind(service)]
    status = service.draw.choices([200, 304, 404, 503], [90, 6, 3, 1])[0]
    done = f"{name} done status={status} latency={service.latency(40)}"
    return [*entries, Entry("gateway", done, "ERROR" if status == 503 else "INFO")]


def _search(service: Service) -> Iterator[Entry]:
    draw = service.draw
    words = f"{draw.choice(COLOURS)}+{draw.choice(GOODS)}"
    yield Entry("gateway", f"GET /search?q={words} user={service.user()}")
    yield Entry("search", f"query {words!r} hits={draw.randrange(400)} shards=4")
    if draw.random() < 0.08:  # a long line, which is normal
        columns = ", ".join(draw.sample([f"{table}.id" for table in TABLES], 4))
        ids = ", ".join(str(draw.randrange(10_000, 99_999)) for _ in range(draw.randrange(8, 30)))
        statement = f"SELECT {columns} FROM {draw.choice(TABLES)} WHERE id IN ({ids}) ORDER BY id LIMIT 100"
        yield Entry("db", f"slow query {service.latency(900)}: {statement}", "WARN")


def _order(service: Service) -> Iterator[Entry]:
    draw, user = service.draw, service.user()
    order = f"order={draw.randrange(10_000, 99_999)}"
    amount = f"amount={draw.randrange(500, 20_000) / 100:.2f} EUR"
    yield Entry("gateway", f"POST /orders user={user}")
    yield Entry("auth", f"token ok user={user} ttl={draw.randrange(60, 3600)}s")
    yield Entry("orders", f"created {order} items={draw.randrange(1, 9)}")
    yield Entry("billing", f"charge begins {order} {amount}")
    yield Entry("billing", f"charge settled {order} {amount}")
    yield Entry("mail", f"confirmation of {order} queued to {user}@example.org")


def _basket(service: Service) -> Iterator[Entry]:
    draw, user = service.draw, service.user()
    yield Entry("gateway", f"PUT /basket/{draw.choice(GOODS)} user={user}")
    yield Entry("auth", f"token ok user={user} ttl={draw.randrange(60, 3600)}s")
    yield Entry("basket", f"stored rev={draw.randrange(1, 40)} items={draw.randrange(1, 9)}")


def _login(service: Service) -> Iterator[Entry]:
    user = service.user()
    yield Entry("gateway", f"POST /login user={user}")
    if service.draw.random() < 0.1:
        yield Entry("auth", f"password refused user={user} tries={service.draw.randrange(1, 4)}", "WARN")
    yield Entry("auth", f"session opened user={user} ttl=3600s")


def nightly_job(service: Service) -> list[Entry]:
    """Return the entries of a job, which are rare and normal."""
    draw = service.draw
    service.wait(12)
    dumps = [f"dumped table {table} rows={draw.randrange(10**4, 10**6)}" for table in TABLES]
    messages = ["nightly dump begins", *dumps, f"nightly dump finished in {draw.randrange(60, 400)}s"]
    return [*(Entry("backup", message) for message in messages), Entry("cron", "logs rotated")]


def events(service: Service) -> Iterator[list[Entry]]:
    """Iterate endlessly over events: a heartbeat, a request, two overlapping requests, or the job."""
    draw = service.draw
    while True:
        for _ in range(400):
            kind = draw.random()
            if kind < 0.1:
                busy = f"heartbeat queue={draw.randrange(30)} busy={draw.randrange(9)}/8"
                yield [Entry("worker", busy)]
            elif kind < 0.25:
                yield _merged(request(service), request(service), draw)
            else:
                yield request(service)
        yield nightly_job(service)


def _merged(one: list[Entry], other: list[Entry], draw: random.Random) -> list[Entry]:
    """Interleave two lists of entries."""
    of_one = set(draw.sample(range(len(one) + len(other)), len(one)))
    left, right = iter(one), iter(other)
    return [next(left if place in of_one else right) for place in range(len(one) + len(other))]


Change = Callable[[list[Entry], random.Random], tuple[list[Entry], int, int]]
"""Makes an event anomalous: returns its entries, and the first and last index of the anomalous ones."""

NEW_MESSAGES = (
    ("kernel", "out of memory, killed process {} (java)"),
    ("gateway", "certificate of api.example.org expires in {} hours"),
    ("db", "disk /dev/sdb1 remounted read-only after {} errors"),
    ("worker", "clock went back by {} seconds, waiting"),
    ("auth", "signing key {} is not known, falling back"),
    ("db", "replica lags {} transactions behind"),
)


def new_message(entries: list[Entry], draw: random.Random) -> tuple[list[Entry], int, int]:
    """Insert a message that no program has written before."""
    component, message = draw.choice(NEW_MESSAGES)
    return _put_in(entries, Entry(component, message.format(draw.randrange(2, 9000))), draw)


def impossible_value(entries: list[Entry], draw: random.Random) -> tuple[list[Entry], int, int]:
    """Insert a usual message with an impossible number."""
    name = f"req={draw.randrange(16**6):06x}"
    status, latency = draw.choice([(draw.randrange(600, 1000), draw.randrange(20, 60)), (200, draw.randrange(10**7))])
    of_request = Entry("gateway", f"{name} done status={status} latency={latency}ms")
    of_worker = Entry("worker", f"heartbeat queue={draw.randrange(30)} busy={draw.randrange(20, 99)}/8")
    return _put_in(entries, draw.choice([of_request, of_request, of_worker]), draw)


def wrong_place(entries: list[Entry], draw: random.Random) -> tuple[list[Entry], int, int]:
    """Move a usual message: the end of a request before its middle, or the end of a job that never began."""
    if len(entries) >= 3:
        return [entries[0], entries[-1], *entries[1:-1]], 1, 1
    return _put_in(entries, Entry("backup", f"nightly dump finished in {draw.randrange(60, 400)}s"), draw)


def other_format(entries: list[Entry], draw: random.Random) -> tuple[list[Entry], int, int]:
    """Write a usual message in another format."""
    index, form = draw.randrange(len(entries)), draw.choice(FORMS)
    return [*entries[:index], entries[index]._replace(form=form), *entries[index + 1 :]], index, index


def truncated(entries: list[Entry], draw: random.Random) -> tuple[list[Entry], int, int]:
    """Cut a line short."""
    index = draw.randrange(len(entries))
    cut = entries[index]._replace(share=draw.uniform(0.45, 0.85))
    return [*entries[:index], cut, *entries[index + 1 :]], index, index


def burst(entries: list[Entry], draw: random.Random) -> tuple[list[Entry], int, int]:
    """Repeat a usual line."""
    times = draw.randrange(8, 16)
    return [*entries, *[entries[-1]] * times], len(entries), len(entries) + times - 1


def _put_in(entries: list[Entry], entry: Entry, draw: random.Random) -> tuple[list[Entry], int, int]:
    index = draw.randrange(len(entries) + 1)
    return [*entries[:index], entry, *entries[index:]], index, index


FORMS: tuple[Literal["json", "syslog"], ...] = ("json", "syslog")
ANOMALIES: dict[str, Change] = {
    "new message": new_message,
    "wrong value": impossible_value,
    "wrong order": wrong_place,
    "other format": other_format,
    "cut short": truncated,
    "burst": burst,
}
"""The function that plants each kind of anomaly."""


def write_log(lines: int, seed: int, each: int = 0, quiet: int = 500) -> ServiceLog:
    """Return a log of at least `lines` lines with `each` anomalies of every kind at random positions, none of them
    among the first `quiet` lines, or the first quarter if that is less."""
    quiet = min(quiet, lines // 4)
    service, draw = Service(seed), random.Random(f"anomalies {seed}")
    kinds = [kind for kind in ANOMALIES for _ in range(each)]
    draw.shuffle(kinds)
    positions = sorted(draw.sample(range(quiet, lines), len(kinds))) if kinds else []
    written: list[str] = []
    planted: list[Planted] = []
    for entries in events(service):
        if len(planted) < len(positions) and len(written) >= positions[len(planted)]:
            kind = kinds[len(planted)]
            entries, first, last = ANOMALIES[kind](entries, draw)
            planted.append(Planted(kind, len(written) + first + 1, len(written) + last + 1))
        written += [service.line(entry) for entry in entries]
        if len(written) >= lines and len(planted) == len(positions):
            return ServiceLog(written, planted)
    raise AssertionError("events are endless")
