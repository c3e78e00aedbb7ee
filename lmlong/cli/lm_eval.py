"""lmlong lm-eval: the tasks of EleutherAI's lm-evaluation-harness."""

from pathlib import Path
from typing import Literal

import click

from lmlong.cli import options
from lmlong.cli.output import check_files, show
from lmlong.errors import UsageError


@click.command("lm-eval")
@options.run
@click.option("--tasks", required=True, metavar="NAME,...", help="Tasks, groups, patterns of names, or .yaml files.")
@click.option("--num-fewshot", metavar="N", type=click.IntRange(0), help="Examples before each question.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="Take only so many documents of each task.")
@click.option(
    "--include-path", metavar="DIR", type=click.Path(path_type=Path), help="Folder of your own tasks (.yaml)."
)
@click.option("--lengths", metavar="N,...", help="Tokens of the texts that tasks such as RULER's make; k is 1,024.")
@click.option("--batch-size", metavar="N", type=click.IntRange(1), help="Rows read at once.  [default: as many as pay]")
@click.option("--apply-chat-template", is_flag=True, help="Ask as a user, by the template of a model made for chat.")
@click.option(
    "--score-eos", is_flag=True, help="Let the end of a document count in its likelihood, as lmlong eval does."
)
@click.option("--seed", metavar="N", type=click.IntRange(0), help="Seed of all draws.  [default: the harness's own]")
@options.json_file
@options.weights
@options.state_dtype
@options.threads
@options.device
def lm_eval(
    run: str,
    tasks: str,
    num_fewshot: int | None,
    limit: int | None,
    include_path: Path | None,
    lengths: str | None,
    batch_size: int | None,
    apply_chat_template: bool,
    score_eos: bool,
    seed: int | None,
    json_file: Path | None,
    weights: Literal["32", "bf16", "int8"],
    state_dtype: Literal["32", "64"],
    device: str,
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
        raise UsageError("--tasks: names no task. Name some, such as arc_easy,hellaswag.")
    wanted = parse_lengths(lengths) if lengths is not None else None
    check_files(json_file, None)
    results = evaluate_tasks(
        load(run, device, weights, state_dtype),
        names,
        num_fewshot=num_fewshot,
        limit=limit,
        include_path=include_path,
        lengths=wanted,
        batch_size=batch_size,
        apply_chat_template=apply_chat_template,
        score_eos=score_eos,
        seed=seed,
    )
    show(table(results), results, json_file, None)
