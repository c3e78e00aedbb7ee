"""Export a run as a folder for onnxruntime, which needs neither lmlong nor torch."""

from pathlib import Path
from typing import Any

from lmlong.errors import UsageError, install_command
from lmlong.interop.exporting import Exported, as_json, ends, open_export, write_folder
from lmlong.interop.hf.tokenizer import UNBOUNDED, tokenizer_files
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel

MODEL, WEIGHTS = "model.onnx", "model.onnx.data"


def export_onnx(run: str, folder: Path, evaluation: dict[str, Any] | None = None) -> Exported:
    """Write a run as a folder for onnxruntime, atomically. Its card shows `evaluation`, a result of `lmlong eval`."""
    try:
        import onnx
    except ImportError:
        raise UsageError(f"onnx is not installed. Run {install_command('onnx')}.") from None
    from lmlong.interop.onnx.card import model_card
    from lmlong.interop.onnx.model import onnx_model

    source = open_export(run, folder)
    model = build(source.recipe, source.tokenizer.vocabulary)
    assert isinstance(model, LanguageModel)
    model.load_state_dict(source.weights)
    graph, states = onnx_model(model)
    config = {
        "vocab_size": source.tokenizer.vocabulary,
        **ends(source.tokenizer),
        "state": [state._asdict() for state in states],
    }
    files = {
        "config.json": as_json(config),
        **tokenizer_files(source.tokenizer, UNBOUNDED),
        "README.md": model_card(folder.name, source, states, evaluation),
    }

    def save(into: Path) -> None:
        onnx.save_model(graph, into / MODEL, save_as_external_data=True, location=WEIGHTS)

    write_folder(folder, files, save)
    return Exported(folder, sum(weight.numel() for weight in source.weights.values()), "ONNX")
