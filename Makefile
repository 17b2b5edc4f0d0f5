# Two commands on a machine with nothing but Python 3.11:  make train   make test
PYTHON ?= python3
UV_DIR := .uv
UV := $(shell command -v uv 2>/dev/null || echo $(UV_DIR)/bin/uv)
RUN := $(UV) run --no-sync
JOB_DIR ?= runs/stdlib_bytes
# Further flags of `make train`, e.g. TRAIN_FLAGS='--fdl.set=task.train.num_train_steps=20'.
TRAIN_FLAGS ?=

.PHONY: setup train test test-installed faults lint format bench plan clean

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
	$(RUN) spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=$(JOB_DIR) --mode=train $(TRAIN_FLAGS)
	$(RUN) spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=$(JOB_DIR) --mode=decode_once $(TRAIN_FLAGS)

test: setup
	$(RUN) pytest -n 2 --dist loadgroup -m "not slow and not installed"

# Builds the wheel, installs it by each way that README documents, and works with it as a user does. Three minutes.
test-installed: setup
	$(RUN) pytest tests/installed

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

# Ratios to hand-written JAX, as JSON and plots in benchmarks/results.
bench: setup
	$(RUN) python -m benchmarks

# The cloud sizes, compiled for TPUs that aren't here: minutes each. The compiler comes into an environment of its own.
PLAN := UV_PROJECT_ENVIRONMENT=.venv-tpu $(UV) run --frozen --extra tpu
INSPECT := $(PLAN) spmd-trainer --mode=inspect
ROWS_512 := --fdl.set='train_datasets[0].batch_size.global_batch_size=512'
plan: setup
	$(INSPECT) --exp=lm.cloud.LmCloudSpmd2B --topology=v5e:16x16 --mesh=data:16,mdl:16 $(ROWS_512) --job_log_dir=runs/plan/2B
	$(INSPECT) --exp=lm.cloud.LmCloudSpmd16B --topology=v5p:8x8x8 --mesh=data:64,mdl:8 $(ROWS_512) --job_log_dir=runs/plan/16B
	$(INSPECT) --exp=lm.cloud.LmCloudSpmd175B --topology=v5p:8x8x8 --job_log_dir=runs/plan/175B
	$(PLAN) python -m benchmarks.plan_floor

clean:
	rm -rf .venv .venv-tpu $(UV_DIR) runs
