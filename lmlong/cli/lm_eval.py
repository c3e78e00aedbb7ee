"""lmlong lm-eval: the tasks of EleutherAI's lm-evaluation-harness."""

from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.lists import lengths
from lmlong.cli.output import show
from lmlong.errors import UsageError


@click.command("lm-eval")
@options.run
@click.option("--tasks", required=True, metavar="NAME,...", help="Tasks, groups, patterns of names, or .yaml files.")
@click.option("--num-fewshot", metavar="N", type=click.IntRange(0), help="Examples before each question.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Use the first N documents of each task.")
@click.option(
    "--include-path", metavar="DIR", type=click.Path(path_type=Path), help="Folder of your own tasks (.yaml)."
)
@lengths("Lengths of the texts that tasks such as RULER generate; k is 1,024.")
@click.option("--batch-size", metavar="N", type=click.IntRange(1), help="Rows read at once.  [default: automatic]")
@click.option("--apply-chat-template", is_flag=True, help="Ask as a user, with the chat template of the model.")
@click.option("--score-eos", is_flag=True, help="Include the end of a document in its likelihood, as lmlong eval does.")
@click.option("--seed", metavar="N", type=click.IntRange(0), help="Random seed.  [default: the harness's own]")
@options.json_file
@options.loading
def lm_eval(
    run: str,
    tasks: str,
    json_file: Path | None,
    loading: options.Loading,
    **given: Any,
) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness with RUN.

    A context is read once for all its answers, and a document of any length in one pass, along the state. The harness
    fetches the data of its tasks from the Hugging Face Hub. Its own command runs RUN too:

    \b
      python -m lmlong.evaluation.harness run --model lmlong \\
          --model_args run=runs/quickstart --tasks arc_easy

    \b
    Example: multiple choice, and a needle in texts of two lengths.
      lmlong lm-eval runs/quickstart --tasks arc_easy --num-fewshot 5
      lmlong lm-eval runs/quickstart --tasks niah_single_1 --lengths 4k,32k
    """
    from lmlong.evaluation.harness import evaluate_tasks, library, table

    library()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks: names no task. Name one or more, such as arc_easy,hellaswag.")
    results = evaluate_tasks(loading.load_as_trained(run), names, **given)
    show(table(results), results, json_file, None)
