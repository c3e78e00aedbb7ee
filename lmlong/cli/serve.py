"""`lmlong serve`: serve a trained model over HTTP with an OpenAI-compatible API."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lmlong.cli import options
from lmlong.errors import UsageError, install_command
from lmlong.recipe.find import sections_of
from lmlong.recipe.yaml import at
from lmlong.serving.settings import Settings

if TYPE_CHECKING:
    from lmlong.serving.guard import Hosts

KEY = "LMLONG_API_KEY"

WRITING = ("sessions", "rows", "memory", "disk", "max_tokens", "weights", "learn")
"""Options of models that write text."""

SHOWN = 8
"""Labels that are named at the start."""

TYPES: dict[str, Callable[[Any], click.ParamType]] = {
    "": click.IntRange,
    "bytes": options.ByteSize,
    "tokens": options.TokenCount,
    "seconds": click.FloatRange,
}
"""The types of options by the unit of a setting."""


def settings(command: options.Command) -> options.Command:
    """Add the options of the fields of `Settings`."""
    for field in reversed(fields(Settings)):
        if about := field.metadata:
            default = named(field.default) if about["unit"] in ("bytes", "tokens") else field.default
            flag, kind = f"--{field.name.replace('_', '-')}", TYPES[about["unit"]](about["least"])
            command = click.option(flag, default=default, show_default=True, type=kind, help=about["help"])(command)
    return command


def named(number: int) -> str:
    """Return a number with the largest binary unit that divides it, such as 4k."""
    for bits, unit in ((30, "g"), (20, "m"), (10, "k")):
        if number % (1 << bits) == 0:
            return f"{number >> bits}{unit}"
    return str(number)


@click.command()
@options.run
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="Port to listen on; 0 for any free port.")
@click.option("--allowed-host", multiple=True, metavar="NAME", help="Additional host name that requests may use.")
@click.option(
    "--sessions",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    show_default="RUN-sessions",
    help="Folder for sessions.",
)
@settings
@options.threads
@options.loading
def serve(
    run: str,
    host: str,
    port: int,
    allowed_host: tuple[str, ...],
    sessions: Path | None,
    device: str,
    weights: Any,
    learn: bool | None,
    **given: Any,
) -> None:
    """Serve the model of RUN over HTTP with an OpenAI-compatible API: /v1/completions, /v1/chat/completions and
    /v1/models. The page at / writes with the model in a browser. /v1/sessions reads a text once and keeps its state,
    /v1/score returns the log-probability of a text, /metrics serves Prometheus. A model of labels is served at
    /v1/classify only.

    Requests are batched continuously, and may stream. If LMLONG_API_KEY is set, they must send this key; without it,
    anybody who can reach the server may use it. By default it listens on this machine only. After SIGTERM or Ctrl-C,
    running requests have --grace seconds to finish; a second signal stops the server immediately.

    \b
    Example: serve a run, and send a request from another terminal.
      lmlong serve runs/quickstart --port 8000
      curl localhost:8000/v1/completions --json '{"prompt": "def "}'
    """
    key = read_key()
    try:
        from lmlong.serving.server import Server, bind, locked, prepare_process
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed. Run {install_command('serve')}.") from None
    from lmlong.checkpoint.location import find, folder_of

    listening = bind(host, port)
    body = 4 * given["max_prompt"]
    chosen = Settings(**given, max_body=body, held=max(Settings.held, 2 * body))
    checkpoint = find(run)  # before a folder is made for its sessions
    run_folder = folder_of(run)
    name, beside = run_folder.absolute().name, run_folder.resolve()

    def serve_app(app: Any, hosts: "Hosts", about: str) -> int:
        """Serve an application until a signal stops it, and return the signal."""
        host_name = f"[{host}]" if ":" in host else host
        address = f"http://{host_name}:{listening.getsockname()[1]}"
        lines = (*warning(hosts, host, key), f"{name}, {about}: {address}")
        prepare_process()
        return Server(app, listening, chosen.grace, lambda: click.echo("\n".join(lines), err=True)).serve_until_signal()

    if at(sections_of(str(checkpoint)), ("objective",)) == "label":
        _refuse_unused(click.get_current_context())
        from lmlong.inference.loading import load_classifier
        from lmlong.serving.classifier import make_classifier_app
        from lmlong.serving.guard import Hosts, warning

        classifier, hosts = load_classifier(run, device), Hosts(host, allowed_host)
        app = make_classifier_app(classifier, name, chosen, hosts, key)
        ended_by = serve_app(app, hosts, f"labels {', '.join(classifier.labels[:SHOWN])}")
        sys.exit(128 + ended_by if ended_by else 0)
    folder = sessions or beside.with_name(f"{beside.name}-sessions")
    with locked(folder):  # before what takes long: imports of torch, and the model
        from lmlong.inference.loading import load
        from lmlong.serving.app import make_app
        from lmlong.serving.guard import Hosts, warning
        from lmlong.serving.session_store import SessionStore

        trained, hosts = load(run, device, weights, learn=learn), Hosts(host, allowed_host)
        trained.use_fast_engine(None)
        store = SessionStore(trained, folder, chosen)
        app = make_app(trained, name, store, chosen, hosts, key)
        ended_by = serve_app(app, hosts, f"{chosen.rows} rows, decodes by {trained.decoder}")
    if store.folder.count:
        click.echo(f"stopped; sessions are in {folder}", err=True)
    if ended_by:
        sys.exit(128 + ended_by)


def _refuse_unused(context: click.Context) -> None:
    """Refuse options that a model of labels does not use."""
    for option in context.command.params:
        if option.name in WRITING and context.get_parameter_source(option.name) == ParameterSource.COMMANDLINE:
            raise UsageError(f"{option.opts[0]}: a model of labels writes no text. Leave it out.")


def read_key() -> str | None:
    """Return the API key in the environment; None if no key is needed."""
    key = os.environ.get(KEY)
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise UsageError(f"{KEY}: a key consists of printable ASCII characters without spaces. Use another.")
    return key
