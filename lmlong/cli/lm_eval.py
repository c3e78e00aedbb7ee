"""lmlong lm-eval: the tasks of EleutherAI's lm-evaluation-harness."""

from pathlib import Path
from typing import Any, Literal

import click

from lmlong.cli import options
from lmlong.cli.output import check_files, show
from lmlong.errors import UsageError


@click.command("lm-eval")
@options.run
@click.option("--tasks", required=True, metavar="NAME,...", help="Tasks, groups, patterns of names, or .yaml files.")
@click.option("--num-fewshot", metavar="N", type=click.IntRange(0), help="Examples before each question.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Use the first N documents of each task.")
@click.option(
    "--include-path", metavar="DIR", type=click.Path(path_type=Path), help="Folder of your own tasks (.yaml)."
)
@click.option("--lengths", metavar="N,...", help="Lengths of the texts that tasks such as RULER generate; k is 1,024.")
@click.option("--batch-size", metavar="N", type=click.IntRange(1), help="Rows read at once.  [default: automatic]")
@click.option("--apply-chat-template", is_flag=True, help="Ask as a user, with the chat template of the model.")
@click.option("--score-eos", is_flag=True, help="Include the end of a document in its likelihood, as lmlong eval does.")
@click.option("--seed", metavar="N", type=click.IntRange(0), help="Random seed.  [default: the harness's own]")
@options.json_file
@options.weights
@options.state_dtype
@options.threads
@options.device
def lm_eval(
    run: str,
    tasks: str,
    lengths: str | None,
    json_file: Path | None,
    weights: Literal["32", "bf16", "int8"],
    state_dtype: Literal["32", "64"],
    device: str,
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
    from lmlong.inference.loading import load
    from lmlong.recipe.lengths import parse_lengths

    library()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks: names no task. Name one or more, such as arc_easy,hellaswag.")
    texts = parse_lengths(lengths) if lengths is not None else None
    check_files(json_file, None)
    results = evaluate_tasks(load(run, device, weights, state_dtype), names, lengths=texts, **given)
    show(table(results), results, json_file, None)
