"""One JSON object while its fields are judged: fields that go on, are left out, or are put in. Pure."""

from __future__ import annotations

import math
import re
from typing import NoReturn

import msgspec

from hive.bodies.json_object import read_list, read_object, read_text, shown
from hive.bodies.media import check_media, check_tools, is_text
from hive.errors import BadRequest, TooLarge
from hive.settings.field_rules import SWITCHES, Fields, Number, Rule, Verb

Raw = msgspec.Raw
IDLE = frozenset({b"null", b"false", b'""', b"[]", b"{}"})
"""Values that ask for nothing: ollama-python sends `"raw":false` and `"template":""` with every request."""
_BLANK = frozenset(b' \t\r\n"\\')
"""Bytes that may follow the quote of a text that is empty or white space: also the quote at its end, and an escape."""
_QUOTE, _BRACE, _BRACKET, _NULL = b'"{[n'
_OF_A_NUMBER = b"-0123456789"
_SWITCHES = frozenset({b"null", b"true", b"false", *(b'"%b"' % word.encode() for word in SWITCHES)})
_encode = msgspec.json.Encoder().encode
_number = msgspec.json.Decoder(int | float).decode
_COMPILED = (
    "the server would compile it unbounded, and a bad one could end it; `response_format` with a JSON schema holds an "
    "answer to a form within bounds"
)
_BELIEVED = "the server sets it from the model's template, and believes what it is told"
_TENSORS = "the server decodes it with what can run code, or takes memory as the client likes"
_ELSEWHERE = "it names hosts and tensors inside the server"
_RUNS = "a template of a client's runs in the server (CVE-2025-62426)"
_ADAPTER = "which adapter answers is an operator's to say; name its model"
_PROMPTS_OWN = "the probabilities of a whole prompt are computed past the prefix cache that all requests share"
_REASONS: dict[str, str] = {
    "lora": _ADAPTER,
    "chat_template": _RUNS,
    "template": _RUNS,
    "chat_template_kwargs": "what it names can replace the template that the server runs (CVE-2025-62426); taken are "
    "enable_thinking, thinking, clear_thinking and reasoning_effort, as a switch",
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "prompt_embeds"), _TENSORS),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), _ELSEWHERE),
    "_debug_render_only": "it shows the rendered prompt instead of an answer",
    "raw": "the prompt would go to the model as it is, outside its template",
    "prompt_logprobs": f"{_PROMPTS_OWN}; `logprobs` tells those of the answer",
    "echo": f"a server answers it with the prompt's own probabilities, and {_PROMPTS_OWN}",
    "use_beam_search": "each beam is a request of its own in the server, past Hive's queue",
    **dict.fromkeys(("structured_outputs", "structural_tag", "json_schema"), _COMPILED),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _COMPILED),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), _COMPILED),
    **dict.fromkeys(("grammar", "grammar_lazy", "grammar_triggers", "grammar_type", "preserved_tokens"), _COMPILED),
    **dict.fromkeys(("chat_format", "chat_parser", "generation_prompt"), _BELIEVED),
    **dict.fromkeys(("message_delimiters", "parse_tool_calls"), _BELIEVED),
    "texts": "an answer in that form does not say what it cost; send the texts as `documents`",
    "mcp_servers": "the model's server would call it; nothing is fetched from here",
    **dict.fromkeys(("url", "file_url"), "nothing is fetched from here; send the file itself as `file`"),
    "include": "no model here tells how probable each token was",
    **dict.fromkeys(("known_speaker_names", "known_speaker_references"), "no model here tells who speaks"),
    "thread": "no conversation is kept here; send all of its messages",
    "svg": "a picture is made of pixels here",
}
"""Reasons why fields of the rows that refuse (`fields.py`) are refused, by the field without its inner fields. For a
field that an operator permits in hive.conf none of this is told."""


_WORDS_WHY = {
    "response_format": {"url": "Hive keeps no image, so that there is none to fetch: the answer holds it"},
    "background": {"transparent": "no model here makes one"},
    "output_format": dict.fromkeys(("svg", "gif"), "one still image is made, of pixels"),
}
"""Reasons why a word is none of a row's, by field and word."""
SIDE_MAX = 16384
_SIZE = re.compile(rb'"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})"')

FOR_HIVE = "x_"
"""The start of fields by which clients of other gateways say who they are and how urgent it is (`x_client_id`). Hive
knows that by the connection, and operators say it in headers; so they are dropped, whatever `unknown_fields` says."""


