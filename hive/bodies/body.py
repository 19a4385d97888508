"""Request bodies: each field is judged by its rule, and the body is built anew. Pure.

In two steps: `open_body` reads the object, judges its fields and finds the model. Which server answers, and so of which
kind it is, follows from the model; `complete` makes of the rest what that server takes.

Ollama decodes with Go's encoding/json: names match without regard to case, the last of equal ones wins, even with
U+212A KELVIN SIGN for k. So names are folded and must be unique at every level that is looked at, and the client's
bytes never go upstream. Values that no rule names go on exactly as written (`1e2` stays `1e2`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from hive.bodies import grammar
from hive.bodies.body_rewriter import IDLE, Draft, member, read_number
from hive.bodies.image_work import TARGET as IMAGES
from hive.bodies.image_work import images_asked
from hive.bodies.json_object import read_object, read_text
from hive.bodies.needs import BodyNeeds
from hive.bodies.schemas import SchemaLimits
from hive.dialects import ollama_loading
from hive.dialects.fitting import fit
from hive.dialects.translation import Sent
from hive.dialects.translators import RESPONSES, counted, way_of
from hive.errors import BadRequest, NotSupported
from hive.models.capabilities import Over
from hive.settings.field_rules import FieldRules, Fields

MAX_MODEL_NAME = 512
"""Characters."""
MOST_TOKENS = 2**63 - 1
"""1e300 is a number too; this is the largest one a worker can tell of."""
MAX_SHOWN = 20
"""Names told in X-Hive-Dropped; of the rest only how many."""
LARGE_BYTES = 256 * 1024
CROWDED_BYTES = 16 * 1024
IDLE_BYTES = 64
"""A longer value asks for something."""
Raw = msgspec.Raw
_encode = msgspec.json.Encoder().encode
_bool = msgspec.json.Decoder(bool).decode
_value = msgspec.json.Decoder().decode
_BRACE = b"{"[0]
_NULL = Raw(b"null")


class Opening(msgspec.Struct, frozen=True):
    """Hive's requirements that hold for any server. `default_model`: the model if the body names none. `streams`: the
    meaning of an absent `stream`."""

    default_model: str = ""
    streams: bool = False


class Want(msgspec.Struct, frozen=True):
    """Hive's requirements for a body that a server of this kind is to take.

    `ask_usage`: usage is asked for in a stream even if its client did not ask for it. `inject`: fields (name, raw JSON)
    put in over the client's. `limit_absent`: if no limit of tokens is named, the tier's is put in; False if the
    server's own default is small (vLLM's /v1/completions: 16). `translate`: the client's endpoint, if the backend is
    asked at another one (hive.dialects.translators). `lacking`: fields that a translation may make and this backend
    does not take (hive.dialects.fitting). `passed_over`: fields that the backend would ignore silently.
    `limit_by_first_name`: a limit of tokens under another of its names is also sent under the first one. `limit_as`:
    the one name of a limit that this server's chats take, if it is not `max_tokens`. `estimate`: no backend is asked;
    the answer is an estimate of the tokens. `apart`: translated only to keep the prompts of tenants apart. `grammar`:
    the limits for its schemas, None if there is no server yet. `model`: the name by which this server knows its model,
    if it is not the one that Hive offers.
    """

    ask_usage: bool = False
    inject: tuple[tuple[str, bytes], ...] = ()
    limit_absent: bool = True
    translate: str = ""
    lacking: tuple[str, ...] = ()
    passed_over: tuple[Over, ...] = ()
    limit_by_first_name: bool = True
    limit_as: str = ""
    estimate: bool = False
    apart: bool = False
    grammar: SchemaLimits | None = None
    model: str = ""


class NamedBody(msgspec.Struct, frozen=True):
    """The part of a body that counts before a server is chosen. `loading`: the model is only to be loaded or
    unloaded. `needs`: what it needs of a model; None where nobody has looked."""

    model: str
    stream: bool
    loading: str = ""
    needs: BodyNeeds | None = None


class BodyChoice(msgspec.Struct, frozen=True):
    """The requirements for a body once its model is known, and the name of the model that answers."""

    want: Want
    served: str


class OpenedBody(msgspec.Struct, frozen=True):
    """A body after its first step. `text`: the object as JSON, without white space, before any change."""

    named: NamedBody
    rules: FieldRules
    draft: Draft
    text: bytes


_APART = (
    "; the server itself would be asked, were its prompts not kept apart by groups of tenants: tenants of one "
    "`cache_group` are one group (hive.conf)"
)


class TooHeavyHere(Exception):
    """A body takes too long to look at on the loop; `body_workers.py` has processes for it."""


class Asked(msgspec.Struct, frozen=True):
    """One body: the model it names, whether it wants a stream, and what goes upstream, in pieces of `size` bytes.

    `usage_added`: the usage of the stream was asked for by Hive, not by the client, which must not see it. `dropped`:
    fields left out, as a header may name them; `clamped`: fields with a smaller value than the client's, as
    `name=value`; `ignored`: fields that went upstream and that the backend ignores. `max_tokens`: the limit of
    generated tokens, None for no limit. `target`: the path the backend is asked at, if it is another than the client's.
    `kept`: what the translation of the answer needs, or an estimate, which is the answer itself. `served`: the model
    that answers instead of the one named; `sent`: the name that went upstream for it, if it is another than the
    client's. `loading`: the model is to be loaded or unloaded, so that nothing goes
    upstream. `several`: more than one answer is asked for, to one prompt or to several. `images`: so many are asked
    for, and `pixel_steps` are the pixels of all their steps (width x height x steps, summed); 0 for all else.
    """

    model: str
    stream: bool
    upstream: list[bytes]
    usage_added: bool = False
    dropped: tuple[str, ...] = ()
    clamped: tuple[str, ...] = ()
    max_tokens: int | None = None
    size: int = 0
    target: str = ""
    kept: bytes = b""
    served: str = ""
    sent: str = ""
    ignored: tuple[str, ...] = ()
    loading: str = ""
    several: bool = False
    images: int = 0
    pixel_steps: float = 0.0

    @property
    def answering(self) -> str:
        """The name of the model that answers."""
        return self.served or self.model

    def changes(self) -> bytes:
        """The header lines that tell the client the fields of its body that did not go upstream as they were, or that
        the backend ignores.

        >>> Asked("m", False, [], dropped=("seed", "raw"), clamped=("max_tokens=4096",)).changes()
        b'x-hive-dropped: seed, raw\\r\\nx-hive-clamped: max_tokens=4096\\r\\n'
        >>> Asked("m", False, [], ignored=("logit_bias",)).changes()
        b'x-hive-ignored: logit_bias\\r\\n'
        """
        dropped = b"x-hive-dropped: %b\r\n" % ", ".join(self.dropped).encode() if self.dropped else b""
        clamped = b"x-hive-clamped: %b\r\n" % ", ".join(self.clamped).encode() if self.clamped else b""
        ignored = b"x-hive-ignored: %b\r\n" % ", ".join(self.ignored).encode() if self.ignored else b""
        return dropped + clamped + ignored


def is_heavy(body: bytes) -> bool:
    """Whether reading `body` may take more than 5 ms, so that it belongs into a worker (`body_workers.py`).

    Measured: 256 KiB of text take 0.2 ms; an object up to 2.5 µs, another value of a list up to 0.8 µs.

    >>> is_heavy(b"x" * 300_000), is_heavy(b'{"content":[{}]},' * 2000), is_heavy(b"a short one")
    (True, True, False)
    """
    size = len(body)
    if size <= CROWDED_BYTES:
        return False
    return size > LARGE_BYTES or _has_more(body, b"{", 1000) or _has_more(body, b",", 4000)


def _has_more(body: bytes, byte: bytes, most: int) -> bool:
    """Whether that byte is in it more often. `count` looks at one byte after the other, 30 µs for 32 KB; `replace` goes
    from one that it finds to the next."""
    return len(body) - len(body.replace(byte, b"", most + 1)) > most


def open_body(body: bytes, rules: FieldRules, opening: Opening) -> OpenedBody:
    """The first step: the object is read, its fields are judged. Raises BadRequest, TooLarge.

    >>> fields = Fields(plain=frozenset({"model", "n"}))
    >>> open_body(b'{"model": "tiny", "n": 1}', FieldRules(target="/x", fields=fields), Opening(streams=True)).named
    NamedBody(model='tiny', stream=True, loading='', needs=None)
    """
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise BadRequest("the body is not UTF-8") from None
    fields, text = read_object(body, "the body", rules.fields.plain)
    loading = ollama_loading.asks(fields, rules.prompt) if rules.prompt else ""
    draft = Draft(fields, rules.fields, rules.target)
    draft.judge()
    model = _model(draft, rules.alias, opening.default_model)
    stream = _stream(draft, opening.streams)
    if loading:
        stream = False  # the answer is one piece, also if a stream is asked for
    return OpenedBody(NamedBody(model, stream, loading), rules, draft, text)


def complete(opened: OpenedBody, want: Want, served: str, *, on_loop: bool = False) -> Asked:
    """The second step: the body for a server of one kind, with `served` as its model. Raises BadRequest, TooLarge,
    NotSupported, and TooHeavyHere `on_loop`. The opened body is used up.

    >>> from hive.settings.field_rules import Rule, Verb
    >>> rules = FieldRules(target="/x", fields=Fields(plain=frozenset({"n"}), policed={"raw": Rule(verb=Verb.DROP)}))
    >>> complete(open_body(b'{"n": 1e2, "raw": 1}', rules, Opening()), Want(), "tiny").upstream
    [b'{"n":1e2,"model":"tiny"}']
    """
    named, rules, draft, text = opened.named, opened.rules, opened.draft, opened.text
    model, stream = named.model, named.stream
    if named.loading:
        return Asked(model, stream, [], dropped=_told(draft.dropped), loading=named.loading)
    if want.grammar is not None and grammar.has_schemas(draft.fields):
        if on_loop and not grammar.is_light(draft.fields):
            raise TooHeavyHere
        grammar.check(draft.fields, want.grammar, has_worded=want.translate == RESPONSES)
    ignored = _ignored(draft, want.passed_over) if want.passed_over else ()
    if want.estimate:
        return Asked(model, stream, [], kept=counted(draft.fields))
    max_tokens = _tokens(draft, rules, want.limit_absent, want.limit_by_first_name) if rules.tokens else None
    if want.limit_as and not want.translate and "max_completion_tokens" in rules.tokens:
        draft.rename(rules.tokens[0], want.limit_as)
    usage_added = want.ask_usage and stream and not want.translate and _ask_usage(draft)
    for name, value in () if want.translate else want.inject:
        if name in draft.fields:
            draft.dropped.append(name)
        draft.put(name, value)
    sent_as = want.model or served
    if sent_as != model and not want.translate:
        draft.put("model", _encode(sent_as))
    text = draft.text(text)
    target, kept = "", b""
    if want.translate:
        sent = _translated(text, want)
        target, kept, text = sent.target, sent.kept, _with(sent.body, want.inject)
        if sent_as != model:  # only now: what is kept names the model that was asked for, as the answer will
            text = _with_model(text, sent_as)
        draft.dropped.extend(sent.dropped)
        draft.clamped.extend(sent.clamped)
    asked = Asked(
        model,
        stream,
        [text],
        usage_added=usage_added,
        dropped=_told(draft.dropped) if draft.dropped else (),
        clamped=tuple(draft.clamped),
        max_tokens=max_tokens,
        size=len(text),
        target=target,
        kept=kept,
        served=served if served != model else "",
        sent=sent_as if sent_as != model else "",
        ignored=ignored,
        several=not want.translate and _asks_several(draft.fields),
    )
    if rules.target != IMAGES:
        return asked
    images, pixel_steps = images_asked(draft.fields)
    return msgspec.structs.replace(asked, images=images, pixel_steps=pixel_steps)


def _asks_several(fields: Mapping[str, Raw]) -> bool:
    """Whether a server answers this more than once; also where that is not certain.

    >>> told = {"n": b"2"}, {"n": b"1", "n_cmpl": b"null"}, {"prompt": b'["a","b"]'}, {"prompt": b"[1,2]"}
    >>> [_asks_several({name: Raw(text) for name, text in one.items()}) for one in told]
    [True, False, True, False]
    """
    for name in ("n", "n_cmpl", "best_of"):
        if name in fields and bytes(fields[name]) not in (b"1", b"null"):
            return True
    if "prompt" not in fields:
        return False
    prompt = bytes(fields["prompt"])
    return prompt.startswith(b"[") and not prompt[1:].lstrip()[:1].isdigit()


def _translated(text: bytes, want: Want) -> Sent:
    way = way_of(want.translate)
    try:
        sent = way.there(text)
        return fit(sent, way.rows, want.lacking, limit_as=want.limit_as) if want.lacking or want.limit_as else sent
    except NotSupported as error:
        if not want.apart:
            raise
        raise NotSupported(f"{error.message}{_APART}", hint=error.hint) from None


def light_text(pieces: list[bytes], size: int) -> bytes | None:
    """The body in one piece, or None for one that belongs into a worker."""
    if size > LARGE_BYTES or is_heavy(whole := b"".join(pieces)):
        return None
    return whole


def _with(text: bytes, inject: tuple[tuple[str, bytes], ...]) -> bytes:
    """A translated object, with fields put in that no translation makes."""
    members = b"".join(b"," + member(name, value) for name, value in inject)
    return text[:-1] + members + b"}" if members else text


def _with_model(text: bytes, served: str) -> bytes:
    fields, _ = read_object(text, "the translated body")
    return _encode({**fields, "model": Raw(_encode(served))})


def _ignored(draft: Draft, passed_over: tuple[Over, ...]) -> tuple[str, ...]:
    """The names of fields that ask for something this backend ignores. Raises NotSupported for a field that is
    refused."""
    found: list[str] = []
    fields = draft.fields
    for over in passed_over:
        if over.field not in fields:
            continue
        raw = fields[over.field]
        if over.inner:
            is_object = memoryview(raw)[0] == _BRACE
            raw = read_object(raw, f'"{over.field}"')[0].get(over.inner, _NULL) if is_object else _NULL
        if _asks_nothing(raw, over.idle):
            continue
        if over.refused:
            why = f'"{over.name}" cannot be said to this backend, which passes over it: {over.why}'
            raise NotSupported(why, hint="leave it out")
        found.append(over.name)
    return tuple(found)


def _asks_nothing(raw: Raw, idle: tuple[object, ...]) -> bool:
    if len(memoryview(raw)) > IDLE_BYTES:
        return False
    return bytes(raw) in IDLE if not idle else bytes(raw) == b"null" or _value(raw) in idle


def _told(names: list[str]) -> tuple[str, ...]:
    if len(names) <= MAX_SHOWN:
        return tuple(names)
    return (*names[:MAX_SHOWN], f"+{len(names) - MAX_SHOWN}")


# --- what Hive reads --------------------------------------------------------------------------------------------------


def _model(draft: Draft, alias: str, default: str) -> str:
    """The model's name; an empty one counts as none: servers then take what they like."""
    model = _name_of_model(draft, "model")
    if alias and alias in draft.fields:
        old = _name_of_model(draft, alias)
        draft.remove(alias)
        if old and not model:
            model = old
            draft.put("model", _encode(model))
    if model or not default:
        return model
    draft.put("model", _encode(default))
    return default


