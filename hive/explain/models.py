"""Models, the servers behind Hive, adapters, and memory for both."""

from __future__ import annotations

from hive.explain.code_text import CodeText

MODELS: dict[str, CodeText] = {
    "model_not_found": CodeText(
        "There is no model of that name here, or none that may be loaded under it.",
        (
            "a slip in the name, or a variant that is not here",
            "a name of its vendor's that is written into the program",
            "its description or its files were taken away",
        ),
        (
            "see what there is: `hive model list`, `hive pool`; the message names what is near",
            "let an agent ask for what `HIVE_MODEL` of its environment names: `hive agent create NAME --model MODEL`"
            " sets it",
            "bring it: `hive model pull NAME`; then `hive model refresh`",
        ),
        "no, not before it is there",
    ),
    "model_busy": CodeText(
        "The model is being loaded or unloaded, is pinned, or answers requests, so this order cannot be taken now.",
        (
            "somebody else ordered the same at the same moment",
            "it is pinned, or requests are still at it",
            "of one adapter there is one job at a time",
        ),
        (
            "see what it is doing: `hive pool explain MODEL`, `hive job list`",
            "end its pin: `hive model unpin MODEL`; unload it all the same: `hive model unload MODEL --force`",
        ),
        "yes, in some seconds; not of a pinned one",
    ),
    "model_cold": CodeText(
        "The model is not loaded, and loading it would take longer than this request may wait, or cannot begin: Hive"
        " says so at once instead of letting it wait in vain.",
        (
            "the memory is held by pinned models, or by leases without an end",
            "the model failed to load and rests before the next try",
            "the load takes longer than `[proxy] queue_wait_s` or the task's time",
        ),
        (
            "see what is in the way and how long it would take: `hive pool explain MODEL`",
            "load it beforehand: `hive model load MODEL`; keep it: `hive model pin MODEL`",
            "see what its server said last: `hive model logs MODEL`",
        ),
        "yes, after `Retry-After`; the request has its load begun where that can help",
    ),
    "model_not_approved": CodeText(
        "On this box models are loaded only by signed order, and there is none of this model, or its files are not"
        " those that were signed for.",
        (
            "nobody has signed its load yet, or the order was taken back",
            "the files were changed since",
            "somebody else loaded it at the inference server, past Hive",
        ),
        (
            "see what was ordered: `hive model deployed`",
            "have it signed: `hive op request model-load modelId=MODEL`, then `hive op sign model-load.op --key KEY`,"
            " then `hive op submit model-load.op` (docs/registry.md)",
        ),
        "no, not before it is ordered",
    ),
    "insufficient_memory": CodeText(
        "The model does not fit: into the memory that the order named, or beside what stays. `neededMB` and `freeMB` of"
        " the answer are the figures.",
        (
            "`gpuMemoryBudgetMB` is less than the model takes",
            "pinned models, leases or programs that are not Hive's hold the memory",
        ),
        (
            "see who has it: `hive pool`, `hive pool explain MODEL`, `nvidia-smi`",
            "make room: `hive model unpin MODEL`, `hive lease end LEASE`; or take another quantization or a smaller"
            " context",
        ),
        "no, not before memory is free",
    ),
    "backend_unavailable": CodeText(
        "The inference server cannot be reached, or answers with something that is none of its answers.",
        (
            "it is not started, has ended, or is starting",
            "its address is another one, or a firewall is between",
            "it ended in the middle of this request, before the answer had begun",
        ),
        (
            "see how it is: `hive backend status`, `hive doctor backend`",
            "see what it said last: `hive backend logs`, or `hive model logs MODEL` for one of the pool",
            "take another one: `hive backend list`, `hive backend switch NAME`",
        ),
        "yes, after some seconds",
    ),
    "backend_failed": CodeText(
        "The inference server answered with an error of its own, 500 or above. Its words are in the message.",
        (
            "a fault in the server, often out of memory or a broken model file",
            "a reverse proxy in front of it, with an error page",
        ),
        (
            "read the server's own log: `hive backend logs`, `hive model logs MODEL`",
            "try the request at another model: `hive model list`",
        ),
        "yes, once",
    ),
    "backend_refused": CodeText(
        "The inference server refused the request, in a form of no dialect. Its status and its words are passed on.",
        (
            "a field or a value that this server does not take",
            "a prompt longer than the model's context",
            "something in front of the server asks for a key",
        ),
        (
            "change what the message names; `hive backend status` says which fields beside OpenAI's it takes",
            "see which limit answers first: docs/limits.md",
        ),
        "no",
    ),
    "backend_timeout": CodeText(
        "The inference server took the request and was silent for too long, or an order to it did not end in time.",
        (
            "a long prompt is being read: `[proxy] first_byte_s`",
            "it hangs, or is blocked on its GPU: `between_bytes_s` inside an answer",
            "a load, an unload or a switch takes longer than it may",
        ),
        (
            "see whether it gets on: `hive top`, `hive backend status`",
            "read its log: `hive backend logs`",
            "give it longer: `hive config set proxy.first_byte_s 900`, then restart the services",
        ),
        "yes, if the request may be done twice; the work may have been done",
    ),
    "stream_incomplete": CodeText(
        "The answer had begun, and the inference server broke it off or gave up: what came is a part, not the whole.",
        (
            "the server ended or was killed, often for want of memory",
            "a rank or node of a cluster was lost",
            "something between closed the connection",
        ),
        (
            "do not take what came for the whole answer",
            "see why the server ended: `hive backend logs`, `hive model logs MODEL`, `hive events`",
        ),
        "yes, from the beginning",
    ),
    "backend_switching": CodeText(
        "The inference server is being exchanged for another one, and this request cannot wait for the end of that.",
        ("`hive backend switch` is under way", "a start or a rollback of it takes long"),
        ("see how far it is: `hive backend status`, `hive job list`",),
        "yes, after `Retry-After`",
    ),
    "adapter_not_found": CodeText(
        "There is no adapter of that name or digest here.",
        ("a slip in the name", "it was removed, or another build of it is installed"),
        (
            "see what there is: `hive adapter list`",
            "install it: `hive adapter pull PATH --base MODEL`",
        ),
        "no",
    ),
    "adapter_not_loaded": CodeText(
        "The adapter is installed and not loaded: requests do not load adapters, operators do.",
        ("nobody loaded it since Hive, or its model's server, was started", "its load failed"),
        ("load it: `hive adapter load NAME`", "see why it is not: `hive adapter show NAME`"),
        "no, not before it is loaded",
    ),
    "adapter_unsafe": CodeText(
        "The files are not what an adapter may be made of, and nothing of them was taken.",
        (
            "weights as a pickle, which is a program",
            "links, files beside the weights, or more than one *.gguf",
            "a file that was cut off, or is no GGUF or safetensors at all",
            "a signature that leaves files out",
        ),
        (
            "save it again with PEFT's `save_pretrained`, which writes safetensors",
            "copy it anew, and name one *.gguf file or one directory: `hive adapter pull PATH --base MODEL`",
        ),
        "no, not with the same files",
    ),
    "adapter_mismatch": CodeText(
        "The files are an adapter, and not one for that model, that server or the limits here.",
        (
            "it was trained on another model or architecture",
            "GGUF at a server that takes safetensors, or the other way round",
            "DoRA, changed biases or a rank above `[adapters] max_rank`",
        ),
        (
            "name the model it was made for, as `hive model list` shows it: `hive adapter pull PATH --base MODEL`",
            "make the other format: llama.cpp's convert_lora_to_gguf.py",
            "see what it is: `hive adapter show NAME`; the rules: docs/adapters.md",
        ),
        "no",
    ),
    "signature_unverifiable": CodeText(
        "No key that is trusted here has signed the adapter, and `[adapters] signatures` asks for one.",
        (
            "it is not signed at all",
            "its key is not trusted here, is not trusted any more, or was revoked",
            "the signature is of a kind that is not read here",
        ),
        (
            "see which keys are trusted: `hive adapter keys`; whose it is: `hive adapter verify PATH`",
            "trust a key, as root: `sudo hive adapter trust FILE`",
            "sign it: `hive adapter sign DIR --key FILE`",
        ),
        "no, not before it is signed or the key is trusted",
    ),
    "signature_invalid": CodeText(
        "The adapter's signature is broken: it is not what the key that it names signs.",
        ("the file model.sig was damaged or cut off", "somebody changed it"),
        (
            "bring the files and model.sig anew from where they were signed, then `hive adapter verify PATH`",
            "if it stays so, do not use it, and ask who signed it",
        ),
        "no",
    ),
    "signature_mismatch": CodeText(
        "The signature is good, and the files are not those that were signed.",
        (
            "a file was changed, is missing, or came in beside them",
            "an installed adapter was changed on the disk",
        ),
        (
            "bring them anew from where they were signed, then `hive adapter pull PATH --base MODEL`",
            "find out who changed them before they are signed again: `hive audit list --since 7d`",
        ),
        "no",
    ),
    "lease_too_large": CodeText(
        "Such a lease can never be granted on this box. The message has the arithmetic.",
        (
            "more memory than a GPU has, less its reserve and what is pinned",
            "more than `[lease] share` of it without `--all` or `--preemptible`",
        ),
        (
            "see what there is: `hive pool`",
            "ask for less, or so that it may be asked to leave: `hive lease run --vram 8G --preemptible -- PROGRAM`",
        ),
        "no",
    ),
    "lease_waited": CodeText(
        "The memory was not free in the time that the lease would wait.",
        ("models or other leases hold it", "somebody with a higher band, or who came first, is before it"),
        (
            "see who has it and who waits: `hive lease list`, `hive pool`",
            "wait longer: `hive lease run --wait 1h --vram 8G -- PROGRAM`",
        ),
        "yes, later",
    ),
    "lease_over": CodeText(
        "The lease's time was over, so it was ended and its memory went back.",
        ("`--max` of the lease, or `[lease] max_s`", "a lease that was taken was not renewed within its time to live"),
        (
            "take one that lasts longer: `hive lease run --max 8h --vram 8G -- PROGRAM`",
            "renew what was taken, before its time to live is over: `hive lease renew LEASE --token N`",
        ),
        "yes, as a new lease",
        told_in="`hive lease list --ended 20`, `hive lease show LEASE`",
    ),
    "lease_ended": CodeText(
        "An operator ended the lease.",
        ("`hive lease end`",),
        ("see who: `hive audit list --act lease.*`",),
        "yes, once that is agreed on",
        told_in="`hive lease list --ended 20`, `hive lease show LEASE`",
    ),
    "lease_preempted": CodeText(
        "The lease was preemptible, and its memory was wanted for something that goes before it.",
        ("a request for a model that needs the room", "a lease of a higher band"),
        (
            "let the program write checkpoints, and begin again from the last one",
            "ask for one that stays: leave `--preemptible` out",
        ),
        "yes, as a new lease",
        told_in="`hive lease list --ended 20`, `hive lease show LEASE`",
    ),
    "lease_overrun": CodeText(
        "The program took more memory than its lease asked for, and `[lease] overrun = end` ends those.",
        ("the estimate was too small", "a cache that grows, or fragmentation"),
        (
            "ask for more: `hive lease run --vram 12G -- PROGRAM`",
            "let it be told instead of ended: `hive config set lease.overrun tell`",
        ),
        "yes, with more memory",
        told_in="`hive lease list --ended 20`, `hive lease show LEASE`",
    ),
    "stale_token": CodeText(
        "The number that was shown is not (any more) that of the lease's holder.",
        ("the lease is over, or its longest time is", "a number of another lease, or of an earlier try"),
        ("see how the lease is: `hive lease show LEASE`", "take a new one: `hive lease take --vram 8G --ttl 60s`"),
        "no",
    ),
    "other_namespace": CodeText(
        "A program in another pid namespace, as in a container, asked to be held by a lease: Hive could not move it"
        " into the lease's group.",
        ("`hive lease run` inside a container",),
        ("take the lease on the host: `hive lease take --vram 8G --ttl 60s`, and renew it while the container runs",),
        "no",
        statuses=(403,),
        exit_codes=(4,),
    ),
}
