"""Programs, started by their path or copied into a jail: their neighbours are beside them, and nothing imports them."""

collect_ignore = [
    "fake_answers.py",
    "fake_backend.py",
    "fake_firecracker.py",
    "fake_guest.py",
    "fake_jailer.py",
    "fake_ollama.py",
    "fake_vmm_api.py",
    "fake_vsock.py",
    "lying_fork_server.py",
    "lying_template.py",
    "scripted_server.py",
    "serve_app.py",
]
