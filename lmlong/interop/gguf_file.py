"""Read GGUF files of llama.cpp, of any quantization, and export a Llama as one, with the values of its matrices that
lmlong decodes with. The library `gguf` reads and writes them.

N outputs, G groups.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmlong.errors import CheckpointError, UsageError, install_command
from lmlong.interop.architecture import Source
from lmlong.interop.card import card
from lmlong.interop.exporting import Exported, RunSource, open_export, write_folder
from lmlong.interop.gguf_forms import FORMS, LAYER, OUTER, LlamaForm, is_of_more_tokens
from lmlong.interop.gguf_tokenizer import gguf_tokenizer, tokenizer_file
from lmlong.interop.hf.config import weights_of
from lmlong.interop.hf.tokenizer import specification
from lmlong.interop.hf_folder import without_null
from lmlong.interop.llama import halves_to_neighbours
from lmlong.io.checked import checked, shown
from lmlong.model.quantization import GROUP, GroupedWeight, Weights, output_format, quantized

FILE = "model.gguf"
LLAMA = LlamaForm()

TYPES: dict[Weights, str] = {"32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
"""GGUF's types of matrices, by lmlong's formats of weights."""

FILE_TYPES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0", "Q4_1": "MOSTLY_Q4_1"}

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

USE = """## Use

The matrices in `{file}` are of type {kind}.

