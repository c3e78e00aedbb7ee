"""A program that trains as `lmlong train` does. Each process writes its bytes of tensors at the peak of a step, and the
bytes that it sends to the others of its group.

    counted_run.py FOLDER RECIPE OPTION...

Lightning starts the further processes by the same command line.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lmlong.attention.device_policy import GPU_POLICY
from lmlong.model.allocations import Allocations
from lmlong.recipe import file as recipe_file
from lmlong.training.module import TrainingModule
from lmlong.training.run import run


def main(folder: Path, recipe: str, options: list[str]) -> None:
    take_step = TrainingModule.optimizer_step
    counts: dict[str, int] = {}

    def optimizer_step(module: TrainingModule, *inputs: Any, **named: Any) -> None:
        allocations.peak = allocations.now  # neither set-up nor a validation counts
        sent = module.group.bytes_sent if module.group else 0
        take_step(module, *inputs, **named)
        counts["peak"] = allocations.peak
        counts["sent"] = module.group.bytes_sent - sent if module.group else 0

    TrainingModule.optimizer_step = optimizer_step  # type: ignore[method-assign]
    with Allocations() as allocations:
        run(recipe_file.load(recipe, options), folder / "run", policy=GPU_POLICY)
    (folder / f"{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
