"""Hive's own runners of sound and images, and the ends of jobs."""

from __future__ import annotations

from hive.explain.code_text import CodeText

_OF_JOBS = "the job's `error.code` and `reason`: `hive job show JOB`"
_ASKED = "once, as a new job"
_READ = "read what was said and called: `hive job logs JOB`, `hive job result JOB`"

ENGINES: dict[str, CodeText] = {
    "invalid_audio": CodeText(
        "The uploaded file is no sound that can be heard.",
        (
            "another kind of file, or a damaged one",
            "a video without sound",
            "a rate below 1,000 or above 768,000 a second",
        ),
        ("make a plain file of it: `ffmpeg -i FILE -ac 1 -ar 16000 out.wav`", "which forms are taken: docs/audio.md"),
        "no, not with that file",
        statuses=(400,),
    ),
    "invalid_input": CodeText(
        "A value for a workflow's input is not one that its file permits. `param` names the input.",
        ("out of its range, of another type, or none of its choices",),
        (
            "see what the workflow takes: `hive model show MODEL`",
            "the rules are in the NAME.json of the workflow (docs/comfyui.md)",
        ),
        "no, not with that value",
        statuses=(400,),
    ),
    "out_of_memory": CodeText(
        "The engine had no memory left for this request.",
        (
            "a large image, many images at once, or a long sound",
            "the pool's estimate was too small: it remembers, and charges more the next time",
            "another program took memory of the GPU",
        ),
        (
            "ask for less: a smaller size, fewer images",
            "see who has the memory: `hive pool`, `nvidia-smi`",
        ),
        "yes, after some seconds: the server is loaded again, with more",
        statuses=(503,),
    ),
    "engine_failed": CodeText(
        "The engine of a runner raised an error that is not the caller's fault.",
        ("a fault in the engine or its driver", "a model whose files do not go together"),
        ("read the server's log: `hive model logs MODEL`",),
        "once",
        statuses=(500,),
    ),
    "comfyui_unreachable": CodeText(
        "No ComfyUI answers at `[comfyui] url`, or it fell silent.",
        ("it does not run, is starting, or hangs", "the address is another one"),
        ("look at it: `hive doctor comfyui`", "see which address is asked: `hive config show --origin`"),
        "yes, once it answers",
        statuses=(502,),
    ),
    "comfyui_restarted": CodeText(
        "ComfyUI ended or was restarted while it worked on this: what it had in memory is gone.",
        ("it crashed, often for want of memory", "somebody restarted it"),
        ("see its log, and `hive doctor comfyui`",),
        "yes",
        statuses=(502,),
    ),
    "comfyui_interrupted": CodeText(
        "Somebody interrupted the work in ComfyUI itself.",
        ("its own page, or another program that uses it",),
        ("agree on who uses that ComfyUI; Hive interrupts only what is its own",),
        "yes, if it was not meant",
        statuses=(502,),
    ),
    "comfyui_failed": CodeText(
        "A node of the workflow failed in ComfyUI, or its image could not be fetched. The message names the node.",
        ("values that the node does not take", "a custom node with a fault"),
        ("try the same workflow in ComfyUI's own page", "look at it: `hive doctor comfyui`"),
        "once",
        statuses=(502,),
    ),
    "workflow_refused": CodeText(
        "ComfyUI does not take the workflow: a node or a checkpoint that it names is not there.",
        ("a custom node is not installed", "a checkpoint, LoRA or VAE is not in ComfyUI's directories"),
        ("look what is missing: `hive doctor comfyui`", "open the workflow in ComfyUI's own page, which marks it red"),
        "no, not before it is there",
        statuses=(502,),
    ),
    "no_image": CodeText(
        "The workflow ran to its end and made no image.",
        ("it does not end in PreviewImage or SaveImage",),
        ("let it end in one of them, and save it anew as NAME.json (docs/comfyui.md)",),
        "no",
        statuses=(502,),
    ),
    "server_error": CodeText(
        "OpenAI's word, in a response that failed: something on this side went wrong. The message says what.",
        ("the inference server failed or broke off", "Hive was restarted while the response was made"),
        ("read the message of the same error, and `hive events`", "see how the backend is: `hive backend status`"),
        "yes, as a new request",
        told_in="`error.code` of a response whose `status` is `failed`",
    ),
    "worker_restarted": CodeText(
        "Hive, its process of jobs or the model's server was restarted while the job ran. Nothing is done twice.",
        ("a restart, an upgrade or a crash", "a server that stood still and was ended"),
        ("see what is kept of its answer: `hive job result JOB`", "begin it again, if its calls may be made twice"),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "malformed_tool_call": CodeText(
        "The model called no tool as it is to be called, twice in a row.",
        ("a small model, or one without tool calls", "a template of the server that does not fit the model"),
        (
            "have it speak JSON that is held to a schema: `hive job run NAME --tool-form schema --model MODEL`",
            _READ,
            "take another model: `hive model list`",
        ),
        "no, not as it is",
        told_in=_OF_JOBS,
    ),
    "repeated_tool_call": CodeText(
        "The model made the same calls five times in a row, and had been warned.",
        ("a tool whose result does not tell the model what it wants to know", "a small model"),
        (_READ, "let the tool say more, above all why it fails", "take another model: `hive model list`"),
        "no, not as it is",
        told_in=_OF_JOBS,
    ),
    "tool_iterations_exhausted": CodeText(
        "The job used up the turns with calls that it may have. What it had said is kept.",
        ("a task that is too large for one job", "tools that give too little at a time"),
        (
            _READ,
            "give it more turns, or a smaller task: `hive job run NAME --iterations 16 --model MODEL`, and `[jobs]"
            " max_tool_iterations` of hive.conf",
        ),
        "with more turns",
        told_in=_OF_JOBS,
    ),
    "repeated_line_loop": CodeText(
        "The model repeated the same line again and again, and was stopped.",
        ("a small or a heavily quantized model", "a temperature of 0, or a prompt that is cut off"),
        (_READ, "take another model or variant: `hive model list`"),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "server_died": CodeText(
        "The server of the model ended while it worked on this.",
        ("no memory was left", "a fault of the server"),
        ("read its last lines: `hive model logs MODEL`, `hive backend logs`",),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "stall_timeout": CodeText(
        "No data came for too long in the middle of an answer.",
        ("the server hangs, or is much too slow for this prompt",),
        ("see whether it gets on: `hive backend status`, `hive top`",),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "connect_failed": CodeText(
        "The server, or Hive's proxy before it, took no connection.",
        ("it does not run, or is being started",),
        ("see how it is: `hive status`, `hive backend status`",),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "headers_timeout": CodeText(
        "No head of an answer came in time.",
        ("a very long prompt is being read", "the server is busy with others"),
        ("see who else is served: `hive queue`", "a shorter prompt, or a faster model"),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "ttft_timeout": CodeText(
        "The answer began, and its first token did not come in time.",
        ("a very long prompt is being read", "the server hangs"),
        ("see whether it gets on: `hive backend status`, `hive top`",),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "absolute_timeout": CodeText(
        "The whole request took longer than it may.",
        ("a long answer, or tools that take long",),
        (_READ, "make the task smaller"),
        _ASKED,
        told_in=_OF_JOBS,
    ),
    "backend_error": CodeText(
        "The inference server answered a job's request with an error. Its own words, and its own code where it has one,"
        " are told with it.",
        (
            "the conversation has grown beyond the model's context",
            "a parameter of the job that the server does not take",
        ),
        (_READ, "smaller results of tools, or a model with a larger context: `hive model list`"),
        "no, not as it is",
        told_in=_OF_JOBS,
    ),
    "dialogue_failed": CodeText(
        "The code that decides about the turns of a request raised an error.",
        ("a callable that was given to the worker library failed",),
        ("read the detail of the same error: it names the exception",),
        "no, not as it is",
        told_in=_OF_JOBS,
    ),
}