```bash
llama-cli -m {folder}/{file} -p "Once upon a time"
```
"""


def open_gguf(path: Path) -> Source:
    """Return the model of a file."""
    try:
        gguf, quants = import_module("gguf"), import_module("gguf.quants")
    except ImportError:
        raise UsageError(f"{path}: gguf is not installed. Run {install_command('import')}.") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library does not validate files: a damaged one raises any error of numpy's
        raise CheckpointError(f"{path}: damaged or not a GGUF file ({error}). Fetch it again.") from None
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or (form := FORMS.get(kind)) is None:
        known = ", ".join(f"{name} ({each.architecture.name})" for name, each in FORMS.items())
        raise CheckpointError(
            f"{path}: general.architecture is {shown(kind)}; supported are {known}. Use another model."
        )
    try:
        values = form.values(fields)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    config = checked(
        form.architecture.config, path, without_null({**values, "tie_word_embeddings": tied}), form.full_keys
    )
    left_out = [tensor.name for tensor in reader.tensors if is_of_more_tokens(tensor.name, config)]
    tensors = {form.name(tensor.name): tensor for tensor in reader.tensors if tensor.name not in left_out}
    stored = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    shapes = {name: form.shape(name, shape) for name, shape in stored.items()}

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        try:
            weight = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            weight = weight.reshape(shapes[name])
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {tensor.name} cannot be read ({error}). Use another model.") from None
        return form.restored(name, weight, config)

    dtypes = dict.fromkeys(shapes, torch.float32)
    words = [f"{len(left_out):,} weights that predict several tokens"] if left_out else []
    source = Source(
        *(str(path), form.architecture, config, shapes, dtypes, read),
        tokenizer=lambda: tokenizer_file(path, fields, source.vocabulary()),
        left_out=words,
    )
    return source


def export_gguf(run: str, folder: Path, weights: Weights = "32", evaluation: dict[str, Any] | None = None) -> Exported:
    """Write a run as a folder with a GGUF file, atomically. `weights` is the format of its matrices; `evaluation` a
    result of `lmlong eval` for its card."""
    try:
        gguf = import_module("gguf")
    except ImportError:
        raise UsageError(f"--to gguf: gguf is not installed. Run {install_command('import')}.") from None
    source, kind = open_export(run, folder), TYPES[weights]
    tokenizer, vocabulary = source.tokenizer, source.weights["embedding.weight"].shape[0]
    config = _config(source, vocabulary, weights)
    fields = gguf_tokenizer(specification(tokenizer), tokenizer.bos, tokenizer.eos, vocabulary, tokenizer.chat_template)

    def write(into: Path) -> None:
        writer = gguf.GGUFWriter(into / FILE, "llama")
        writer.add_name(folder.name)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, key in LLAMA.full_keys.items():
            add = writer.add_float32 if isinstance(config[name], float) else writer.add_uint32
            add(key, config[name])
        for key in ("key_length", "value_length"):
            writer.add_uint32(f"llama.attention.{key}", config["head_dim"])
        writer.add_vocab_size(vocabulary)
        for key, value in fields.items():
            _add_field(writer, key, value)
        for name, tensor in _tensors(source, config, weights):
            _add_tensor(writer, gguf, name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    use = USE.format(folder=folder.name, file=FILE, kind=kind)
    write_folder(folder, {"README.md": card(folder.name, source, "llama.cpp", ["gguf"], [use], evaluation)}, write)
    return Exported(folder, source.parameters, f"{LLAMA.architecture.name}, {kind}")


def _config(source: RunSource, vocabulary: int, weights: Weights) -> dict[str, Any]:
    """Return the configuration of a Llama. Raise UsageError unless GGUF can hold the model."""
    model = source.recipe.model
    if (config := LLAMA.architecture.config_of(source.recipe, vocabulary)) is None:
        raise UsageError(
            "llama.cpp runs none of lmlong's own layers, only a Llama, as `lmlong import` creates. Use hf."
        )
    if model.rope.scaling:
        raise UsageError("model.rope.scaling is not exported to GGUF. Use hf.")
    if weights in ("int8", "int4"):
        for name in ("width", "inner_width"):
            if (size := getattr(model, name)) % GROUP:
                raise UsageError(
                    f"--weights {weights}: {name} is {size}, but GGUF needs a multiple of {GROUP}. Use bf16 or 32."
                )
    return config


def _tensors(
    source: RunSource, config: dict[str, Any], weights: Weights
) -> Iterator[tuple[str, Tensor | GroupedWeight]]:
    """Iterate over the tensors by llama.cpp's names, as decoding by lmlong has them: vectors in float32, and an output
    matrix of its own, if the embedding is tied too. The embedding, which is looked up and not multiplied, is in float16
    unless all is in float32."""
    named = weights_of(source.weights, LLAMA.architecture, source.recipe.model)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if weights != "32":
        named.setdefault(OUTPUT, named[EMBEDDING])
    for name, weight in named.items():
        weight = halves_to_neighbours(weight, heads.get(name.split(".")[-2])).float()
        if weight.dim() == 1 or weights == "32":
            yield _written_name(name), weight
        elif name == EMBEDDING:
            yield _written_name(name), weight.half()
        elif weights == "bf16":
            yield _written_name(name), weight.bfloat16()
        else:
            yield _written_name(name), quantized(weight, output_format(weights) if name == OUTPUT else weights)


def _written_name(name: str) -> str:
    """Return llama.cpp's name for transformers' name of a weight."""
    ours = {theirs: short for short, theirs in (OUTER | LAYER).items()}
    if not name.startswith("model.layers."):
        return ours[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{ours[part]}"


def _add_tensor(writer: Any, gguf: Any, name: str, tensor: Tensor | GroupedWeight) -> None:
    types = gguf.GGMLQuantizationType
    if isinstance(tensor, GroupedWeight):
        writer.add_tensor(name, blocks(tensor), raw_dtype=types.Q8_0 if tensor.minimums is None else types.Q4_1)
    elif tensor.dtype == torch.bfloat16:
        writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=types.BF16)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())


def blocks(weight: GroupedWeight) -> np.ndarray:
    """Return a matrix as the bytes (N, bytes of a row) of blocks of Q4_1, with minimums, or Q8_0."""
    parts = [
        part[..., None].contiguous().view(torch.uint8) for part in (weight.scales, weight.minimums) if part is not None
    ]
    codes = weight.codes
    if weight.minimums is not None:
        first, second = codes.chunk(2, dim=-1)
        codes = first | (second << 4)
    return torch.cat([*parts, codes.view(torch.uint8)], dim=-1).flatten(1).numpy()


def _add_field(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
