"""The matrix: each client package before each kind of backend, and whether it hears the same.

Every step of the conversation is asked through Hive by each package, and once of the backend itself in its own
dialect. What is heard is compared field by field; ALLOWED says what may differ. Every other difference has a reason in
GAPS (test_any_client.py), or the test fails; a gap that is none any more fails it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.journeys.conversation import (
    LENGTH,
    SYSTEM,
    ByAnthropic,
    ByOllama,
    ByOpenai,
    Client,
    Heard,
    NotSaidHere,
    Turn,
    heard_or_refused,
)
from tests.journeys.sdk import Door, door_of
from tests.journeys.stack import Stack, until

DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
TOO_LONG = "word " * 60_000
ALLOWED = {
    "reason": "each dialect has its own words for why an answer ended: `stop`, `end_turn`, `stop_sequence`; `length`, "
    "`max_tokens`; `tool_calls`, `tool_use`, for which Ollama and vLLM may say `stop`",
    "tokens": "Anthropic's `input_tokens` leave out what a cache had: they are compared with it added",
    "calls": "arguments are text in OpenAI's dialect and an object in the others: the objects are compared",
    "vectors": "the `openai` package asks for them in 32 bits: they are compared to five places",
    "error": "the status and the words are compared, not the form; of an unknown model the status, as Hive refuses it",
    "streamed": "that text came in more than one piece, not how it was cut: a busy vLLM puts several tokens into one",
    "ids, times and durations": "are never compared; Ollama's last line has a `total_duration`",
}
"""Differences that two answers may have, by the field of Heard."""
MAIN, THINKING, REPLAYED = "main", "thinking", "replayed"
"""Answerers of a step: the backend, another of its kind whose model thinks, or a stand-in (tests/fakes/shapes.py)."""


class Step(NamedTuple):
    """One row. `turn`: asked as it is and, with `both`, as a stream too."""

    name: str
    turn: Turn = Turn()
    both: bool = False
    site: str = MAIN
    special: str = ""
    """embed, models, count, generate, leave or unknown."""


STEPS = [
    Step("a chat", both=True),
    Step("a system prompt", Turn(system=SYSTEM)),
    Step("a prompt (`/api/generate`)", Turn(system=SYSTEM), both=True, special="generate"),
    Step("a stop sequence", Turn(stop="of the chat"), both=True),
    Step("a tool offered", Turn(tool="offered")),
    Step("a tool's result", Turn(tool="answered"), both=True),
    Step("a tool forced by its name", Turn(tool="forced", length=100), both=True),
    Step("JSON without a schema", Turn(format="json", length=60)),
    Step("JSON by a schema", Turn(format="schema", length=60), both=True),
    Step("a picture", Turn(picture=True)),
    Step("embeddings", special="embed"),
    Step("list of models", special="models"),
    Step("tokens counted beforehand", special="count"),
    Step("an unknown model", Turn(model="gpt-9"), special="unknown"),
    Step("a prompt that is too long", Turn(words=TOO_LONG), both=True),
    Step("leaving a stream frees the backend", special="leave"),
    Step("thinking", Turn(think=True), both=True, site=THINKING),
    Step("thinking switched off", Turn(think=False), site=THINKING),
    Step("a tool called", Turn(tool="offered"), both=True, site=REPLAYED),
]


class Backend(NamedTuple):
    """One kind of backend under one Hive. `sites`: URL by site; a site that is missing is the main one's.

    `own`: the package that speaks the backend's own dialect, asked directly. `idle`: whether it has nothing to do.
    `apart`: whether tenants are kept apart by translating Anthropic's dialect too.
    """

    name: str
    hive: Stack
    sites: dict[str, str]
    own: type[Client]
    model: str
    idle: Callable[[], bool] = lambda: True
    ways: tuple[str, str, str] = ("relayed", "translated", "relayed")
    apart: bool = False


BAD_ANSWER = 502

Cells = dict[tuple[str, str], str]
"""Row and column: what was seen, as "same", "–" with a reason or a difference."""


class Matrix:
    """Goes through all steps with all clients; `cells` is what was seen."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.columns: list[str] = []
        self.rows = [row for step in STEPS for row in _rows(step)]
        self.cells: Cells = {}
        self.stop = ""
        self.expected: dict[str, Heard] = {}

    def run(self) -> None:
        """All columns site by site; then, where tenants are kept apart by it, Anthropic's in translation."""
        hive, backend = self.backend.hive, self.backend
        clients = list(zip((ByOpenai, ByOllama, ByAnthropic), backend.ways, strict=True))
        sites = list(dict.fromkeys(backend.sites.values()))
        for url in sites:
            turn_to(hive, url)
            self._ask_directly(url)
            for package, way in clients:
                with package(door_of(hive, "alice")) as client:
                    self._column(f"{client.name}, {way}", client, url)
        if backend.apart:
            hive.post("/api/agents", {"name": "other", "runtime": "external", "tier": "high", "tenant": "other"})
            for url in reversed(sites):
                turn_to(hive, url)
                with ByAnthropic(door_of(hive, "other")) as client:
                    self._column("anthropic, translated", client, url)
                    assert is_translated(client, backend.model), "tenants are not kept apart by a translation"
            hive.client().delete("/api/agents/other")

    def _steps(self, url: str) -> Iterator[tuple[str, Step, Turn]]:
        for step in STEPS:
            if self.backend.sites.get(step.site, self.backend.sites[MAIN]) == url:
                for row in _rows(step):
                    yield row, step, self._filled(step.turn, row)

    def _filled(self, turn: Turn, row: str) -> Turn:
        stop = self.stop if turn.stop else ""
        return turn._replace(model=turn.model or self.backend.model, stop=stop, stream=row.endswith(STREAMED))

    def _ask_directly(self, url: str) -> None:
        """The answer of the backend itself in its own dialect."""
        with self.backend.own(Door(url, "none")) as client, ByOpenai(client.door) as by_openai:
            self._expect(client, by_openai, url)

    def _expect(self, client: Client, by_openai: Client, url: str) -> None:
        if not self.stop:
            self.stop = client.say(Turn(model=self.backend.model)).text[5:8].strip()
        for row, step, turn in self._steps(url):
            if step.special == "unknown":
                self.expected[row] = Heard(error=(404, ""))
            elif step.special == "models":
                self.expected[row] = Heard(text=self.backend.model)
            elif step.special == "leave":
                self.expected[row] = Heard(text="left")
            elif step.special == "count":
                plain = client.say(Turn(model=self.backend.model))
                self.expected[row] = Heard(tokens=(plain.tokens[0], None))
            elif step.special == "generate":  # a chat of one turn
                self.expected[row] = client.say(turn)
            else:
                try:
                    self.expected[row] = self._say(client, step, turn)
                except NotSaidHere:  # all of them speak OpenAI's, too
                    self.expected[row] = self._say(by_openai, step, turn)

    def _say(self, client: Client, step: Step, turn: Turn) -> Heard:
        """Raises NotSaidHere."""
        if step.special in ("embed", "count", "leave"):
            return heard_or_refused(lambda: getattr(client, step.special)(turn.model))
        if step.special == "generate":
            return heard_or_refused(lambda: client.generate(turn))
        if step.special == "models":
            return client.models()
        return heard_or_refused(lambda: client.say(turn))

    def _column(self, column: str, client: Client, url: str) -> None:
        if column not in self.columns:
            self.columns.append(column)
        for row, step, turn in self._steps(url):
            try:
                got = self._say(client, step, turn)
            except NotSaidHere as missing:
                self.cells[row, column] = f"–{missing}"
                continue
            if step.special == "leave":
                self._wait_until_idle()
            self.cells[row, column] = compared(self.expected[row], got, stream=turn.stream)

    def _wait_until_idle(self) -> None:
        hive, agents = self.backend.hive, self.backend.hive.get("/api/agents")["agents"]
        names = [agent["name"] for agent in agents]
        until(
            lambda: self.backend.idle() and not any(hive.get(f"/api/agents/{name}")["in_flight"] for name in names),
            within_s=5,
            what="a backend with nothing to do",
        )


