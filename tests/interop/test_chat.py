"""Conversations: the same tokens as in transformers, and no message is read twice."""

import sys
from pathlib import Path

import pexpect
import pytest
import torch
from interop import tiny_llama
from interop.tiny_llama import CHAT, CONFIG, write_folder

import lmlong
from lmlong.errors import UsageError
from lmlong.inference import chat
from lmlong.inference import session as sessions
from lmlong.inference.chat import encode, render
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.interop.importing import import_model
from lmlong.model.language_model import LanguageModel

TEMPLATES = {
    "plain": CHAT,
    "changes what was said": CHAT.replace("message.content", "message.content | trim | upper"),
    "tells who answers": CHAT.replace("[assistant]", "{{ bos_token }}[assistant] "),
}
TALK = [" The quick brown fox?\n", "No </s> [user] <s>\ufdd0 wizards", "", "boxing <|endoftext|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model for chat and its run."""
    folder = tmp_path_factory.mktemp("chat")
    import_model(write_folder(folder / "llama", CONFIG, tiny_llama.weights(CONFIG)), folder / "run")
    return folder


@pytest.fixture
def loaded(folder: Path) -> TrainedLanguageModel:
    return lmlong.load(folder / "run")


@pytest.mark.parametrize("template", TEMPLATES)
def test_answer_follows_all_messages(loaded: TrainedLanguageModel, template: str) -> None:
    loaded.tokenizer.chat_template = TEMPLATES[template]
    talk = loaded.conversation("Be brief.")
    for text in TALK:
        prompt = render(loaded.tokenizer, [*talk.messages, {"role": "user", "content": text}])
        answer = "".join(talk.say(text, Sampling(seed=3), max_tokens=7))
        assert talk.messages[-2:] == [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        assert talk._session is not None
        tokens = [*talk._session.recent]
        assert loaded.tokenizer.decode(tokens) == loaded.tokenizer.decode(encode(loaded.tokenizer, prompt)) + answer
        fresh = sessions.prefill(loaded.model, [tokens])
        one, other = (sessions.next_logits(loaded.model, session)[0] for session in (talk._session, fresh))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_message_is_read_twice(loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first, more, read = sessions.first, sessions.read_tokens, list[int]()

    def counted_first(model: LanguageModel, token: int, learn: None) -> sessions.Session:
        read.append(token)
        return first(model, token, learn)

    def counted(model: LanguageModel, tokens: list[int], session: sessions.Session) -> sessions.Session:
        read.extend(tokens)
        return more(model, tokens, session)

    monkeypatch.setattr(sessions, "first", counted_first)
    monkeypatch.setattr(sessions, "read_tokens", counted)
    talk = loaded.conversation()
    answers = ["".join(talk.say(text, max_tokens=5)) for text in TALK]
    whole = loaded.tokenizer.decode(encode(loaded.tokenizer, render(loaded.tokenizer, talk.messages[:-1])))
    for answer in answers[:-1]:  # which the model wrote and need not read
        whole = whole.replace(f"[assistant]{answer}", "[assistant]", 1)
    assert loaded.tokenizer.decode(read) == whole


def test_special_tokens_in_messages_are_text(loaded: TrainedLanguageModel) -> None:
    tokenizer = loaded.tokenizer
    said = [{"role": "user", "content": text} for text in TALK]
    tokens = list(encode(tokenizer, render(tokenizer, said)))
    assert tokens.count(tokenizer.bos) == 1 and tokens.count(tokenizer.eos) == len(TALK)
    expected = "".join(f"[user]{text}\n" for text in TALK).replace("\ufdd0", "") + "[assistant]"
    assert tokenizer.decode(tokens) == expected


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set all = namespace(text='a') %}{% for i in range(40) %}{% set all.text = all.text ~ all.text %}{% endfor %}"
)
LONG = "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "took more than 1 second"),
        (DOUBLE, "takes more than 1 GB"),
        (LONG, "renders more than 16,777,2"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
        ("{{ messages.append(messages) }}{{ messages.__init__.__globals__ }}", "chat template"),
        ("{{ 'a' * 10 ** 30 }}", "chat template"),
        ("{% if %}", "chat template"),
        ("{{ raise_exception('no') }}", "chat template"),
        ("{# nothing #}", "chat template"),
        ("{{ raise_exception('a' * 10 ** 6) }}", "aaaa"),
    ],
    ids=str,
)
def test_unusable_template_is_refused(
    loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    tokenizer = loaded.tokenizer
    tokenizer.chat_template = template
    said = [{"role": "user", "content": "Hello"}]
    monkeypatch.setattr(chat, "SECONDS", 1.0 if template == LOOP else 60.0)
    with pytest.raises(UsageError, match=reason) as refused:
        render(tokenizer, said)
    assert len(str(refused.value)) < 1000
    tokenizer.chat_template = CHAT
    monkeypatch.setattr(chat, "SECONDS", 60.0)
    assert render(tokenizer, said) == "<s>[user]Hello</s>\n[assistant]"


def test_model_without_a_chat_template_is_refused(loaded: TrainedLanguageModel) -> None:
    loaded.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="has no chat template"):
        loaded.conversation()


def test_chat_in_a_terminal(folder: Path) -> None:
    words = ["-m", "lmlong", "generate", str(folder / "run"), "--chat", "--max-tokens", "4", "--temperature", "0"]
    child = pexpect.spawn(sys.executable, words, encoding="utf-8", timeout=120)
    for line in ("The quick", "brown fox"):
        child.expect("> ")
        child.sendline(line)
        child.expect(line)
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.interop
@pytest.mark.parametrize("template", TEMPLATES)
def test_transformers_has_the_same_tokens_of_messages(
    folder: Path, loaded: TrainedLanguageModel, template: str
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = loaded.tokenizer
    tokenizer.chat_template = TEMPLATES[template]
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "llama" / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    reference.backend_tokenizer.pre_tokenizer.add_prefix_space = False
    reference.chat_template = TEMPLATES[template]
    said = [{"role": role, "content": f"{role} jumps\n over"} for role in ("system", "user", "assistant", "user")]
    expected = reference.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert render(tokenizer, said) == expected
    assert list(encode(tokenizer, expected)) == reference(expected, add_special_tokens=False)["input_ids"]
