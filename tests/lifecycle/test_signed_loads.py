"""Under a rule an Ollama in use loads by itself only what a signed order had loaded: through a real proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec

from hive.audit.approval import Approval
from hive.control import views
from hive.domain import BackendKind
from tests.control.box import AWAKE, Box
from tests.fakes.programs import Program, fake_ollama
from tests.governance.signing import KEYS
from tests.waiting import until

QUICK = msgspec.structs.replace(AWAKE, daemon=msgspec.structs.replace(AWAKE.daemon, backend_check_s=0.2))
RULE = "[rules.model-load]\nthreshold = 1\nof = ['ann']\n"


def govern(rules: Path) -> None:
    keys = "".join(f'{name} = "{key.public.text}"\n' for name, key in KEYS.items())
    rules.write_text(f"[signers]\n{keys}{RULE}")
    rules.chmod(0o644)


def loaded(ollama: Program) -> set[str]:
    return {model["name"] for model in httpx.get(f"{ollama.url}/api/ps", trust_env=False).json()["models"]}


async def forget(ollama: Program, model: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"{ollama.url}/api/generate", json={"model": model, "keep_alive": 0})


async def asked(box: Box, model: str, path: str = "/chat/completions") -> tuple[int, Any]:
    """A request of the operator's, through the proxy."""
    access = views.access_view(box.services.proxy_link.known_port, box.services.internal_token)
    head = {"authorization": f"Bearer {access['token']}"}
    async with httpx.AsyncClient(headers=head, trust_env=False, timeout=30) as client:
        if path.startswith("/api"):
            url = access["openai_base_url"].removesuffix("/v1") + path
            answer = await client.post(url, json={"model": model, "prompt": "hi", "stream": False})
        else:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
            answer = await client.post(access["openai_base_url"] + path, json=body)
    return answer.status_code, answer.json()


async def load(box: Box, model: str, by: str) -> None:
    job = await box.services.models.load(model, "uid:0", approval=Approval("model-load", by))
    assert (await box.job(job.id, wait_s=20))["state"] == "done"


async def test_a_request_loads_nothing_that_nobody_signed(box: Box) -> None:
    """Any agent's request loaded any model there was, whatever the rules said."""
    rules = box.paths.state.parent / "governance.toml"
    with fake_ollama("tiny", "big", "other") as ollama:
        await box.start_helper()
        await box.start_daemon(QUICK, backend=(BackendKind.OLLAMA, ollama.address), rules=rules)
        await box.start_real_proxy()
        await until(lambda: box.inference()["running"])
        assert (await asked(box, "tiny"))[0] == 200, "without a rule all is as before"
        govern(rules)
        daemon = box.daemon
        assert daemon is not None
        approvals = daemon._load_approvals
        await until(lambda: approvals._told.models == ["tiny:latest"])
        for model, path in (("big", "/chat/completions"), ("Big:latest", "/api/generate"), ("other", "/embeddings")):
            status, told = await asked(box, model, path)
            assert (status, "no signed load of it is on record" in str(told)) == (403, True), (model, told)
        assert (await asked(box, "big"))[1]["error"]["code"] == "model_not_approved"
        assert (await asked(box, "tiny"))[0] == 200, "it was in memory before there was a rule"
        assert loaded(ollama) == {"tiny:latest"}

        await load(box, "big", "ann")
        await until(lambda: "big:latest" in (approvals._told.models or ()))
        assert (await asked(box, "big"))[0] == 200
        for model in ("tiny", "big"):
            await forget(ollama, model)
        await until(lambda: approvals._told.models == ["big:latest"])
        assert (await asked(box, "tiny"))[0] == 403, "and is loaded no second time"
        assert (await asked(box, "big"))[0] == 200, "what was signed is loaded again by a request"
        assert loaded(ollama) == {"big:latest"}

        await box.kill_real_proxy()
        await box.start_real_proxy()
        assert (await asked(box, "tiny"))[0] == 403, "the next proxy knows it from its table"
        job = await box.services.models.unload("big", "uid:0", approval=Approval("model-unload", "ann"))
        assert (await box.job(job.id, wait_s=20))["state"] == "done"
        await until(lambda: approvals._told.models == [])
        assert (await asked(box, "big"))[0] == 403, "an unload takes the approval back"
        rules.unlink()
        await until(lambda: approvals._told.models is None)
        assert (await asked(box, "other"))[0] == 200
