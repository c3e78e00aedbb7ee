"""`lmlong serve`: a trained model behind HTTP, for programs that speak OpenAI's interface."""

import os
import sys
from pathlib import Path
from typing import Literal

import click

from lmlong.cli import options
from lmlong.errors import UsageError

KEY = "LMLONG_API_KEY"


@click.command()
@options.run
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 for all.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen at; 0 for any."
)
@click.option("--api-key", metavar="KEY", help=f"Answer only who brings this key; better {KEY}, which ps never shows.")
@click.option("--api-key-file", type=options.InFile(), help="File that holds keys, one on each line.")
@click.option(
    "--allowed-host", multiple=True, metavar="NAME", help="Another name that requests may call the server by."
)
@click.option("--rows", default=64, show_default=True, type=click.IntRange(1), help="Texts written at a time.")
@click.option("--waiting", default=1024, show_default=True, type=click.IntRange(1), help="Most texts that wait.")
@click.option(
    "--prefix-cache",
    default="256m",
    show_default=True,
    type=options.Length(0),
    help="Bytes of states kept, so that what prompts begin with is read once; 0 for none.",
)
@click.option(
    "--sessions",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    show_default="RUN-sessions",
    help="Where the states of sessions are kept.",
)
@click.option(
    "--memory",
    default="1g",
    show_default=True,
    type=options.Length(0),
    help="Bytes of sessions, the latest used, that are kept in memory too.",
)
@click.option(
    "--max-sessions", default="10k", show_default=True, type=options.Length(1), help="Most sessions of one key."
)
@click.option(
    "--max-session-bytes", default="10g", show_default=True, type=options.Length(1), help="Most bytes of all of them."
)
@click.option(
    "--max-tokens", default="4k", show_default=True, type=options.Length(1), help="Most tokens of a text to write."
)
@click.option("--max-prompt", default="4m", show_default=True, type=options.Length(1), help="Most bytes of a prompt.")
@click.option("--max-body", default="16m", show_default=True, type=options.Length(1), help="Most bytes of a body.")
@click.option("--max-choices", default=16, show_default=True, type=click.IntRange(1), help="Most texts of one request.")
@click.option(
    "--timeout", default=600.0, show_default=True, type=click.FloatRange(0.001), help="Seconds a request may take."
)
@click.option(
    "--grace", default=10.0, show_default=True, type=click.FloatRange(0), help="Seconds to finish in, after a signal."
)
@options.weights
@options.state_dtype
@options.threads
@options.device
def serve(
    run: str,
    host: str,
    port: int,
    api_key: str | None,
    api_key_file: Path | None,
    allowed_host: tuple[str, ...],
    rows: int,
    waiting: int,
    prefix_cache: int,
    sessions: Path | None,
    memory: int,
    max_sessions: int,
    max_session_bytes: int,
    max_tokens: int,
    max_prompt: int,
    max_body: int,
    max_choices: int,
    timeout: float,
    grace: float,
    weights: Literal["32", "bf16", "int8"],
    state_dtype: Literal["32", "64"],
    device: str,
) -> None:
    """Serve the model of RUN over HTTP, as OpenAI's interface has it: /v1/completions, /v1/chat/completions and
    /v1/models; /v1/score tells how well it predicts a text, /metrics is for Prometheus.

    Requests are written together, and may stream. Without a key anybody who can reach the server may use it; it
    listens on this machine alone unless --host says otherwise. SIGTERM or Ctrl-C lets what goes on be finished for
    --grace seconds; once more ends it at once.

    \b
    Example: serve a run, and ask it from another terminal.
      lmlong serve runs/quickstart --port 8000
      curl localhost:8000/v1/completions --json '{"prompt": "def "}'
    """
    keys = keys_of(api_key, api_key_file)
    try:
        from lmlong.serving.server import Server, bind, prepare_process
    except ImportError:
        raise UsageError("lmlong serve: its libraries are missing. Run pip install 'lmlong[serve]'.") from None
    from lmlong.checkpoint.location import run_path
    from lmlong.inference.loading import load
    from lmlong.serving.app import make_app
    from lmlong.serving.guard import Hosts, warning
    from lmlong.serving.limits import Limits
    from lmlong.serving.sessions import Quota, SessionStore, hold_folder

    listening = bind(host, port)
    limits = Limits(max_body, max_prompt, max_tokens, max_choices, max(256 << 20, 2 * max_body), timeout=timeout)
    trained = load(run, device, weights, state_dtype)
    if trained.fast_step_at_once:
        trained.use_fast_step()
    name, place, hosts = Path(run).absolute().name, run_path(run).resolve(), Hosts(host, allowed_host)
    folder = sessions or place.with_name(f"{place.name}-sessions")
    held = hold_folder(folder)
    store = SessionStore(trained, folder, memory, Quota(max_sessions, max_session_bytes))

    def tell() -> None:
        named = f"[{host}]" if ":" in host else host
        address = f"http://{named}:{listening.getsockname()[1]}"
        for line in (
            *warning(hosts, host, keys),
            f"{address}: {name}, {rows} rows, decodes by {trained.decoder}",
        ):
            click.echo(line, err=True)

    app = make_app(
        trained,
        name,
        store,
        rows=rows,
        waiting=waiting,
        cache=prefix_cache,
        limits=limits,
        hosts=hosts,
        keys=keys,
    )
    prepare_process()
    with held:
        ended_by = Server(app, listening, grace, tell).serve_until_signal()
    if ended_by:
        sys.exit(128 + ended_by)


def keys_of(given: str | None, file: Path | None) -> list[str]:
    """Return the keys of which one is asked for; none, where anybody may ask."""
    if given is not None and file is not None:
        raise UsageError("--api-key, --api-key-file: both given. Give one of them.")
    if file is not None:
        try:
            keys = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            raise UsageError(f"{file}: cannot be read as text. Name a file that holds keys.") from None
        return [_checked(line.strip(), str(file)) for line in keys if line.strip()] or [_checked("", str(file))]
    if given is not None:
        hide_argument(given)
        return [_checked(given, "--api-key")]
    return [_checked(os.environ[KEY], KEY)] if KEY in os.environ else []


def _checked(key: str, source: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{source}: a key is visible characters of ASCII, without spaces. Give another.")
    return key


def hide_argument(word: str) -> None:
    """Write over a word of this process's command line, which all users can read, where Linux says where it lies."""
    import ctypes

    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    begin, end = (int(field) for field in fields[45:47])  # arg_start and arg_end of proc(5)
    line, secret = ctypes.string_at(begin, end - begin), os.fsencode(word)
    place = line.find(secret)
    while secret and place >= 0:
        ctypes.memset(begin + place, ord("x"), len(secret))
        place = line.find(secret, place + len(secret))
