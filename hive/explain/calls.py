"""Requests and who makes them: what is malformed, too large, not permitted, too much."""

from __future__ import annotations

from hive.explain.code_text import CodeText

CALLS: dict[str, CodeText] = {
    "bad_request": CodeText(
        "The request, or what an agent's description, an option or a file says, is not what is taken there. The"
        " message names the field and what was expected.",
        (
            "a field that is not known, of another type, or out of its range",
            "a body that is not JSON, or a request that is no proper HTTP",
            "a description of an agent with a program that is not there, or values that do not go together",
        ),
        (
            "change the field that the message names; `hive agent create --help` lists those of an agent, the API's own"
            " description is at `GET /api/openapi.json`",
            "check a file before it is used: `hive config check FILE`",
        ),
        "no, it is refused again",
    ),
    "unauthorized": CodeText(
        "No valid token came with the request.",
        (
            "no token was sent, or one of another Hive",
            "the token was revoked, has expired, or its agent was removed",
            "an agent has the token of before: every start that makes new tokens ends the old ones",
        ),
        (
            "an agent: send HIVE_TOKEN of its environment as `Authorization: Bearer TOKEN`, as `x-api-key`, or ask"
            " under `/a/TOKEN`",
            "the API or the runner on TCP: `hive token list` shows what holds; `hive token create NAME --role viewer`"
            " makes one",
            "a caller of an agent: send `X-Hive-Token`; `hive agent show NAME --tokens` prints the address with it",
        ),
        "no, not with the same token; after 20 such requests in a minute the peer gets `rate_limit_exceeded`",
    ),
    "forbidden": CodeText(
        "A rule of this Hive says no, and nobody has to have made a mistake: the caller may not have this.",
        (
            "an agent asks for what is for operators: loading models, the runner API, the server's own pages",
            "the model is not among those that the agent's tenant may use",
        ),
        (
            "do it as an operator: `hive model load MODEL`, `hive model pull NAME`, `hive capabilities`",
            "see which model a tenant is given, and why not another: `hive model route MODEL --tenant TENANT`",
            "let the tenant have it: `models` of `[tenant NAME]` in hive.conf",
        ),
        "no, not before somebody changed the rule",
    ),
    "not_permitted": CodeText(
        "This user, or this token, may not do that; a file may not be read or written by this user.",
        (
            "the user is not root, and not in the group `hive` (who steer agents) or `hive-admin` (who change Hive)",
            "the token's role is too small: a viewer's changes nothing",
            "a file belongs to somebody else, or a secret can be read by others",
        ),
        (
            "do it as root: type the same command with sudo in front",
            "let a user steer agents: `sudo usermod -aG hive USER`, then log in anew",
            "make a token that may: `hive token create NAME --role operator`",
            "see what is open or closed that should not be: `sudo hive doctor files`",
        ),
        "no, not as the same user",
    ),
    "method_not_allowed": CodeText(
        "There is such a target, and it does not take this method. `Allow` of the answer says which it takes.",
        ("GET where POST is meant, or the other way round", "OPTIONS, TRACE or CONNECT, which are not offered"),
        ("use one of the methods in the answer's `Allow`; `GET /api/openapi.json` lists all",),
        "no",
    ),
    "not_found": CodeText(
        "There is no such agent, job, lease, file or path: what was named is not there, or is somebody else's.",
        (
            "a name with a slip in it: the hint says which is near",
            "it was removed, released, or belongs to another Hive (`--state-dir`, HIVE_SOCKET)",
            "a path that the API or an agent's port does not have",
            "a program that is not there (`hive agent exec`: exit code 127)",
        ),
        (
            "look for its name: `hive agent list`, `hive job list`, `hive lease list`, `hive queue list`",
            "see which Hive was asked: `hive status`",
        ),
        "no, not before it is there",
    ),
    "previous_response_not_found": CodeText(
        "`previous_response_id` names a response that is not kept (any more): the conversation cannot go on from it.",
        (
            "responses are not kept here: `[proxy] responses_kept_mb` is 0",
            "it was made with `store: false`, by another agent, or it is too old or had to make room",
        ),
        (
            "send the whole conversation again, without `previous_response_id`",
            "keep more of them: `hive config set proxy.responses_kept_mb 256`; `hive agent responses NAME` shows what"
            " is kept",
        ),
        "no, not with that id",
    ),
    "target_too_long": CodeText(
        "The first line of the request, with path and query, is longer than Hive takes.",
        ("data in the query of a URL that belongs into the body",),
        ("send it as the body of a POST",),
        "no",
    ),
    "head_too_large": CodeText(
        "The head of the request is larger, or has more fields, than is taken.",
        ("large cookies, or a token that was put into many fields", "a proxy on the way that adds fields"),
        ("send fewer or shorter fields",),
        "no",
    ),
    "version_not_supported": CodeText(
        "The request is neither HTTP/1.1 nor HTTP/1.0.",
        ("a client that begins with HTTP/2 without being asked", "something else than HTTP was sent to this port"),
        ("let the client, or the reverse proxy in front, speak HTTP/1.1 to Hive",),
        "no",
    ),
    "length_required": CodeText(
        "A request to a runner of Hive's came without Content-Length.",
        ("the runner's own socket was asked with a chunked body: through Hive that does not happen",),
        ("ask through Hive, or send Content-Length",),
        "no",
        statuses=(411,),
    ),
    "request_timeout": CodeText(
        "The request did not arrive in time, or its client did not read the answer for too long while others waited.",
        (
            "a slow or broken connection: after 10 s 16 KiB a second must have come",
            "a client that opened a connection and sent nothing, or stopped reading its stream",
        ),
        (
            "send it again over a new connection",
            "the times are `head_s`, `body_idle_s` and `between_bytes_s` of `[proxy]`: `hive config show` lists them",
        ),
        "yes, at once",
    ),
    "too_large": CodeText(
        "A body, a field, a file or a result is larger than is taken.",
        (
            "a prompt with much in it: `[proxy] body_max_bytes`",
            "an upload: `[proxy] upload_max_mb`; a sound longer than `audio_max_s`; one above `[adapters] max_mb`",
            "a job that says more than `[jobs] output_max_mb`; an SQL query that needs much memory",
        ),
        (
            "send less, or in parts: the message says how much is taken, and which setting says so",
            "take more at once, also under `hive up`: `hive config runtime proxy.body_max_bytes=67108864`",
            "or in hive.conf: `hive config set proxy.body_max_bytes 67108864`; `hive config show --origin` shows the"
            " limit and where it is set",
        ),
        "no, not with the same",
    ),
    "unsupported_media_type": CodeText(
        "The body is of a kind or a coding that this target does not take.",
        ("Content-Encoding: gzip or the like", "JSON where a form with a file is expected, or the other way round"),
        ("send plain JSON, or multipart/form-data where a file is uploaded",),
        "no",
    ),
    "expectation_failed": CodeText(
        "The request expects something else than `100-continue`.",
        ("an unusual client or proxy",),
        ("leave the field `Expect` out",),
        "no",
    ),
    "grammar_too_complex": CodeText(
        "A JSON schema, a pattern or the tools of the request would hold up the inference server for everybody, or lead"
        " nowhere. The message says where in the body, and what is too much.",
        (
            "a schema that is nested or branches too much, a pattern with large repetitions",
            "hundreds of tools, or tools with very long descriptions",
            "a `$ref` to nothing, or out of the schema",
        ),
        (
            "simplify the schema at the pointer that the message names, or send fewer tools",
            "see how much is taken: the sections `[grammar_llama]`, `[grammar_vllm]` and so on in `hive config show`",
        ),
        "no, not with that schema",
    ),
    "rate_limit_exceeded": CodeText(
        "More was asked than may be in this time: by this agent, its tenant, its callers, or from this address.",
        (
            "the agent made more than `[proxy] window_requests` requests in `window_s`, or its tenant more than its"
            " `rate_limit`",
            "callers woke agents of a tenant too often",
            "a client on TCP sends a token that is not valid, again and again",
            "the model's server crashed again and again at requests of this agent",
            "a remote inference server said so itself",
        ),
        (
            "wait for `Retry-After`; SDKs do that by themselves",
            "see who asks how much: `hive top`, `hive usage`; change the limit: `hive config runtime`, or"
            " `rate_limit` of `[tenant NAME]`",
        ),
        "yes, after `Retry-After`",
    ),
    "budget_exceeded": CodeText(
        "The tokens that this agent or its tenant may use in this day or month are spent.",
        ("much was used: `[budget]` for the agent's tier, the agent's own limits, or those of `[tenant NAME]`",),
        (
            "see what is left and when it begins anew: `hive usage --budgets`",
            "give it more: `hive agent edit NAME`, or `hive config runtime`",
        ),
        "yes, but not before the next day or month of `[budget] zone`: `Retry-After` has the seconds",
    ),
    "cloud_not_permitted": CodeText(
        "The model is served by a backend beyond this box, and this request may not leave it.",
        (
            "`[inference] cloud`, the tenant's or the agent's own word says no",
            "the request, or its task, is marked as local only",
        ),
        (
            "use a model of this box: `hive model list`; see why not another: `hive model route MODEL --tenant TENANT`",
            "permit it: `hive config runtime`, `hive agent edit NAME` (docs/cloud.md)",
        ),
        "no, not before an operator permits it",
    ),
    "cancelled": CodeText(
        "An operator, the client or an end of Hive ended it before it was done.",
        (
            "`hive queue cancel`, `hive job cancel`, or the same over the API",
            "the client left before the answer, or the daemon was stopped",
        ),
        ("see who it was: `hive audit list --since 1h`", "ask again, if it is still wanted"),
        "yes, if it was not meant",
    ),
    "not_supported": CodeText(
        "What was asked for exists, and cannot be done by the backend, the runtime or the host that is in use here.",
        (
            "the inference server has no such endpoint: embeddings, sound, images, slots, sleep",
            "loading or unloading is not to be ordered at this kind of server",
            "the agent's runtime cannot do it, or a kernel or program is too old for it",
        ),
        (
            "see what this Hive can: `hive capabilities`, `hive backend status`",
            "use another backend or model: `hive backend list`, `hive model list`",
            "see what the host lacks: `hive doctor`",
        ),
        "no, not with this backend",
    ),
    "saturated": CodeText(
        "Hive has no room for this now, and says so at once instead of queueing without an end. It may also be that it"
        " has just started, or is ending.",
        (
            "the request waited `[proxy] queue_wait_s` for its turn and none came",
            "too many connections, or too much in request bodies and uploads at once, of this agent or of all",
            "no inference server is active, or a cluster is away",
            "too many messages, schedules or jobs wait already; swap or uids are used up",
        ),
        (
            "see who waits for what: `hive queue`, `hive top`",
            "see whether the backend is up: `hive status`, `hive backend status`",
            "an agent that sends too much at once: lower its concurrency, or the tier in `hive agent edit NAME`",
        ),
        "yes, after `Retry-After`",
    ),
    "queue_full": CodeText(
        "As many requests of this tenant wait for the model as may wait, `[proxy] queue_depth`.",
        (
            "more is asked than the model answers: one agent floods, or all are busy",
            "the backend is slow, stuck or still loading",
        ),
        (
            "see whose they are: `hive queue`, `hive top`; end some: `hive queue cancel ID`",
            "see whether the backend gets on: `hive backend status`",
            "let more wait: `hive config runtime proxy.queue_depth=128`",
        ),
        "yes, after `Retry-After`; the answer also tells `queueDepth` and `avgWaitMs`",
    ),
    "not_awake": CodeText(
        "The agent sleeps, or is stopped, and could not be woken in the time that its caller waits.",
        (
            "many agents wake at once, or its memory is read back from a slow swap",
            "it has ended with an error: its script failed, or could not be started",
            "it is stopped, removed, or an operator holds it asleep",
            "`[proxy] gate_wait_s` is short for an agent that sleeps deep",
        ),
        (
            "see its state: `hive agent show NAME`; wake it: `hive agent resume NAME`; start one that is stopped: `hive"
            " agent start NAME`",
            "one that has failed: `hive agent logs NAME`, mend what it says, then `hive agent start NAME`",
            "wait longer: `hive config runtime proxy.gate_wait_s=15`",
        ),
        "yes, after `Retry-After`; not for one that is stopped or has failed",
    ),
    "agent_failed": CodeText(
        "The agent ended with an error and is at rest: nobody wakes it, and its callers get `not_awake`.",
        (
            "its script failed: a package that is missing, a file that its user may not read, a mistake in it",
            "it used more memory than it may: `exited with 137`",
            "its command cannot be started at all",
        ),
        (
            "read its last words: `hive agent logs NAME`",
            "see how it ended: `hive agent show NAME`; all that did: `hive ps --state error`",
            "start it once that is mended: `hive agent start NAME`; or remove it: `hive agent remove NAME`",
        ),
        "no, not before what its log says is mended",
        told_in="`hive agent create`, `hive agent start` and `hive status`",
    ),
    "agent_unavailable": CodeText(
        "The agent runs, and its own port does not answer as HTTP does.",
        (
            "nothing listens at its port: its program listens at another one, at none, or has not begun to listen yet",
            "it broke off, or did not open a WebSocket",
        ),
        (
            "look at what it says: `hive agent logs NAME`",
            "see which port is expected: `hive agent show NAME`, or `HIVE_AGENT_PORT` inside; change it: `hive"
            " agent edit NAME`",
        ),
        "yes, once; then look at its log",
    ),
    "agent_timeout": CodeText(
        "The agent took the request and did not answer in time.",
        ("it waits for the model or a tool", "it hangs"),
        (
            "look at what it does: `hive agent logs NAME`, `hive agent show NAME`",
            "start it anew: `hive agent restart NAME`",
        ),
        "yes, if the request may be done twice",
    ),
}