class Draft:
    """The fields of one object, by folded name. A change is made in a copy, so `fields` may be looked at any time.

    >>> draft = Draft({"a": Raw(b"1"), "b": Raw(b"2")}, Fields(policed={"b": Rule(verb=Verb.DROP)}), "/x")
    >>> draft.judge()
    >>> draft.put("c", b"3")
    >>> draft.text(b'{"a":1,"b":2}'), draft.dropped
    (b'{"a":1,"c":3}', ['b'])
    """

    __slots__ = ("_added", "_changed", "_prefix", "_rules", "_target", "clamped", "dropped", "fields")

    def __init__(
        self, fields: dict[str, Raw], rules: Fields, target: str, within: Draft | None = None, prefix: str = ""
    ):
        self.fields = fields
        self._rules = rules
        self._target = target
        self._prefix = prefix
        self._changed = False
        self._added: dict[str, bytes] = {}
        self.dropped: list[str] = [] if within is None else within.dropped
        self.clamped: list[str] = [] if within is None else within.clamped

    def __repr__(self) -> str:
        return f"<Draft {self._target} {len(self.fields)} fields, {len(self._added)} added>"

    # changes ----------------------------------------------------------------------------------------------------------

    def put(self, name: str, value: bytes) -> None:
        """Sets a field to this JSON text, in place of any value it had."""
        if name in self.fields:
            self._own()[name] = Raw(value)
        else:
            self._added[name] = member(name, value)

    def add(self, name: str, text: bytes) -> None:
        """Adds a field that is not there yet, as a `member`."""
        self._added[name] = text

    def remove(self, name: str) -> None:
        del self._own()[name]

    def rename(self, name: str, other: str) -> None:
        """Has a field go by another name, where that is not there itself, which then says it alone."""
        value = self.fields.get(name)
        if name in self._added:
            text = self._added.pop(name)
            value = Raw(text[len(member(name, b"")) :])
        elif value is None:
            return
        else:
            self.remove(name)
        if bytes(self.fields.get(other, b"null")) == b"null":
            self.put(other, bytes(value))

    def _own(self) -> dict[str, Raw]:
        if not self._changed:
            self._changed = True
            self.fields = dict(self.fields)
        return self.fields

    @property
    def is_empty(self) -> bool:
        return not self.fields and not self._added

    def text(self, unchanged: bytes) -> bytes:
        """The object as JSON text. `unchanged`: what it was before anything changed, so that adding is not encoding."""
        text = _encode(self.fields) if self._changed else unchanged
        if not self._added:
            return text
        added = b",".join(self._added.values())
        return text[:-1] + (b",%b}" % added if self.fields else b"%b}" % added)

    # judging ----------------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Every field by its rule. Raises BadRequest, TooLarge."""
        rules, fields = self._rules, self.fields
        for name in fields:
            if name in rules.plain:
                continue
            if name in rules.media:
                if not is_text(fields[name]):
                    check_media(fields[name], name)
            elif (rule := rules.policed.get(name)) is not None:
                self._judge(name, fields[name], rule)
            elif rules.unknown is Verb.DROP or (name.startswith(FOR_HIVE) and not self._prefix):
                self._drop(name)
            elif rules.unknown is Verb.REFUSE:
                self._refuse(name)
        for name in rules.always:
            if name not in fields:
                self._judge_absent(name, rules.policed[name])

    def _judge(self, name: str, raw: Raw, rule: Rule) -> None:
        if rule.inside is None or not self._look_inside(name, raw, rule):
            self._act(name, raw, rule)
        if rule.max_bytes is not None and len(memoryview(raw)) > rule.max_bytes:
            raise TooLarge(f'"{self._shown(name)}" is longer than {rule.max_bytes} bytes')
        if rule.filled and _is_empty(raw):
            raise BadRequest(f'"{self._shown(name)}" is empty')
        if rule.max_items is not None:
            self._count_items(name, raw, rule.max_items)
        if rule.local_media and not is_text(raw):
            check_media(raw, name)
        if rule.local_tools:
            check_tools(bytes(raw))
        if rule.switch and bytes(raw) not in _SWITCHES:
            raise BadRequest(f'"{self._shown(name)}" must be true, false or one of {", ".join(SWITCHES)}')

        if rule.words and bytes(raw) != b"null":
            self._check_word(name, raw, rule.words)
        if rule.pixels is not None and bytes(raw) not in (b"null", b'"auto"'):
            self._check_pixels(name, raw, rule.pixels)

    def _check_word(self, name: str, raw: Raw, words: tuple[str, ...]) -> None:
        found = read_text(raw, f'"{self._shown(name)}"')
        if found not in words:
            why = _WORDS_WHY.get(self._prefix + name, {}).get(found, "")
            raise BadRequest(f'"{self._shown(name)}" must be {" or ".join(words)}{f": {why}" if why else ""}')

    def _check_pixels(self, name: str, raw: Raw, most: int) -> None:
        size = _SIZE.fullmatch(bytes(raw))
        if size is None:
            raise BadRequest(f'"{self._shown(name)}" must be WIDTHxHEIGHT in pixels, like 1024x1024, or auto')
        width, height = int(size[1]), int(size[2])
        if max(width, height) > SIDE_MAX or width * height > most:
            raise BadRequest(
                f'"{self._shown(name)}" asks for {width}x{height}: more than {most} pixels',
                hint="an operator raises [images] max_pixels" if most < SIDE_MAX * SIDE_MAX else "",
            )

    def _count_items(self, name: str, raw: Raw, most: int) -> None:
        """A list of numbers is one prompt, of texts, lists or objects as many as it has."""
        if memoryview(raw)[0] != _BRACKET:
            return
        items = read_list(raw, f'"{self._shown(name)}"')
        if len(items) > most and memoryview(items[0])[0] not in _OF_A_NUMBER:
            raise BadRequest(f'"{self._shown(name)}" has more than {most} prompts, each of which would be a request')

    def _act(self, name: str, raw: Raw, rule: Rule) -> None:
        match rule.verb:
            case Verb.CLAMP:
                self._clamp(name, raw, rule)
            case Verb.DROP:
                self._drop(name)
            case Verb.REFUSE if bytes(raw) in IDLE:
                self.remove(name)
            case Verb.REFUSE:
                self._refuse(name, "taken")
            case Verb.INJECT:
                self.put(name, rule.value)

    def _refuse(self, name: str, what: str = "known") -> NoReturn:
        of_a_row = what == "taken" or self._prefix  # what is in no row may have the name of another endpoint's field
        why = _REASONS.get((self._prefix + name).partition(".")[0], "") if of_a_row else ""
        says = f": {why}" if why else ""
        raise BadRequest(f'the field "{self._shown(name)}" is not {"taken" if why else what} on {self._target}{says}')

    def _judge_absent(self, name: str, rule: Rule) -> None:
        if rule.filled:
            raise BadRequest(f'"{self._shown(name)}" is missing')
        if rule.verb is Verb.INJECT:
            self.put(name, rule.value)
        elif rule.inside is not None:
            inner = Draft({}, rule.inside, self._target, self, f"{self._prefix}{name}.")
            inner.judge()
            self.put(name, inner.text(b"{}"))

    def _look_inside(self, name: str, raw: Raw, rule: Rule) -> bool:
        """Judges the fields of an object field; False where it is none and its own rule has the say."""
        assert rule.inside is not None
        closed = rule.verb in (Verb.DROP, Verb.REFUSE)
        first = memoryview(raw)[0]
        if first == _NULL or (closed and first != _BRACE):
            return False
        fields, text = read_object(raw, f'"{self._shown(name)}"')
        inner = Draft(fields, rule.inside, self._target, self, f"{self._prefix}{name}.")
        inner.judge()
        if closed and inner.is_empty:
            self.remove(name)
        elif (new := inner.text(text)) != bytes(raw):
            self.put(name, new)
        return True

    def _drop(self, name: str) -> None:
        if bytes(self.fields[name]) != b"null":
            self.dropped.append(self._shown(name))
        self.remove(name)

    def _clamp(self, name: str, raw: Raw, rule: Rule) -> None:
        if bytes(raw) == b"null":
            return
        number = read_number(self._shown(name), raw)
        low, high = rule.low, rule.high
        if low is not None and number < low:
            cut: Number = low
        elif high is not None and (number > high or (low is None and number < 1 <= high)):
            cut = high
        else:
            return
        text = _encode(cut)
        self.put(name, text)
        self.clamped.append(f"{self._shown(name)}={text.decode()}")

    def _shown(self, name: str) -> str:
        return shown(self._prefix + name)


def member(name: str, value: bytes) -> bytes:
    """A field as it stands in an object."""
    return b'"%b":%b' % (name.encode(), value)


def read_number(name: str, raw: Raw) -> Number:
    """A number. Raises BadRequest, also for one beyond all range: `1e999` is none to every decoder."""
    try:
        number: Number = _number(raw)
    except msgspec.MsgspecError:
        raise BadRequest(f'"{name}" must be a number') from None
    if isinstance(number, float) and not math.isfinite(number):
        raise BadRequest(f'"{name}" is out of range')
    return number


def _is_empty(raw: Raw) -> bool:
    """No text but white space, no item in a list, or nothing at all."""
    data = bytes(raw)
    if data[0] == _QUOTE:
        return data[1] in _BLANK and not read_text(raw, "the text").strip()
    return data[0] != _BRACKET or data[1:].lstrip(b" \t\r\n") == b"]"
