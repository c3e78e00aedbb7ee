"""Request bodies: OpenAI's fields and lmlong's sampling options; other fields are errors."""

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from lmlong.data.encoding import UTF8, marked
from lmlong.errors import nearest
from lmlong.model.sampling_options import DEFAULTS, RECENT, Sampling, random_seed
from lmlong.serving.api_errors import ApiError

MOST_STOPS = 16
LONGEST_STOP = 100
"""Stop strings of a request, and characters of one: they are searched for after each token."""

MOST_STRINGS, MOST_STRUCTURE = 1 << 16, 1 << 19
"""Strings of a JSON text, and bytes outside of them. Once parsed, the two bytes `{}` take 64."""

MOST_KEYS = 256
"""Keys of an object."""

LONGEST_LIST = 4096
"""Prompts or messages of a request, which are validated while no other request is answered."""

MOST_ALTERNATIVES = 20
"""The most alternatives of a token whose log-probabilities are returned."""

LONGEST_PAGE = 1000
"""The most sessions of one answer."""

MEANINGLESS = frozenset(
    {
        *("user", "safety_identifier", "metadata", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    }
)
"""OpenAI's fields that are accepted and ignored."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""OpenAI's unsupported fields, with the values that have no effect and are accepted."""

NO_TEXT = re.compile("[\0\ud800-\udfff]")

SWITCH = {"true": True, "false": False}

SHOWN = 60
"""Characters of a name that an error shows."""


def _plain(text: str) -> str:
    if match := NO_TEXT.search(text):
        raise ValueError(f"contains U+{ord(match[0]):04X}, which is not allowed in a text. Remove it.")
    return text


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    values = _listed(value)
    if isinstance(values, list) and values and isinstance(values[0], int | list):
        raise ValueError("token ids are not supported. Send text.")
    return values


def _joined(content: Any) -> Any:
    """Return the text of a message that comes in parts."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    if any(kind != "text" for kind in kinds) or not all(isinstance(part.get("text"), str) for part in content):
        raise ValueError("has parts other than text. Send text.")
    return "".join(part["text"] for part in content)


def _learn(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("must be true or false.")
    return value


def _number(value: Any) -> Any:
    """Return the number in a query, all of whose values are text."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9 else value


Text = Annotated[str, AfterValidator(_plain)]
Learn = Annotated[bool | None, BeforeValidator(_learn)]
StopText = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]


