# Two commands on a machine with nothing but Python 3.11:  make train   make test
PYTHON ?= python3
UV_DIR := .uv
UV := $(shell command -v uv 2>/dev/null || echo $(UV_DIR)/bin/uv)
RUN := $(UV) run --no-sync
JOB_DIR ?= runs/stdlib_bytes

.PHONY: setup train test faults lint format bench clean

setup: .venv/.synced

# uv comes from pip, into a folder of this checkout, where the machine has none.
$(UV_DIR)/bin/uv:
	$(PYTHON) -m venv $(UV_DIR)
	$(UV_DIR)/bin/pip install --quiet --disable-pip-version-check 'uv>=0.8'

# Bytecode is compiled at install: without it every start would pay seconds for it.
.venv/.synced: pyproject.toml uv.lock | $(if $(filter $(UV_DIR)/bin/uv,$(UV)),$(UV_DIR)/bin/uv)
	$(UV) sync --frozen --python $(PYTHON) --compile-bytecode
	touch $@

train: setup
	$(RUN) spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=$(JOB_DIR) --mode=train
	$(RUN) spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=$(JOB_DIR) --mode=decode_once

test: setup
	$(RUN) pytest -n 2 --dist loadgroup -m "not slow"

# Kills, SIGTERMs, damaged checkpoints and mesh changes with real processes; prints a table of what survived. An hour or more.
faults: setup
	$(RUN) pytest -s -m slow tests/multiprocess

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: setup
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: setup
	$(RUN) python -m benchmarks.first_step
	$(RUN) python -m benchmarks.padding
	$(RUN) python -m benchmarks.decode
	$(RUN) python -m benchmarks.shard_map
	$(RUN) python -m benchmarks.resharding
	$(RUN) python -m benchmarks.sharding_scale

clean:
	rm -rf .venv $(UV_DIR) runs
