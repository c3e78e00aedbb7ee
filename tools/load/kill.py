"""A server is killed time and again while clients make, extend and fork sessions: nothing that was told is lost.

All that a client is told of is done on a second server too, which nobody kills. After each kill, sessions are as they
are there, but for what was asked and not answered, which was either done or not; and their next tokens are the same.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load.client import COMPLETIONS, SESSIONS, Client, NoAnswer, Refused
from load.findings import Findings
from load.server import Server, serving
from load.texts import cut

NEXT = 12
"""Tokens that sessions are compared by."""

MOST = 20
"""Sessions of one client, of which some are deleted where there are more."""

KINDS = {"create": 3, "append": 4, "fork": 2, "complete": 4, "delete": 1}
"""What clients ask for, and how often."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds from a start to a kill")
    parser.add_argument("--memory", default="1m", help="of the server, for sessions that are awake")


def measure(options: argparse.Namespace, found: Findings) -> None:
    draw, words = random.Random(options.seed), ["--memory", options.memory, "--prefix-cache", "0"]
    with tempfile.TemporaryDirectory() as name, serving(options.run, options.threads) as lasting:
        folder = Path(name)
        soak = Soak(Client(lasting.port), options, found)
        for number in range(options.kills + 1):
            options_of_it = [*words, "--sessions", str(folder / "sessions")]
            server = Server(options.run, options.threads, *options_of_it, log=folder / f"log-{number}")
            try:
                asyncio.run(soak.examine(Client(server.port), everything=number == options.kills))
                if number < options.kills:
                    asyncio.run(soak.work_until_killed(server, draw))
            finally:
                server.kill()
            server.check_log(found)
        lasting.check_log(found)
    found.tell("kills", options.kills)
    for what, times in soak.counts.items():
        found.tell(what, times)


@dataclass
class Known:
    """A session that a client was told of."""

    name: str
    twin: str
    """Its name on the server that lasts."""
    asked: "Asked | None" = None
    """What was asked of it and not answered."""
    touched: bool = True
    """Whether anything was asked of it since it was examined."""


@dataclass(frozen=True)
class Asked:
    """Something that is asked of a session, or of none."""

    kind: str
    text: str
    tokens: int

    async def of(self, client: Client, name: str) -> dict[str, Any]:
        """Return what is told of the session."""
        if self.kind == "create":
            return await client.post(SESSIONS, text=self.text)
        if self.kind == "append":
            return await client.post(f"{SESSIONS}/{name}/append", text=self.text)
        if self.kind == "fork":
            return await client.post(f"{SESSIONS}/{name}/fork")
        if self.kind == "delete":
            answer = await client.ask("DELETE", f"{SESSIONS}/{name}")
            return {"deleted": answer.json["deleted"]}
        body = {"session": name, "prompt": self.text, "max_tokens": self.tokens, "temperature": 0}
        if self.tokens % 2:
            return (await client.post(COMPLETIONS, **body))["session"]
        lines = (await client.stream(**body)).lines
        return json.loads(lines[-2])["session"]


class Soak:
    """The sessions of all clients, and what came of them."""

    def __init__(self, lasting: Client, options: argparse.Namespace, found: Findings):
        self.counts = Counter[str]()
        self._lasting, self._options, self._found = lasting, options, found
        self._known: list[list[Known]] = [[] for _ in range(options.clients)]

    async def work_until_killed(self, server: Server, draw: random.Random) -> None:
        """Let all clients work until the server is killed."""
        working = [self._work(Client(server.port), known, random.Random(draw.random())) for known in self._known]
        tasks = [asyncio.ensure_future(work) for work in working]
        await asyncio.sleep(draw.uniform(0, self._options.longest))
        server.process.kill()
        await asyncio.gather(*tasks)

    async def _work(self, client: Client, known: list[Known], draw: random.Random) -> None:
        while True:
            chosen = draw.choice(known) if known else None
            (kind,) = draw.choices([*KINDS], [*KINDS.values()])
            kind = "create" if chosen is None else "delete" if len(known) > MOST else kind
            asked = Asked(kind, cut(draw, 1, 200), draw.randint(1, 12))
            try:
                told = await asked.of(client, chosen.name if chosen else "")
            except (NoAnswer, OSError):
                if chosen is not None and kind not in ("create", "fork"):
                    chosen.asked, chosen.touched = asked, True
                return
            self.counts[f"{kind}, told"] += 1
            await self._repeat(asked, chosen, told, known)

    async def _repeat(self, asked: Asked, chosen: Known | None, told: dict[str, Any], known: list[Known]) -> None:
        """Do what was told on the server that lasts too."""
        there = await asked.of(self._lasting, chosen.twin if chosen else "")
        self._found.must(alike(told, there), f"{asked}: {told}, on the server that lasts {there}")
        if asked.kind in ("create", "fork"):
            known.append(Known(told["id"], there["id"]))
        elif asked.kind == "delete" and chosen is not None:
            known.remove(chosen)
        elif chosen is not None:
            chosen.touched = True

    async def examine(self, client: Client, everything: bool) -> None:
        """See whether all sessions are there, and as they must be."""
        infos = {info["id"]: info for info in (await client.get(SESSIONS))["data"]}
        for known in self._known:
            for session in list(known):
                if session.asked is not None:
                    await self._settle(session, infos.get(session.name), known)
        for session in [session for known in self._known for session in known]:
            if session.name not in infos:
                self._found.must(False, f"a session that was told is lost: {session}")
            elif session.touched or everything:
                await self._compare(client, session)
                session.touched = False
        told = {session.name for known in self._known for session in known}
        self.counts["sessions examined"] += len(told)
        for orphan in infos.keys() - told:  # made, and not told of any more
            self.counts["sessions made and not told of"] += 1
            await Asked("delete", "", 0).of(client, orphan)

    async def _settle(self, session: Known, info: dict[str, Any] | None, known: list[Known]) -> None:
        """Find out whether what was asked and not answered was done, and do it on the server that lasts then."""
        asked, session.asked = session.asked, None
        there = await self._lasting.get(f"{SESSIONS}/{session.twin}")
        assert asked is not None
        done = info is None if asked.kind == "delete" else info is not None and not alike(info, there)
        self.counts[f"{asked.kind}, not told: {'done' if done else 'not done'}"] += 1
        if done:
            await asked.of(self._lasting, session.twin)
            if asked.kind == "delete":
                known.remove(session)

    async def _compare(self, client: Client, session: Known) -> None:
        """Hold a session against its twin, and their next tokens."""
        told = []
        for server, name in ((client, session.name), (self._lasting, session.twin)):
            try:
                info = await server.get(f"{SESSIONS}/{name}")
                fork = await server.post(f"{SESSIONS}/{name}/fork")
                body = {"session": fork["id"], "max_tokens": NEXT, "temperature": 0, "logprobs": 0}
                written = (await server.post(COMPLETIONS, **body))["choices"][0]["logprobs"]["tokens"]
                await Asked("delete", "", 0).of(server, fork["id"])
            except Refused as error:
                self._found.must(False, f"{session}: {error}")
                return
            told.append((info["tokens"], info["tail"], written))
        self._found.must(told[0] == told[1], f"{session}: {told[0]}, on the server that lasts {told[1]}")
        self.counts["sessions compared by their next tokens"] += 1


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two sessions were told to be at the same place."""
    return all(one.get(key) == other.get(key) for key in ("tokens", "tail", "deleted"))
