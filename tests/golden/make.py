"""Write the golden files anew, which is wanted only when a format changes on purpose: python tests/golden/make.py."""

import json
import shutil
import tempfile
from pathlib import Path

import lmlong
from lmlong.checkpoint import read
from lmlong.data.token_dataset import prepare
from lmlong.recipe import file as recipe_file
from lmlong.training.run import train

HERE = Path(__file__).parent
TEXT = "to be or not to be, that is the question: whether it is nobler in the mind. " * 40
PROMPT = "to be or not"

RECIPE = """
name: golden
device: cpu
text:
  sources: [{{kind: files, paths: [{text}]}}]
  tokenizer: {{kind: bytes}}
  sequence_length: 64
model: {{width: 8, layers: 3, heads: 2, attention: {{kind: [linear, window, linear], window: 4}}}}
training: {{steps: 4, batch_size: 2, warmup_steps: 1, precision: 32}}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text, recipe = Path(folder) / "text.txt", Path(folder) / "golden.yaml"
        text.write_text(TEXT)
        recipe.write_text(RECIPE.format(text=text))
        options = recipe_file.load(str(recipe))
        train(options, Path(folder) / "run")
        for name in ("checkpoint", "tokens"):
            shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(read.find(Path(folder) / "run"), HERE / "checkpoint")
        tokens = prepare(options.text)
        shutil.copytree(tokens.folder, HERE / "tokens")
    model = lmlong.load(HERE / "checkpoint", "cpu")
    session = model.read(PROMPT)
    model.save_state(session, HERE / "text.state")
    (HERE / "expected.json").write_text(
        json.dumps(
            {
                "continuation": "".join(model.stream("", state=session, max_tokens=20, temperature=1.0)),
                "train": tokens.train[0].tokens.tolist()[:40],
                "documents": len(tokens.train[0].starts),
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
