"""Fits a small BPE tokenizer to a job: bytes, single digits, role headers, tags, pieces of tool calls, and merges."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from replayground.schemas.job import Job

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Special tokens. Text that contains one of these strings, such as the output of a tool, does not become the token
when it is encoded with encode_special_tokens."""
END = "<|end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>"
    "{% else %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% set call = call['function'] or call %}"
    "<tool_call>{\"name\": {{ call['name'] | tojson }}, \"arguments\": {{ call['arguments'] | tojson }}}</tool_call>"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Both bound the time of fitting.
_TEXTS_MAX = 20_000
_CALLS_COMPARED = 200
_PIECE_CHARACTERS_MIN = 3
_CALL = re.compile(r'<tool_call>(\{"name": "([^"]+)".*?)</tool_call>')


def fit_tokenizer(job: Job, seed: int, vocabulary_size: int) -> Tokenizer:
    """A tokenizer of at most vocabulary_size tokens. The same job and seed give the same tokenizer."""
    texts = list(itertools.islice(_texts(job, seed), _TEXTS_MAX))
    scaffold = job.scaffold or common_pieces(texts)
    added = (*TAGS, *scaffold)
    tokenizer = Tokenizer(models.BPE())
    # One token for each digit: numbers are then copied and computed digit by digit. No merge crosses a digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # All 256 bytes, so that any text can be encoded; the added tokens come on top.
        vocab_size=vocabulary_size - len(ROLES) - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without(added, texts), trainer)
    tokenizer.add_special_tokens([AddedToken(role, special=True, normalized=False) for role in ROLES])
    # Not special, so that they survive decoding: parsers look for them in the text.
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in added])
    return tokenizer


def tokenizer_config(positions_max: int) -> bytes:
    """tokenizer_config.json for transformers and vLLM."""
    return json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": positions_max,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        indent=1,
    ).encode()


def common_pieces(texts: Iterable[str]) -> tuple[str, ...]:
    """Pieces that all calls of one tool have in common, longest first. For a job that does not name its scaffold."""
    calls: dict[str, set[str]] = {}
    for text in texts:
        for call, tool in _CALL.findall(text):
            if len(calls.setdefault(tool, set())) < _CALLS_COMPARED:
                calls[tool].add(call)
    # With a single call everything would be common, its arguments too.
    pieces = {piece for of_tool in calls.values() if len(of_tool) > 1 for piece in _pieces(sorted(of_tool))}
    return tuple(sorted(pieces, key=lambda piece: (-len(piece), piece)))


def _texts(job: Job, seed: int) -> Iterator[str]:
    """The sample texts of the job; without them its prompts. Any text can be encoded, since every byte has a token."""
    yield job.system_prompt
    if job.texts is not None:
        yield from job.texts(seed)
    else:
        yield from (task.prompt for task in itertools.islice(job.tasks("train", seed), 2000))


def _without(added: Sequence[str], texts: Iterable[str]) -> Iterator[str]:
    """The texts without added tokens and role headers."""
    # Merges inside them would never be used. Longest first, so that a piece is not split by a shorter one inside it.
    pattern = re.compile("|".join(re.escape(piece) for piece in sorted((*added, *ROLES), key=len, reverse=True)))
    for text in texts:
        yield from (part for part in pattern.split(text) if part)


def _pieces(calls: Sequence[str]) -> list[str]:
    """The longest piece common to all calls, and recursively the common pieces on either side of it, in order."""
    piece = _longest_common(calls)
    if len(piece) < _PIECE_CHARACTERS_MIN:
        return []
    halves = [call.split(piece, 1) for call in calls]
    return [*_pieces([left for left, _ in halves]), piece, *_pieces([right for _, right in halves])]


def _longest_common(calls: Sequence[str]) -> str:
    shortest = min(calls, key=len)
    for length in range(len(shortest), _PIECE_CHARACTERS_MIN - 1, -1):
        for start in range(len(shortest) - length + 1):
            piece = shortest[start : start + length]
            # Digits are single tokens and must not be part of a piece.
            if not any(character.isdigit() for character in piece) and all(piece in call for call in calls):
                return piece
    return ""
