"""Language models of lmlong for transformers. This module wraps lmlong's own model, so `pip install lmlong` is needed.

Rows may be padded on the left: padding counts as another document. B batch, T time, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from lmlong import recipe
from lmlong.attention.recurrence import Recurrence
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.loop_guard import LoopGuard, lower_loops
from lmlong.model.sampling_options import Sampling
from lmlong.native.state import map_state
from lmlong.recipe.file import recipe_class

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""transformers' name of its cache, `past_key_values` before 5.20."""


class LmlongConfig(PreTrainedConfig):
    """`model` is the section of that name of the recipe."""

    model_type = "lmlong"

    def __init__(self, model: dict[str, Any] | None = None, vocab_size: int = 258, **others: Any):
        self.model, self.vocab_size = model or {}, vocab_size
        options = self.options  # an attention of a plug-in is known after lmlong.load_plugin(FILE)
        self.hidden_size, self.num_hidden_layers = options.width, options.layers
        self.num_attention_heads = options.heads
        super().__init__(**{**others, "tie_word_embeddings": options.tied_output})

    @property
    def options(self) -> recipe.Model:
        section = recipe_class().model_fields["model"].annotation  # with the options of plug-ins
        assert section is not None
        return section(**self.model)  # type: ignore[no-any-return]


class StateCache(Cache):
    """The state after the tokens so far, of all layers."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: ModelState | None = None
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens

    def _select(self, rows: Tensor) -> None:
        self.state = map_state(lambda x: x[rows.to(x.device)], self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = map_state(lambda x: x.repeat_interleave(repeats, dim=0), self.state)

    def crop(self, *_: Any) -> None:
        raise ValueError("A state cannot go back by a token. Read the shorter text from its beginning.")


class LoopPenalty(LogitsProcessor):
    """lmlong's penalty on loops in the generated text."""

    def __init__(self, penalty: float):
        self.options = Sampling(loop_penalty=penalty)
        self.prompt: int | None = None  # number of tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prompt = input_ids.shape[1] if self.prompt is None else self.prompt
        guards = []
        for text in input_ids[:, self.prompt :].tolist():
            guards.append(LoopGuard(self.options))
            for token in text:
                guards[-1].append(token)
        return lower_loops(scores, guards)


class LmlongForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LmlongConfig
    base_model_prefix = ""
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _tied_weights_keys = {"model.lm_head.output.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LmlongConfig):
        super().__init__(config)
        with torch.device("cpu"):  # also where transformers builds without memory
            self.model = LanguageModel(config.options, config.vocab_size)
        self.fixed_decays = {
            attention: attention.log_decay.clone()
            for attention in self.model.attention_parts
            if isinstance(attention, Recurrence) and attention.log_decay is not None
        }
        if tables := self.model.ngram_embedding:  # trained as other weights are
            table = nn.Parameter(tables.table)
            del tables.table
            tables.table = table
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Restore the only numbers that are not in the file, which transformers empties."""
        if module in self.fixed_decays:
            module.log_decay = self.fixed_decays[module].to(self.device)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head.output

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        cache = past_key_values if cache is None else cache
        cache = StateCache() if cache is None else cache
        hidden, state = self.model(input_ids, cache.state, document_starts(attention_mask, input_ids.shape[1]))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.model.logits(hidden[:, kept]), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **others)
        keeps = use_cache if use_cache is not None else not self.training
        if keeps:
            cache.state, cache.tokens = state, cache.tokens + input_ids.shape[1]
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache if keeps else None})

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        loop_penalty: float | None = None,
        **options: Any,
    ) -> Any:
        """Generate like any model of transformers. If tokens are sampled, `loop_penalty` applies, by default the
        generation config's; 0 turns it off."""
        chosen = {"do_sample": options.get("do_sample"), "loop_penalty": loop_penalty}
        for config in (generation_config, self.generation_config):
            chosen = {name: getattr(config, name, None) if one is None else one for name, one in chosen.items()}
        processors = list(logits_processor or [])
        if chosen["do_sample"] and chosen["loop_penalty"]:
            processors.append(LoopPenalty(chosen["loop_penalty"]))
        if options.get("use_cache") is not False:
            options.setdefault(CACHE, StateCache())
        return super().generate(inputs, generation_config, LogitsProcessorList(processors), **options)


def document_starts(mask: Tensor | None, time: int) -> Tensor | None:
    """Return where the texts start (B, T) among the last `time` tokens, after the padding on their left."""
    if mask is None or mask.shape[1] == 1:
        return None
    starts = (mask.bool() & ~pad(mask[:, :-1], (1, 0)).bool())[:, -time:].clone()
    starts[:, 0] &= mask.shape[1] > time  # the first token of a text has an empty state already
    return starts if starts.any() else None