class Body(BaseModel):
    """A body; null means that a field is missing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    meaningless: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, value: Any) -> Any:
        """Leave out null, and the fields of OpenAI that have no effect here."""
        if not isinstance(value, dict):
            return value
        if len(value) > MOST_KEYS:
            raise ValueError(f"has {len(value):,} fields. Leave out those that the API does not name.")
        for name in cls.neutral.keys() & value.keys():
            if value[name] is not None and value[name] not in cls.neutral[name]:
                raise ApiError(400, f"{name}: is not supported. Leave it out.", name, "unsupported_parameter")
        ignored = {*cls.neutral, *cls.meaningless}
        return {key: item for key, item in value.items() if item is not None and key not in ignored}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # of lengths, which is not done
    include_progress: bool = False


class WritingBody(Body):
    """The fields of both completions endpoints."""

    neutral, meaningless = NEUTRAL, MEANINGLESS

    model: Text | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Annotated[list[StopText], FailFast(), BeforeValidator(_listed), Field(max_length=MOST_STOPS)] = []
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] = DEFAULTS.temperature
    top_p: Annotated[float, Field(gt=0, le=1)] = DEFAULTS.top_p
    top_k: Annotated[int, Field(ge=1, lt=1 << 31)] | None = DEFAULTS.top_k
    min_p: Annotated[float, Field(ge=0, le=1)] = DEFAULTS.min_p
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = DEFAULTS.repetition_penalty
    repetition_window: Annotated[int, Field(ge=1, le=RECENT)] = DEFAULTS.repetition_window
    loop_penalty: Annotated[float, Field(ge=0, le=100)] | None = DEFAULTS.loop_penalty
    ignore_eos: bool = DEFAULTS.ignore_eos
    learn: Learn = None

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """The number of alternatives whose log-probability is returned; None: no log-probabilities."""

    def sampling(self) -> Sampling:
        """Return the options of sampling, with a random seed where none is given."""
        given = {option.name: getattr(self, option.name) for option in fields(Sampling)}
        return Sampling(**given | {"seed": random_seed() if self.seed is None else self.seed})


class CompletionBody(WritingBody):
    prompt: Annotated[
        list[Text], FailFast(), BeforeValidator(_prompts), Field(min_length=1, max_length=LONGEST_LIST)
    ] = [""]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    session: Text | None = None
    fork: bool = False

    @model_validator(mode="after")
    def _one_text_of_a_session(self) -> "CompletionBody":
        if self.fork and self.session is None:
            raise ApiError(400, "fork: needs a session. Name the one to fork.", "fork", "invalid_value")
        if self.session is None and "prompt" not in self.model_fields_set:
            raise ApiError(400, "prompt: missing. Send the text to continue.", "prompt", "invalid_value")
        if self.session is not None and len(self.prompt) * self.n > 1:
            raise ApiError(
                400, "session: only one text can continue a session. Fork it for more.", "session", "invalid_value"
            )
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_joined)]
    name: str = ""  # which no template takes

    def rendered(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatBody(WritingBody):
    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=LONGEST_LIST)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None

    @model_validator(mode="after")
    def _check_log_probabilities(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs. Set logprobs to true.", "top_logprobs")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class FileQuery(Body):
    """What the query of a request says of the file in its body."""

    learn: Learn = None
    stream: bool = False


class TextBody(FileQuery):
    """A text to be read."""

    text: Text = ""


class ListQuery(Body):
    """Which part of a list is asked for."""

    limit: Annotated[int, BeforeValidator(_number), Field(ge=1, le=LONGEST_PAGE)] = LONGEST_PAGE
    after: Annotated[str, Field(max_length=200)] | None = None


class TextQuery(Body):
    """What is asked for with the text of a session."""

    logprobs: Annotated[int, BeforeValidator(_number), Field(ge=0, le=MOST_ALTERNATIVES)] | None = None


class NoBody(Body):
    pass


class ScoreBody(Body):
    text: Annotated[Text, Field(min_length=1)]
    model: Text | None = None
    learn: Learn = None


class ClassifyBody(Body):
    text: Annotated[
        list[Annotated[Text, Field(min_length=1)]],
        FailFast(),
        BeforeValidator(_listed),
        Field(min_length=1, max_length=LONGEST_LIST),
    ]
    model: Text | None = None


def check_length(text: str, most: int, name: str) -> None:
    """Refuse a text of more bytes than a prompt may have."""
    size = len(text.encode())
    if size > most:
        message = f"{name}: {size:,} bytes are more than the {most:,} of this server."
        raise ApiError(400, message, name, "context_length_exceeded")


def text_of_file(data: bytes) -> str:
    """Return the text of a plain text file: in UTF-8, or the encoding that its byte order mark names."""
    encoding = marked(data) or UTF8
    try:
        return _plain(data.decode(encoding))
    except UnicodeDecodeError as error:
        raise ApiError(
            400,
            f"The file is not {encoding.upper()} at byte {error.start:,}, and not EPUB, DOCX, PDF or HTML. "
            "Convert it to one of these.",
        ) from None
    except ValueError as error:
        raise ApiError(400, f"The file {error}") from None


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], data: bytes) -> AnyBody:
    """Parse a JSON body; raise a 400 that names the mistake."""
    without_escapes = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = without_escapes.count(b'"') // 2
    if strings > MOST_STRINGS or sum(map(len, without_escapes.split(b'"')[::2])) > MOST_STRUCTURE:
        raise ApiError(400, "The body has too many values. Send fewer, or several requests.")
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}. Send an object of JSON in UTF-8.") from None
    return _validated(kind, value)


def parse_query(kind: type[AnyBody], query: Mapping[str, str]) -> AnyBody:
    """Parse the query of a request; raise a 400 that names the mistake."""
    return _validated(kind, {name: SWITCH.get(value, value) for name, value in query.items()})


def _validated(kind: type[AnyBody], value: Any) -> AnyBody:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_context=False, include_input=False)
        first = mistakes[0]
        unknown = [_name(mistake["loc"]) for mistake in mistakes if mistake["type"] == "extra_forbidden"]
        if unknown:
            like = nearest(unknown[0], kind.model_fields)
            names, plural = ", ".join(unknown[:10]), "s" if len(unknown) > 1 else ""
            raise ApiError(
                400, f"{names}: unknown field{plural}.{like}", unknown[0], code="unknown_parameter"
            ) from None
        name = _name(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{name or 'body'}: {message}", name or None, code="invalid_value") from None


def _name(path: tuple[int | str, ...]) -> str:
    name = ".".join(str(part) for part in path).encode(errors="replace").decode()
    return name if len(name) <= SHOWN else name[:SHOWN] + "..."