def _name_of_model(draft: Draft, name: str) -> str:
    raw = draft.fields.get(name)
    if raw is None:
        return ""
    model = read_text(raw, f'"{name}"')
    if len(model) > MAX_MODEL_NAME:
        raise BadRequest(f'"{name}" is longer than {MAX_MODEL_NAME} characters')
    return model


def _stream(draft: Draft, default: bool) -> bool:
    raw = draft.fields.get("stream")
    if raw is None or bytes(raw) == b"null":
        return default
    try:
        return _bool(raw)
    except msgspec.MsgspecError:
        raise BadRequest('"stream" must be true or false') from None


def _ask_usage(draft: Draft) -> bool:
    """Sets `stream_options.include_usage`; False where the client set it.

    `continuous_usage_stats` means nothing without it, so it is left out: with Hive's it would put a usage into every
    event, for a client that asked for none.
    """
    raw = draft.fields.get("stream_options")
    options = {} if raw is None or bytes(raw) == b"null" else read_object(raw, '"stream_options"')[0]
    if bytes(options.get("include_usage", b"false")) == b"true":
        return False
    options = {name: value for name, value in options.items() if name != "continuous_usage_stats"}
    draft.put("stream_options", _encode({**options, "include_usage": True}))
    return True


def _tokens(draft: Draft, rules: FieldRules, limit_absent: bool, limit_by_first_name: bool) -> int | None:
    """The limit of generated tokens, None for no limit; the tier's limit is put in if the body names none."""
    limit, first = rules.max_tokens, rules.tokens[0]
    if not rules.tokens_in and draft.fields.keys().isdisjoint(rules.tokens):
        if limit is None or not limit_absent:
            return None
        draft.add(first, _limit(first, limit))
        return limit
    inner, unchanged = (draft, b"") if not rules.tokens_in else _inner(draft, rules.tokens_in)
    asked = _asked_tokens(inner.fields, rules.tokens)
    if asked is None and (limit is None or not limit_absent):
        return None
    if limit is None and not limit_by_first_name:
        return asked
    asked = limit if asked is None else asked
    assert asked is not None
    if limit is not None and asked > limit:  # under another name than the one an operator bounded
        asked = limit
        for name in rules.tokens:
            raw = inner.fields.get(name)
            if raw is not None and bytes(raw) != b"null" and read_number(name, raw) > limit:
                inner.put(name, b"%d" % limit)
                draft.clamped.append(f"{name}={limit}")
        if inner is not draft:
            draft.put(rules.tokens_in, inner.text(unchanged))
    if bytes(inner.fields.get(first, b"null")) == b"null":
        inner.put(first, b"%d" % asked)  # under the one name that every server reads
        if inner is not draft:
            draft.put(rules.tokens_in, inner.text(unchanged))
    return asked


def _asked_tokens(fields: dict[str, Raw], names: tuple[str, ...]) -> int | None:
    """The largest limit these fields name, as servers differ in which one counts; a negative one is none."""
    given = [raw for name in names if (raw := fields.get(name)) is not None and bytes(raw) != b"null"]
    counts = [min(int(read_number("max_tokens", raw)), MOST_TOKENS) for raw in given]
    return max((count for count in counts if count >= 0), default=None)


@cache
def _limit(name: str, limit: int) -> bytes:
    return member(name, b"%d" % limit)


def _inner(draft: Draft, name: str) -> tuple[Draft, bytes]:
    """An object field as a draft of its own, and its text; an empty one where there is none."""
    raw = draft.fields.get(name)
    fields, text = ({}, b"{}") if raw is None or bytes(raw) == b"null" else read_object(raw, f'"{name}"')
    return Draft(fields, Fields(), ""), text
