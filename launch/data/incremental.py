"""Tokenize texts that begin alike: only the new part is tokenized, and the ids are those of the whole text.

A tokenizer splits a text at its special tokens before it does anything else, and treats every piece on its own. So the
ids of a text are those of its pieces, one after the other, where every piece but the first begins with a special token:

    <|im_start|>user\\nHi | <|im_end|>\\n | <|im_start|>assistant\\nHello | <|im_end|>\\n
"""

import itertools
import re
from bisect import bisect_left
from typing import NamedTuple

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from launch.data.chat import tokenize


class _Cut(NamedTuple):
    """A special token of the last text: its characters, and the number of ids before it."""

    start: int
    stop: int
    num_ids: int


class IncrementalTokenizer:
    """Remembers the last text and the special tokens at which it may be cut."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pattern = _cut_pattern(tokenizer)
        self._text = ""
        self._ids: list[int] = []
        self._cuts: list[_Cut] = []

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with those of the beginning that it shares with the text before."""
        if self._pattern is None:
            return tokenize(self._tokenizer, [text])[0]
        known = bisect_left(self._cuts, True, key=lambda cut: not text.startswith(self._text[: cut.stop]))
        begin, _, num_ids = self._cuts[known - 1] if known else _Cut(0, 0, 0)
        cuts, ids = self._cuts[: max(known - 1, 0)], self._ids[:num_ids]
        spans = dict(match.span() for match in self._pattern.finditer(text, begin))
        edges = [begin, *(start for start in spans if start > begin), len(text)]
        pieces = [text[start:stop] for start, stop in itertools.pairwise(edges)]
        for start, piece_ids in zip(edges, tokenize(self._tokenizer, pieces), strict=False):
            if start in spans:
                cuts.append(_Cut(start, spans[start], len(ids)))
            ids += piece_ids
        self._text, self._ids, self._cuts = text, ids, cuts
        return ids.copy()


def _cut_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of the tokens at which a text may be cut; None where there are none, or nothing is known."""
    if getattr(tokenizer, "backend_tokenizer", None) is None or getattr(tokenizer, "split_special_tokens", False):
        return None
    added = list(tokenizer.added_tokens_decoder.values())
    contents = [token.content for token in added if _is_always_found(token, added)]
    return re.compile("|".join(map(re.escape, contents))) if contents else None


def _is_always_found(token: AddedToken, added: list[AddedToken]) -> bool:
    """Return True where every occurrence in a text is this token: nothing else overlaps it, and no whitespace is eaten."""
    content = token.content
    if token.normalized or token.lstrip or token.rstrip or token.single_word or content != content.strip() or not content:
        return False
    return not any(_overlaps(other.content, content) for other in added)


def _overlaps(other: str, content: str) -> bool:
    """Return True where an occurrence of `other` can hide one of `content`: it holds it, or ends as that begins."""
    holds = other != content and content in other
    return holds or any(other.endswith(content[:size]) for size in range(1, len(content)))