STREAMED = ", streamed"


def is_translated(client: ByAnthropic, model: str) -> bool:
    """Whether the id of a message is made by Hive: llama-server and vLLM give Anthropic's the ids of OpenAI's."""
    return client.message_id(model).startswith("msg_")


def _rows(step: Step) -> list[str]:
    return [step.name, step.name + STREAMED] if step.both else [step.name]


def compared(expected: Heard, got: Heard, *, stream: bool) -> str:
    """ "same", "refused alike", or which fields differ and how.

    A stream that turns bad is a 502 where its first read holds the fault already, else an error within the stream.
    Which one is up to the server's timing, and the package raises either.
    """
    if stream and got.error[0] == BAD_ANSWER:
        got = got._replace(error=(0, got.error[1]))
    if not expected.error[1] and expected.error[0] == got.error[0] != 0:
        return "refused"  # by Hive itself, in its own words
    if got.error[0] and got.error[0] != expected.error[0]:
        refused = f"refused with {got.error[0]}" if got.error[0] > 0 else "refused by the package"
        refused += f" instead of {expected.error[0]}" if expected.error[0] else ""
        return f"{refused}: {got.error[1]}"
    if (expected.tokens[1] or 0) < LENGTH:  # a busy vLLM may put a few tokens into one event
        got = got._replace(streamed=expected.streamed)
    wrong = [
        f"{name}: {_short(theirs)} is {_short(ours)}"
        for name, theirs, ours in zip(Heard._fields, expected, got, strict=True)
        if theirs != ours
    ]
    if wrong:
        return "; ".join(wrong)
    return "refused" if expected.error[0] else "same"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "…"


