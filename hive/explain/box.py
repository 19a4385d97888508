"""The box itself: commands, settings, the services and what they need, and states that stand in the way."""

from __future__ import annotations

from hive.explain.code_text import CodeText

BOX: dict[str, CodeText] = {
    "internal": CodeText(
        "Something failed, and no other code says more. With `a fault in Hive itself` in front it is a bug; else the"
        " message says which step went wrong.",
        (
            "a program, a command of the system or a step of an installation failed",
            "an agent that was started ended at once",
            "the result of a command could not be written",
            "a fault in Hive",
        ),
        (
            "read what it said: `hive logs`, `hive agent logs NAME`, `hive job show JOB`",
            "see where it happened: the same command with `HIVE_DEBUG=1` in front",
            "a fault in Hive: send the message, `hive version` and what `hive logs` said around it to whoever looks"
            " after this Hive",
        ),
        "once; if it stays so, no",
    ),
    "not_confirmed": CodeText(
        "The command asked whether to go on, and nobody said yes. Nothing was changed.",
        (
            "another answer than `y` or `yes`; Enter alone is a no",
            "Ctrl-D, or Ctrl-C, at the question: after Ctrl-C the exit code is 130",
        ),
        (
            "type it again, and answer `y`",
            "without being asked, as in a script: the same command with `--yes`",
        ),
        "yes",
        told_in="the command itself",
    ),
    "usage": CodeText(
        "The command line does not make sense as it is. Nothing was done.",
        (
            "an option or a command that is not there: the message says which is near",
            "a word too few or too many, or two options that do not go together",
            "a value of another form than is expected",
        ),
        (
            "see what it takes, with examples: the command with `--help`",
            "see all commands: `hive --help`",
        ),
        "no, not as it is",
    ),
    "config": CodeText(
        "A setting, or a file of settings, is wrong or cannot be read. The message names file, line and key. A Hive"
        " that starts refuses to; one that runs goes on with what it had.",
        (
            "a key or a section with a slip in it, or a value of another form",
            "a key, a token or an account file that is damaged or missing",
            "a port or a socket that cannot be taken",
        ),
        (
            "check the whole file: `hive config check`",
            "see what is in force and from where: `hive config show --origin`",
            "change it by name, which is checked: `hive config set SECTION.KEY VALUE`",
        ),
        "no, not before the file is right",
    ),
    "wrong_state": CodeText(
        "The thing is there, and its state does not allow this now: the message says what it is and what helps.",
        (
            "an agent that is stopped, sleeping, or being started",
            "something of that name, or that file, is there already, or the port is another agent's",
            "a switch, a load or a restore is under way, or a model is pinned",
            "another Hive uses this state directory",
            "a database, a backup or a file that another version of Hive has written",
        ),
        (
            "look: `hive agent show NAME`, `hive pool explain MODEL`, `hive job list`, `hive status`",
            "do what the hint says, then the same again",
        ),
        "yes, once the state is another one",
    ),
    "busy": CodeText(
        "The agent works, so it was not put to sleep: it stays awake.",
        ("a request to the model, a caller, or a program inside it is under way", "something keeps it awake"),
        (
            "see why it is awake: `hive agent show NAME`",
            "wait longer for it: `hive agent pause NAME --timeout 120`",
        ),
        "yes, later; Hive puts it to sleep by itself once it is idle",
    ),
    "not_ready": CodeText(
        "It is not there yet: a job's result before the job has ended (409), or a Hive or a runner that starts or stops"
        " (503).",
        ("the job still runs", "Hive was just started, or is being stopped", "a runner is loading its model"),
        (
            "wait for a job: `hive job logs JOB --follow`",
            "wait for Hive: `hive status`; for a model: `hive pool explain MODEL`",
        ),
        "yes, in some seconds (503: after `Retry-After`)",
    ),
    "unhealthy": CodeText(
        "`GET /health` of the runner API: no request would be served now.",
        ("no model is loaded, and a load has failed or cannot begin", "no inference server answers"),
        ("see what is wrong, and what to type: `hive status`, `hive doctor`",),
        "yes, after `Retry-After`",
    ),
    "dependency_down": CodeText(
        "Something that this needs does not answer: most often the Hive that is asked is not there.",
        (
            "no Hive runs, or another one is meant (`--state-dir`, `--socket`, HIVE_SOCKET)",
            "Redis, systemd, the Docker engine or an inference server is down",
            "a program that is needed is not installed, or a port or socket is taken",
        ),
        (
            "see what runs and what does not: `hive status`, `hive doctor`",
            "start one: `hive up`; an installed one: `sudo systemctl start hive.target`",
            "read why it ended: `hive logs`, `journalctl -u hive-daemon`",
        ),
        "yes, services that were killed come back within seconds",
    ),
    "link_lost": CodeText(
        "Two processes of Hive are not connected: the daemon and the proxy, or the daemon and the helper.",
        ("one of them ended or is being restarted", "it was killed, or hangs"),
        (
            "see which one: `hive status`",
            "see why it ended: `hive logs`, `systemctl status hive-proxy hive-sandbox`",
        ),
        "yes, in some seconds: they connect by themselves",
    ),
    "timeout": CodeText(
        "It did not happen in time. What was begun may still come to its end.",
        (
            "a service, systemd or the Docker engine is slow or hangs",
            "a busy agent that was to be put to sleep, a model that does not leave",
            "a query or a message that takes longer than was asked for",
        ),
        (
            "look whether it happened meanwhile: `hive status`, `hive job list`, `hive agent show NAME`",
            "give it longer where the command has `--timeout`",
            "see what the host is short of: `hive doctor`",
        ),
        "yes, after a look",
    ),
    "rolled_back": CodeText(
        "A new version or a change failed, and what was there before is in force again. Nothing is lost.",
        ("the new version does not start or does not pass its own check", "a service did not come up in time"),
        (
            "read why: the message, and `journalctl -u hive-daemon`",
            "see whether all is well: `hive status`, `hive doctor`",
            "mend it and install again: `sudo hive install`",
        ),
        "once the cause is mended",
    ),
    "disk_full": CodeText(
        "The disk is full, or has too little room for this.",
        (
            "the state directory's disk is full: logs, models, backups",
            "a model or an adapter that is larger than the rest",
            "a file of the state directory that cannot be written for another reason, which the message has",
        ),
        (
            "see which disk, and what is on it: `hive doctor disk`, `df -h`",
            "make room: `hive model remove NAME`, `hive adapter remove NAME`, `hive job release JOB`",
        ),
        "yes, once there is room",
    ),
    "child_failed": CodeText(
        "A process of `hive up` ended before it was up, so `hive up` ended too. Its last words are in the message.",
        (
            "a mistake in hive.conf, a port that is taken, a directory that may not be written",
            "Redis or the inference server that it starts does not start",
        ),
        (
            "read the last lines of the message: the process's own code is behind them",
            "check what it needs: `hive config check`, `hive doctor`",
        ),
        "no, not before that is mended",
        statuses=(500,),
    ),
}
