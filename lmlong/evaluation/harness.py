"""Tasks of EleutherAI's lm-evaluation-harness, run with a trained model.

    python -m lmlong.evaluation.harness run --model lmlong --model_args run=runs/quickstart --tasks arc_easy

is the harness's own command with this model registered.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError, install_command, nearest
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.interop.hf.tokenizer import tokenizer_files
from lmlong.report.json_values import json_values
from lmlong.report.report import Report

UNBOUNDED = 10**30


def evaluate_tasks(
    model: TrainedLanguageModel | str | Path,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    lengths: Sequence[int] | None = None,
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    """Run tasks of the harness, by their names, patterns of names, or .yaml files, and return its results.

    >>> results = evaluate_tasks("runs/quickstart", ["arc_easy"], num_fewshot=5, limit=100)
    >>> print(task_report(results).text())

    `include_path` is a folder with tasks of your own. Tasks that generate texts, such as RULER's, generate them at
    `lengths`, in tokens of this model. `limit` is the number of documents of each task. With `apply_chat_template` a
    question is asked as a user.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit: {limit} is not a number of documents. Give a whole number from 1, or leave it out.")
    lm_eval = library()
    from lmlong.evaluation.harness_model import HarnessModel

    adapter = HarnessModel(model)
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        write_tokenizer(adapter.tokenizer, Path(folder))
        metadata = {"tokenizer": folder, **({"max_seq_lengths": list(lengths)} if lengths else {})}
        results = lm_eval.simple_evaluate(
            adapter,
            tasks=load_tasks(tasks, include_path, metadata),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
            log_samples=False,
        )
    from lm_eval.utils import handle_non_serializable

    values: dict[str, Any] = json.loads(json.dumps(json_values(results), default=handle_non_serializable))
    return values


def load_tasks(names: Sequence[str], include_path: str | Path | None, metadata: dict[str, Any]) -> list[Any]:
    """Return the tasks and groups of tasks of these names, with their data."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise UsageError(f"include_path: {include_path} is not a folder. Name one with tasks (.yaml).")
    manager = TaskManager(include_path=include_path, metadata=metadata)
    loaded: dict[str, Any] = {}
    for name in names:
        is_file = Path(name).suffix == ".yaml" and Path(name).is_file()
        matches = [name] if is_file else manager.match_tasks([name])
        if not matches:
            hint = nearest(name, manager.all_tasks) or " `lm-eval ls tasks` lists all."
            raise UsageError(f"--tasks: there is no {name!r}.{hint}")
        loaded |= {each: _load(manager, each) for each in matches}
    return [task for tasks in loaded.values() for task in tasks]


def _load(manager: Any, name: str) -> list[Any]:
    """Return a group as one object, or the tasks of any other name."""
    try:
        tasks = manager.load([name])
    except Exception as error:  # tasks are third-party code
        why = " ".join(str(error).split())
        raise UsageError(f"--tasks: {name} cannot be loaded ({type(error).__name__}: {why}).") from error
    groups = list(tasks["groups"].values())
    return groups[:1] or list(tasks["tasks"].values())


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer in the format of transformers, for tasks that count tokens."""
    for name, text in tokenizer_files(tokenizer, UNBOUNDED).items():
        (folder / name).write_text(text, encoding="utf-8")


def task_report(results: dict[str, Any]) -> Report:
    """Return the harness's own tables of its results: of tasks, and of groups if there are any."""
    from lm_eval.utils import make_table

    columns = ["results", *(["groups"] if results.get("groups") else [])]
    return Report(["\n".join(make_table(results, column).rstrip("\n") for column in columns)], results)


def library() -> Any:
    """Return the module of the harness."""
    try:
        return import_module("lm_eval")
    except ImportError:
        raise UsageError(f"lm-eval is not installed. Run {install_command('lm-eval')}.") from None


def main() -> None:
    """Run the harness's own command with this model registered."""
    library()
    import_module("lmlong.evaluation.harness_model")
    import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