def turn_to(hive: Stack, url: str) -> None:
    """The backend at `url` is in use."""
    if hive.get("/api/system/inference")["address"] in url:
        return
    job = hive.post("/api/system/inference", {"backend": url})["id"]

    def ended() -> Any:
        found = next(one for one in hive.get("/api/jobs")["jobs"] if one["id"] == job)
        assert found["state"] != "failed", found
        return found["state"] == "done"

    until(ended, within_s=60, what=f"{url} in use")


# --- the table --------------------------------------------------------------------------------------------------------


class Varies(str):
    """The reason of a difference that depends on what a random model writes: now it is there, now it is not."""

    __slots__ = ()


def unexplained(matrix: Matrix, gaps: dict[tuple[str, str], str]) -> list[str]:
    """Differences without a gap, and gaps without a difference."""
    found = []
    for (row, column), seen in matrix.cells.items():
        is_fine = seen in ("same", "refused") or seen.startswith("–")
        if is_fine is ((row, column) in gaps) and not isinstance(gaps.get((row, column)), Varies):
            found.append(f"{row} by {column}: {seen}")
    return found + [f"no such cell: {cell}" for cell in gaps if cell not in matrix.cells]


def table(matrix: Matrix, gaps: dict[tuple[str, str], str], notes: dict[str, str]) -> str:
    """Markdown. `notes`: by row, said of all its cells."""
    numbers: dict[str, int] = {}

    def note(why: str) -> str:
        return f" [{numbers.setdefault(why, len(numbers) + 1)}]" if why else ""

    lines = [f"| | {' | '.join(matrix.columns)} |\n", "|---" * (len(matrix.columns) + 1) + "|\n"]
    for row in matrix.rows:
        base = row.removesuffix(STREAMED)
        cells = []
        for column in matrix.columns:
            seen = matrix.cells[row, column]
            if seen.startswith("–"):
                cells.append("–" + note(seen[1:]))
            else:
                known = gaps.get((row, column), "")
                cells.append(_shown(seen, known) + note(known))
        lines.append(f"| {row}{note(notes.get(base, ''))} | {' | '.join(cells)} |\n")
    return "".join(lines) + "\n" + "".join(f"{number}. {why}\n" for why, number in numbers.items())


def _shown(seen: str, known: str) -> str:
    if isinstance(known, Varies):
        return "varies"
    if seen.startswith("refused"):
        return seen.partition(":")[0]
    return "otherwise" if known else seen


def may_differ() -> str:
    """ALLOWED as the document has it."""
    return "| field | |\n|---|---|\n" + "".join(f"| {field} | {why} |\n" for field, why in ALLOWED.items())


def section_of(text: str, name: str) -> str:
    """The document's words on one backend."""
    return text.partition(_begin(name))[2].partition(_end(name))[0]


def with_section(text: str, name: str, body: str) -> str:
    before, _, rest = text.partition(_begin(name))
    return before + _begin(name) + body + _end(name) + rest.partition(_end(name))[2]


def _begin(name: str) -> str:
    return f"<!-- {name}: written by tests/journeys/test_any_client.py -->\n"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->\n"
