"""Texts that begin alike are tokenized from where they differ, with the ids of the whole text, and in linear time."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from launch.data import incremental
from launch.data.chat import render_text, tokenize
from launch.data.conversations import Conversation, Message
from launch.data.incremental import IncrementalTokenizer
from launch.data.masking import Masker
from tests.builders.chat_templates import DEEPSEEK, GEMMA, GLM, GPT_OSS, LLAMA3, MISTRAL, QWEN3, Family

FAMILIES = [QWEN3, LLAMA3, GEMMA, MISTRAL, GLM, GPT_OSS, DEEPSEEK]
WORDS = ("Hello", " world", "\n", "  ", "the the", "é", "日本", "<|im", "_end|>", "<think>", "</s", " x", "123", "\n\n", "▁a")


def with_merges(family: Family, kind: str = "byte") -> PreTrainedTokenizerBase:
    """Return a tokenizer with merges, and with added tokens that eat the whitespace beside them."""
    tokenizer = Tokenizer(models.BPE())
    if kind == "byte":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte" else []
    corpus = [family.template, *WORDS, "".join(WORDS), "user\nassistant\nHello world" * 9]
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token) for token in family.special_tokens])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken(" x", lstrip=True), AddedToken("123", rstrip=True)])
    wrapped: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=family.end, chat_template=family.template
    )
    return wrapped


def talk(num_turns: int, generator: random.Random) -> list[Message]:
    roles = [role for _ in range(num_turns) for role in ("user", "assistant")]
    messages: list[Message] = [{"role": role, "content": "".join(generator.choices(WORDS, k=6))} for role in roles]
    for message in messages[1::4]:
        message["reasoning_content"] = "".join(generator.choices(WORDS, k=6))
    return messages


@pytest.mark.parametrize("kind", ["byte", "metaspace", "prepend"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_render_of_a_conversation_has_the_ids_of_its_whole_text(family: Family, kind: str) -> None:
    tokenizer = with_merges(family, kind)
    encoder = IncrementalTokenizer(tokenizer)
    generator = random.Random(0)
    for _ in range(5):
        messages = talk(6, generator)
        for stop in range(1, len(messages) + 1):
            text = render_text(tokenizer, messages[:stop], generation_prompt=stop % 2 == 1)
            assert encoder.encode(text) == tokenize(tokenizer, [text])[0]


@pytest.mark.parametrize(
    "tokens", [("<a>", "<b>"), ("<a>", "<a>b"), ("<a>", "x<a>"), ("aba", "<b>"), ("a>", "<a>"), (" <a>", "<b>")]
)
def test_no_text_is_cut_at_tokens_that_hide_each_other(tokens: tuple[str, ...]) -> None:
    """Random texts of their characters, each shorter, changed or longer than the one before."""
    tokenizer = with_merges(Family("x", tokens, tokens[0]))
    encoder = IncrementalTokenizer(tokenizer)
    generator = random.Random(1)
    text = ""
    for _ in range(1500):
        kept = text[: generator.randrange(max(0, len(text) - 6), len(text) + 1)] if len(text) < 60 else ""
        text = kept + "".join(generator.choices(["<a>", "<", "a", "b", ">", "x", " ", "<b>", "aba"], k=generator.randrange(5)))
        assert encoder.encode(text) == tokenize(tokenizer, [text])[0], text


def test_characters_that_reach_the_tokenizer_are_linear_in_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = LLAMA3.tokenizer()
    masker = Masker(tokenizer, {tokenizer.get_vocab()[LLAMA3.end]})
    counted: list[int] = []

    def count(tokenizer: PreTrainedTokenizerBase, text: list[str]) -> list[list[int]]:
        counted.append(sum(map(len, text)))
        return tokenize(tokenizer, text)

    monkeypatch.setattr(incremental, "tokenize", count)
    totals = []
    for num_turns in (10, 40):
        counted.clear()
        roles = [role for _ in range(num_turns) for role in ("user", "assistant")]
        [sample] = masker.mask(Conversation([{"role": role, "content": "Hello " * 20} for role in roles])).samples
        assert sample.loss_mask.sum() == num_turns * (len("Hello " * 20))  # trimmed, and the end token
        totals.append(sum(counted))
    assert totals[1] < 4.5 * totals[0]
