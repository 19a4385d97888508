"""Operations that need the word of their signers."""

from __future__ import annotations

from hive.explain.code_text import CodeText

OPERATIONS: dict[str, CodeText] = {
    "op_token_required": CodeText(
        "On this box this act needs more than one person's word, and no operation token came with it.",
        ("a rule for it in /etc/hive/governance.toml",),
        (
            "write it down, have it signed, send it: `hive op request model-load modelId=MODEL`, `hive op sign"
            " model-load.op --key KEY`, `hive op submit model-load.op`",
            "see what has a rule, and who signs: `hive op show`",
            "in an emergency root may go on alone, which is noted: `--break-glass REASON`",
        ),
        "yes, with the token",
    ),
    "op_token_refused": CodeText(
        "The operation is not approved. Mostly one of the other `op_token_` codes says why.",
        ("what came as its token approves nothing here",),
        ("see what was signed: `hive op show FILE`", "see what this box asks for: `hive op show`"),
        "no",
    ),
    "op_token_invalid": CodeText(
        "What came as the operation token is not one, or a signature in it is not of what it says.",
        (
            "it was cut off or encoded once more on its way",
            "it was changed after it was signed",
            "it was signed with another key than the signer's, as the rules have it",
        ),
        (
            "see what is wrong with it: `hive op verify FILE`",
            "begin anew: `hive op request model-load modelId=MODEL`",
        ),
        "no, not with that token",
    ),
    "op_token_threshold": CodeText(
        "Too few of those who may sign this operation have signed it.",
        (
            "a signer is missing, or one signed twice",
            "a model would have to leave for it, and who may unload that has a rule of its own",
            "an HMAC of another service, where the rule wants signatures",
        ),
        (
            "see who has signed and who may: `hive op show FILE`, `hive op show`",
            "have it signed by more: `hive op sign FILE --key KEY`",
        ),
        "yes, with more signatures, within its 300 s",
    ),
    "op_token_expired": CodeText(
        "The operation token does not hold now: it holds for 300 seconds at most, from the time it was made for.",
        ("it was signed too late, or sent too late", "the clocks of the two boxes differ"),
        (
            "make it anew: `hive op request model-load modelId=MODEL`; for a later time: `--at 2026-11-28T22:00`",
            "look at the clock: `timedatectl`, `hive doctor host`",
        ),
        "no, not with that token",
    ),
    "op_token_mismatch": CodeText(
        "The operation token is good, and about something else than what is asked for.",
        (
            "it is for another box, another operation, or other values than those asked for",
            "the token is older than this box's memory of what was used",
        ),
        ("compare: `hive op show FILE`; `hive op submit FILE` asks for exactly what was signed",),
        "no, not with that token",
    ),
    "op_token_replayed": CodeText(
        "The operation token has been used: each is good for one act.",
        ("it was sent twice, or a client tried again after it had worked",),
        (
            "see whether it was done: `hive audit list --since 1h`, `hive job list`",
            "make a new one: `hive op request model-load modelId=MODEL`",
        ),
        "no, not with that token",
    ),
    "governance_broken": CodeText(
        "The rules of governance, or the key they name, cannot be read. Until they can, nothing governed is done.",
        (
            "a mistake in /etc/hive/governance.toml",
            "the file, or the key of `[governance] hmac_key_file`, is not readable, or others may write to it",
        ),
        (
            "the line that is wrong: `sudo hive doctor governance`",
            "in an emergency root may go on alone, which is noted: `--break-glass REASON`",
        ),
        "yes, once the file is right: it is read anew",
    ),
    "clock_went_back": CodeText(
        "The clock of this box stands before a time that it has seen, and operation tokens that were used would hold"
        " again.",
        ("the clock was set back, or was wrong at boot", "a virtual machine was restored from a snapshot"),
        (
            "set it right: `sudo timedatectl set-ntp true`, then `hive doctor host`",
            "in an emergency root may go on alone, which is noted: `--break-glass REASON`",
        ),
        "yes, once the clock has caught up",
    ),
}
