"""Facts that a real server tells of its model, as Hive keeps them and passes them on."""

from __future__ import annotations

import json

import pytest

from hive.backends.backend import open_backend
from hive.dialects import ollama_lists
from hive.domain import BackendKind
from tests.llama import MODEL, LlamaServer


@pytest.mark.llama
async def test_a_real_llama_servers_model_keeps_its_context_template_and_meta(llama_server: LlamaServer) -> None:
    """`/api/show` said `completion` and a name, and `/v1/models` had no `meta`."""
    (model,) = await open_backend(BackendKind.LLAMA, llama_server.address).models()
    assert (model.name, model.capabilities) == (MODEL, ("completion",))
    assert model.context_length == model.meta["n_ctx"]
    assert model.parameters == model.meta["n_params"]
    assert "<|im_start|>" in model.template
    told = json.loads(ollama_lists.shown(model))
    assert told["template"] == model.template
    assert told["details"]["quantization_level"] == "F32"
    assert told["model_info"]["unknown.embedding_length"] == model.meta["n_embd"]
