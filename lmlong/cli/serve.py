"""`lmlong serve`: serve a trained model over HTTP with an OpenAI-compatible API."""

import os
import sys
from pathlib import Path

import click

from lmlong.cli import options
from lmlong.errors import UsageError, install_command

KEY = "LMLONG_API_KEY"


@click.command()
@options.run
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="Port to listen on; 0 for any free port.")
@click.option(
    "--api-key", metavar="KEY", help=f"API key that requests must send. Prefer {KEY}, which ps does not show."
)
@click.option("--api-key-file", type=options.InFile(), help="File of API keys, one per line.")
@click.option("--allowed-host", multiple=True, metavar="NAME", help="Additional host name that requests may use.")
@click.option("--rows", default=64, type=click.IntRange(1), help="Maximum number of texts generated at the same time.")
@click.option("--waiting", default=1024, type=click.IntRange(1), help="Maximum number of queued texts.")
@click.option(
    "--prefix-cache",
    default="256m",
    type=options.ByteSize(),
    help="Memory for the states of prompt prefixes, which are then not read again; 0 disables it.",
)
@click.option(
    "--sessions",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    show_default="RUN-sessions",
    help="Folder for the states of sessions.",
)
@click.option("--memory", default="1g", type=options.ByteSize(), help="Memory for the most recently used sessions.")
@click.option("--max-sessions", default="10k", type=options.TokenCount(1), help="Maximum number of sessions per key.")
@click.option("--max-session-bytes", default="10g", type=options.ByteSize(1), help="Maximum bytes of sessions per key.")
@click.option(
    "--max-tokens", default="4k", type=options.TokenCount(1), help="Maximum number of tokens generated per text."
)
@click.option("--max-prompt", default="4m", type=options.ByteSize(1), help="Maximum bytes of a prompt.")
@click.option("--max-body", default="16m", type=options.ByteSize(1), help="Maximum bytes of a request body.")
@click.option("--max-choices", default=16, type=click.IntRange(1), help="Maximum number of texts per request.")
@click.option("--timeout", default=600.0, type=click.FloatRange(0.001), help="Maximum seconds per request.")
@click.option("--grace", default=10.0, type=click.FloatRange(0), help="Seconds to finish requests after a signal.")
@options.loading
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
    loading: options.Loading,
) -> None:
    """Serve the model of RUN over HTTP with an OpenAI-compatible API: /v1/completions, /v1/chat/completions and
    /v1/models; /v1/score returns the log-probability of a text, /metrics serves Prometheus.

    Requests are batched continuously, and may stream. Without a key, anybody who can reach the server may use it; by
    default it listens on this machine only. After SIGTERM or Ctrl-C, running requests have --grace seconds to finish; a
    second signal stops the server immediately.

    \b
    Example: serve a run, and send a request from another terminal.
      lmlong serve runs/quickstart --port 8000
      curl localhost:8000/v1/completions --json '{"prompt": "def "}'
    """
    keys = read_keys(api_key, api_key_file)
    try:
        from lmlong.serving.server import Server, bind, prepare_process
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed. Run {install_command('serve')}.") from None
    from lmlong.checkpoint.location import run_path
    from lmlong.serving.app import make_app
    from lmlong.serving.guard import Hosts, warning
    from lmlong.serving.limits import Limits
    from lmlong.serving.sessions import Quota, SessionStore, lock_folder

    listening = bind(host, port)
    limits = Limits(max_body, max_prompt, max_tokens, max_choices, max(256 << 20, 2 * max_body), timeout=timeout)
    trained = loading.load(run)
    if trained.fast_step_at_once:
        trained.use_fast_step()
    name, run_folder, hosts = Path(run).absolute().name, run_path(run).resolve(), Hosts(host, allowed_host)
    folder = sessions or run_folder.with_name(f"{run_folder.name}-sessions")
    folder_lock = lock_folder(folder)
    store = SessionStore(trained, folder, memory, Quota(max_sessions, max_session_bytes))

    def print_address() -> None:
        host_name = f"[{host}]" if ":" in host else host
        address = f"http://{host_name}:{listening.getsockname()[1]}"
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
    with folder_lock:
        ended_by = Server(app, listening, grace, print_address).serve_until_signal()
    if ended_by:
        sys.exit(128 + ended_by)


def read_keys(given: str | None, file: Path | None) -> list[str]:
    """Return the accepted API keys; empty if no key is needed."""
    if given is not None and file is not None:
        raise UsageError("--api-key, --api-key-file: mutually exclusive. Give one of them.")
    if file is not None:
        try:
            keys = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            raise UsageError(f"{file}: cannot be read as text. Name a file of API keys.") from None
        return [_checked(line.strip(), str(file)) for line in keys if line.strip()] or [_checked("", str(file))]
    if given is not None:
        hide_argument(given)
        return [_checked(given, "--api-key")]
    return [_checked(os.environ[KEY], KEY)] if KEY in os.environ else []


def _checked(key: str, source: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{source}: a key consists of printable ASCII characters without spaces. Use another.")
    return key


def hide_argument(word: str) -> None:
    """Overwrite a word in the command line of this process, which all users of a Linux machine can read."""
    import ctypes

    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    begin, end = (int(field) for field in fields[45:47])  # arg_start and arg_end of proc(5)
    line, secret = ctypes.string_at(begin, end - begin), os.fsencode(word)
    position = line.find(secret)
    while secret and position >= 0:
        ctypes.memset(begin + position, ord("x"), len(secret))
        position = line.find(secret, position + len(secret))
