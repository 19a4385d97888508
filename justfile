# What is done again and again. `just` lists it; without just the commands below are the same by hand.

python := ".venv/bin/python"

# List the recipes.
default:
    @just --list

# Make .venv with everything that development needs.
setup:
    ./install.sh test --version
    {{ python }} -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test,dev,docs]'

# Format, lint, types, shell scripts: all that is green before a commit.
check:
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    .venv/bin/mypy
    shellcheck install.sh .ci/run tests/tools/*.sh conf/guest/hive-forward conf/guest/make-machine

# Bring the code into the house's format.
fmt:
    .venv/bin/ruff format .
    .venv/bin/ruff check --fix .

# The book, in site/; `just serve` shows it while it is written.
book:
    .venv/bin/mkdocs build --strict

serve:
    .venv/bin/mkdocs serve

# The tests that find most, in two minutes.
quick *args:
    ./install.sh test --quick {{ args }}

# The tests with real inference engines and containers.
engines *args:
    ./install.sh test --engines {{ args }}

# Every other test that runs on any machine.
test *args:
    ./install.sh test {{ args }}
