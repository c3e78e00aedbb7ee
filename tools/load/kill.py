"""A server is killed repeatedly while clients create, extend and fork sessions: nothing acknowledged may be lost.

Each acknowledged request is repeated on a second server that is never killed. After each kill, the sessions of both
servers must be equal, with the same next tokens; a request that was not answered was either done or not.
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

from load.client import COMPLETIONS, SESSIONS, Client, NoAnswer, Refused, draw_text
from load.findings import Findings
from load.server import Server, serving

NEXT = 12
"""Tokens by which sessions are compared."""

MOST = 20
"""Sessions of one client; with more, it deletes one."""

KINDS = {"create": 3, "append": 4, "fork": 2, "complete": 4, "delete": 1}
"""The requests of clients and their weights."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds from a start to a kill")
    parser.add_argument("--memory", default="1m", help="of the server, for sessions in memory")


def measure(options: argparse.Namespace, findings: Findings) -> None:
    draw, words = random.Random(options.seed), ["--memory", options.memory]
    with tempfile.TemporaryDirectory() as name, serving(options.run, options.threads) as lasting:
        folder = Path(name)
        soak = Soak(Client(lasting.port), options, findings)
        for number in range(options.kills + 1):
            options_of_it = [*words, "--sessions", str(folder / "sessions")]
            server = Server(options.run, options.threads, *options_of_it, log=folder / f"log-{number}")
            try:
                asyncio.run(soak.examine(Client(server.port), everything=number == options.kills))
                if number < options.kills:
                    asyncio.run(soak.work_until_killed(server, draw))
            finally:
                server.kill()
            server.check_log(findings)
        lasting.check_log(findings)
    findings.add("kills", options.kills)
    for what, times in soak.counts.items():
        findings.add(what, times)


@dataclass
class Known:
    """A session that a client knows."""

    name: str
    twin: str
    """Its name on the second server."""
    asked: "Asked | None" = None
    """The request that was not answered."""
    touched: bool = True
    """Whether a request changed it since it was examined."""


@dataclass(frozen=True)
class Asked:
    """A request about a session, or one that creates a session."""

    kind: str
    text: str
    tokens: int

    async def of(self, client: Client, name: str) -> dict[str, Any]:
        """Send the request; return the session as the server describes it."""
        if self.kind == "create":
            return await client.post(SESSIONS, text=self.text)
        if self.kind == "append":
            return await client.post(f"{SESSIONS}/{name}/append", text=self.text)
        if self.kind == "fork":
            return await client.post(f"{SESSIONS}/{name}/fork")
        if self.kind == "delete":
            answer = await client.ask("DELETE", f"{SESSIONS}/{name}")
            return {"deleted": answer.json["deleted"]}
        body: dict[str, Any] = {"session": name, "prompt": self.text, "max_tokens": self.tokens, "temperature": 0}
        if self.tokens % 2:
            return (await client.post(COMPLETIONS, **body))["session"]
        lines = (await client.stream(**body)).lines
        return json.loads(lines[-2])["session"]


class Soak:
    """The sessions of all clients."""

    def __init__(self, lasting: Client, options: argparse.Namespace, findings: Findings):
        self.counts = Counter[str]()
        self._lasting, self._options, self._findings = lasting, options, findings
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
            asked = Asked(kind, draw_text(draw, 1, 200), draw.randint(1, 12))
            try:
                answer = await asked.of(client, chosen.name if chosen else "")
            except (NoAnswer, OSError):
                if chosen is not None and kind not in ("create", "fork"):
                    chosen.asked, chosen.touched = asked, True
                return
            self.counts[f"{kind}, acknowledged"] += 1
            await self._repeat(asked, chosen, answer, known)

    async def _repeat(self, asked: Asked, chosen: Known | None, answer: dict[str, Any], known: list[Known]) -> None:
        """Repeat an acknowledged request on the second server."""
        there = await asked.of(self._lasting, chosen.twin if chosen else "")
        self._findings.require(alike(answer, there), f"{asked}: {answer}, on the second server {there}")
        if asked.kind in ("create", "fork"):
            known.append(Known(answer["id"], there["id"]))
        elif asked.kind == "delete" and chosen is not None:
            known.remove(chosen)
        elif chosen is not None:
            chosen.touched = True

    async def examine(self, client: Client, everything: bool) -> None:
        """Require that all sessions exist and equal those of the second server."""
        infos = {info["id"]: info for info in (await client.get(SESSIONS))["data"]}
        for known in self._known:
            for session in list(known):
                if session.asked is not None:
                    await self._settle(session, infos.get(session.name), known)
        for session in [session for known in self._known for session in known]:
            if session.name not in infos:
                self._findings.require(False, f"an acknowledged session is lost: {session}")
            elif session.touched or everything:
                await self._compare(client, session)
                session.touched = False
        known_names = {session.name for known in self._known for session in known}
        self.counts["sessions examined"] += len(known_names)
        for orphan in infos.keys() - known_names:  # created, but not acknowledged
            self.counts["sessions created and not acknowledged"] += 1
            await Asked("delete", "", 0).of(client, orphan)

    async def _settle(self, session: Known, info: dict[str, Any] | None, known: list[Known]) -> None:
        """Find out whether an unanswered request was done; if so, repeat it on the second server."""
        asked, session.asked = session.asked, None
        there = await self._lasting.get(f"{SESSIONS}/{session.twin}")
        assert asked is not None
        done = info is None if asked.kind == "delete" else info is not None and not alike(info, there)
        self.counts[f"{asked.kind}, not acknowledged: {'done' if done else 'not done'}"] += 1
        if done:
            await asked.of(self._lasting, session.twin)
            if asked.kind == "delete":
                known.remove(session)

    async def _compare(self, client: Client, session: Known) -> None:
        """Compare a session and its next tokens with its twin."""
        states = []
        for server, name in ((client, session.name), (self._lasting, session.twin)):
            try:
                info = await server.get(f"{SESSIONS}/{name}")
                fork = await server.post(f"{SESSIONS}/{name}/fork")
                body = {"session": fork["id"], "max_tokens": NEXT, "temperature": 0, "logprobs": 0}
                written = (await server.post(COMPLETIONS, **body))["choices"][0]["logprobs"]["tokens"]
                await Asked("delete", "", 0).of(server, fork["id"])
            except Refused as error:
                self._findings.require(False, f"{session}: {error}")
                return
            states.append((info["tokens"], info["tail"], written))
        self._findings.require(states[0] == states[1], f"{session}: {states[0]}, on the second server {states[1]}")
        self.counts["sessions compared by their next tokens"] += 1


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two descriptions are of the same session state."""
    return all(one.get(key) == other.get(key) for key in ("tokens", "tail", "deleted"))
