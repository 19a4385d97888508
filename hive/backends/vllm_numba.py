"""numba in vLLM's environment: its `ngram` drafts need it, and not every build of vLLM brings it (the one for CPUs)."""

from __future__ import annotations

from pathlib import Path

from hive.backends.speculation import NGRAM
from hive.domain import BackendKind
from hive.errors import DependencyDown
from hive.settings.table import InferenceSection


def lacks_numba(program: str) -> bool:
    """Whether the environment of this vLLM has no numba. False where its packages are not beside it, or those of the
    system are used, too, so that nothing is known."""
    environment = Path(program).resolve().parent.parent
    try:
        is_alone = "include-system-site-packages = true" not in (environment / "pyvenv.cfg").read_text()
    except OSError:
        is_alone = False
    packages = list(environment.glob("lib*/python3*/site-packages"))
    return is_alone and bool(packages) and not any((path / "numba").is_dir() for path in packages)


def check_numba(kind: str, inference: InferenceSection, speculative: str) -> None:
    """Raises DependencyDown where vLLM is to draft by ngrams and could not: it would end within its start."""
    if kind == BackendKind.VLLM and speculative == NGRAM and lacks_numba(inference.vllm_program):
        raise DependencyDown(
            f"speculative = ngram needs numba, and the vLLM at {inference.vllm_program} has none",
            hint=f"{Path(inference.vllm_program).with_name('pip')} install numba, or set speculative to another word",
        )
