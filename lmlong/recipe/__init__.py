"""Every option a recipe can hold, with its type, its default and its meaning. Imports no torch.

The reference page, the error messages and `--help` are made from these declarations.
"""

from lmlong.recipe.attention import MAX_NGRAM, Attention, Delta, Favor, Linformer, Ngram, Taylor
from lmlong.recipe.file import Recipe
from lmlong.recipe.kinds import ATTENTION_KINDS
from lmlong.recipe.model import Downsample, Mixer, Model, NgramEmbedding, Rope, RopeScaling
from lmlong.recipe.section import Options, mistake
from lmlong.recipe.text import Files, Hub, Labels, Masking, PythonStdlib, Source, Text, Tokenizer, Validation
from lmlong.recipe.training import Conversion, DeepSpeed, Stage, Training

__all__ = [
    "ATTENTION_KINDS",
    "MAX_NGRAM",
    "Attention",
    "Conversion",
    "DeepSpeed",
    "Delta",
    "Downsample",
    "Favor",
    "Files",
    "Hub",
    "Labels",
    "Linformer",
    "Masking",
    "Mixer",
    "Model",
    "Ngram",
    "NgramEmbedding",
    "Options",
    "PythonStdlib",
    "Recipe",
    "Rope",
    "RopeScaling",
    "Source",
    "Stage",
    "Taylor",
    "Text",
    "Tokenizer",
    "Training",
    "Validation",
    "mistake",
]
