# Needs Python 3.11 or later and nothing else.  make train   make test
# PYTHON: interpreter of a new environment, e.g. `make setup PYTHON=python3.13`; if there is one already, `make clean` first.
PYTHON ?= python3
UV_DIR := .uv
UV := $(shell command -v uv 2>/dev/null || echo $(UV_DIR)/bin/uv)
RUN := $(UV) run --no-sync
JOB_DIR ?= runs/stdlib_bytes
# More flags for `make train`, e.g. TRAIN_FLAGS='--fdl.set=task.train.num_train_steps=20'.
TRAIN_FLAGS ?=

.PHONY: setup train chat test test-full test-all test-planted nightly test-gpu-compiler test-installed test-newest-jax
.PHONY: docs test-docs interop faults lint format bench plan clean

setup: .venv/.synced

# Installs uv with pip into this checkout if the machine has none.
$(UV_DIR)/bin/uv:
	$(PYTHON) -m venv $(UV_DIR)
	$(UV_DIR)/bin/pip install --quiet --disable-pip-version-check 'uv>=0.8'

# Compiles bytecode at install, which saves seconds at the first start.
.venv/.synced: pyproject.toml uv.lock | $(if $(filter $(UV_DIR)/bin/uv,$(UV)),$(UV_DIR)/bin/uv)
	$(UV) sync --frozen --python $(PYTHON) --compile-bytecode
	touch $@

train: setup
	$(RUN) spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=$(JOB_DIR) --mode=train $(TRAIN_FLAGS)
	$(RUN) spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=$(JOB_DIR) --mode=decode_once $(TRAIN_FLAGS)

# From the sources of Python's library to a model that answers questions about it, and CHAT_DIR/report.html. Ten minutes on 2
# cores. DEPTH is the one dial, see docs/chat.md.
CHAT_DIR ?= runs/chat
DEPTH ?= 2
chat: setup
	$(RUN) python tools/chat.py "$(CHAT_DIR)" --depth="$(DEPTH)"

# The suite of every change: ten minutes on 2 cores. `make test-all` runs every case of every matrix, `make test-full` those that
# `make test` leaves out.
PYTEST := $(RUN) pytest -n 2 --dist loadgroup
test: setup
	$(PYTEST) -m "not full and not slow and not installed and not docs"

test-full: setup
	$(PYTEST) -m "full and not slow and not installed and not docs"

test-all: setup
	$(PYTEST) -m "not slow and not installed and not docs"

# `make test` with the newest JAX that the wheel admits; the lock has the newest for Python 3.11. NEWEST_TESTS: what to run;
# NEWEST_PYTHON: version or path of an interpreter (uv fetches versions).
NEWEST_TESTS ?= tests
NEWEST_PYTHON ?= 3.12
test-newest-jax: setup
	$(UV) venv --quiet --allow-existing --python $(NEWEST_PYTHON) .venv-newest
	$(UV) pip install --quiet --upgrade --python .venv-newest/bin/python --editable . --group dev
	.venv-newest/bin/python -m pytest -n 2 --dist loadgroup -m "not full and not slow and not installed and not docs" $(NEWEST_TESTS)

# Both compile with XLA's optimisations reduced, because compilation is most of their time. This runs `make test-all` at XLA's
# normal level, as users compile. NIGHTLY_TESTS: files or folders to run.
NIGHTLY_TESTS ?= tests
nightly: setup
	SPMD_TEST_XLA_OPTIMISATION=normal $(PYTEST) -m "not slow and not installed and not docs" $(NIGHTLY_TESTS)

# Plants each fault of tests/planted/faults.toml in a copy, and runs the tests of `make test` that should notice. A quarter of an
# hour.
test-planted: setup
	$(RUN) python tests/planted/run.py

# Plans for NVIDIA topologies, and Muon's exchanges there, with the extra plan-gpu alone, half a minute.
GPU_COMPILER := .gpu-compiler
GPU_COMPILER_TESTS := tests/planner/test_plan.py tests/planner/test_nvidia.py tests/step/test_whole_matrices.py \
    tests/kernels/test_grouped_dot.py tests/optim/test_skipped_steps.py
test-gpu-compiler: setup $(GPU_COMPILER)/.synced
	PYTHONPATH=$(GPU_COMPILER) $(RUN) python -c "import jax_plugins.xla_cuda12"
	PYTHONPATH=$(GPU_COMPILER) $(RUN) pytest $(GPU_COMPILER_TESTS)

$(GPU_COMPILER)/.synced: uv.lock | $(if $(filter $(UV_DIR)/bin/uv,$(UV)),$(UV_DIR)/bin/uv)
	$(UV) export --quiet --frozen --no-hashes --extra plan-gpu --no-emit-project \
		| grep -E '^(jax-cuda12-pjrt|jax-cuda12-plugin|nvidia-cuda-nvcc-cu12)==' > $(GPU_COMPILER).txt
	$(UV) pip install --quiet --no-deps --target $(GPU_COMPILER) -r $(GPU_COMPILER).txt
	touch $@

# Builds the wheel, installs it in each way that README documents, and uses it as a user would. Three minutes.
test-installed: setup
	$(RUN) pytest tests/installed

# The documentation, as pages in site/. Strict: a dead link or a missing reference fails. Half a minute.
docs: setup
	$(RUN) python tools/draw_docs.py
	$(RUN) mkdocs build --quiet --strict

# Runs the commands and Python blocks of README and of all pages as pasted, and the notebooks. Five minutes; with DOCS=docs also
# those that pages mark as slow.
DOCS ?= docs and not slow
test-docs: setup
	$(RUN) pytest -n 2 -m "$(DOCS)" tests/test_docs.py tests/test_notebooks.py

# Every model family against Hugging Face transformers, live: logits, training, generation, export. An hour on 2 cores.
# transformers and torch get an environment of their own. TORCH: the requirement to install; see
# tests/interop_live/requirements.txt. INTEROP_TESTS: files to run.
TORCH ?= torch==2.13.0
INTEROP_DIR := .venv-interop
INTEROP_TESTS ?= tests/interop_live tests/interop/test_finetune_runs.py tests/test_mesh_equivalence.py
# These need the extra lm-eval, which `make test` does not install; elsewhere they are skipped.
LM_EVAL_DIR := .venv-lm-eval
LM_EVAL_TESTS := tests/interop_live/test_live_lm_eval.py tests/lm_evaluation/test_lm_eval.py
interop: setup $(INTEROP_DIR)/.synced
	SPMD_INTEROP_PYTHON=$(INTEROP_DIR)/bin/python $(RUN) pytest -m slow $(INTEROP_TESTS)
	SPMD_INTEROP_PYTHON=$(INTEROP_DIR)/bin/python UV_PROJECT_ENVIRONMENT=$(LM_EVAL_DIR) $(UV) run --frozen --extra lm-eval pytest \
		-m "slow or not slow" $(LM_EVAL_TESTS)

$(INTEROP_DIR)/.synced: tests/interop_live/requirements.txt
	$(PYTHON) -m venv $(INTEROP_DIR)
	$(INTEROP_DIR)/bin/pip install --quiet --disable-pip-version-check '$(TORCH)' -r $<
	touch $@

# Kills, stops, hangs, slow processes, wrong numbers, damaged checkpoints and mesh changes with real processes; prints a table of
# results. An hour or more.
faults: setup
	$(RUN) pytest -s -m slow tests/multiprocess tests/storage

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: setup
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

# Ratios to the baseline (hand-written JAX), as JSON and plots in benchmarks/results. 45 minutes.
bench: setup
	$(RUN) python -m benchmarks

# Compiles cloud, Llama and mixture-of-experts sizes for TPUs and GPUs that aren't here: up to 15 minutes each. Each compiler gets
# an environment of its own.
PLAN := UV_PROJECT_ENVIRONMENT=.venv-tpu $(UV) run --frozen --extra tpu
INSPECT := $(PLAN) spmd-trainer --mode=inspect
PLAN_GPU := UV_PROJECT_ENVIRONMENT=.venv-gpu $(UV) run --frozen --extra cuda12
INSPECT_GPU := $(PLAN_GPU) spmd-trainer --mode=inspect
ROWS = --fdl.set='train_datasets[0].batch_size.global_batch_size=$(1)'
ROWS_512 := $(call ROWS,512)
plan: setup
	$(INSPECT) --exp=lm.cloud.LmCloudSpmd2B --topology=v5e:16x16 --mesh=data:16,mdl:16 $(ROWS_512) --job_log_dir=runs/plan/2B
	$(INSPECT) --exp=lm.cloud.LmCloudSpmd16B --topology=v5p:8x8x8 --mesh=data:64,mdl:8 $(ROWS_512) --job_log_dir=runs/plan/16B
	$(INSPECT) --exp=lm.cloud.LmCloudSpmd175B --topology=v5p:8x8x8 --job_log_dir=runs/plan/175B
	$(INSPECT) --exp=lm.llama.Llama3_1_8B --topology=v5e:4x8 --job_log_dir=runs/plan/llama_8B
	$(INSPECT) --exp=lm.llama.Llama3_1_70B --topology=v5p:8x8x8 --job_log_dir=runs/plan/llama_70B
	$(INSPECT) --exp=lm.llama.Llama3_1_8BLora --topology=v5e:2x4 --job_log_dir=runs/plan/llama_8B_lora
	$(INSPECT) --exp=lm.llama.Llama3_1_70BLora --topology=v5e:8x8 --job_log_dir=runs/plan/llama_70B_lora
	$(INSPECT) --exp=lm.llama.Llama3_1_8BLong --topology=v5p:2x2x4 --job_log_dir=runs/plan/llama_8B_long
	$(INSPECT) --exp=lm.qwen.Qwen3_30B_A3B --topology=v5p:4x4x4 --mesh=data:16,mdl:4 --job_log_dir=runs/plan/qwen3_30B
	$(INSPECT) --exp=lm.gpt_oss.GptOss20B --topology=v5p:4x4x4 --mesh=data:16,mdl:4 --job_log_dir=runs/plan/gpt_oss_20B
	$(INSPECT) --exp=lm.qwen_next.Qwen3Next80B --topology=v5p:4x8x8 --job_log_dir=runs/plan/qwen3_next_80B
	$(INSPECT) --exp=lm.deepseek.DeepSeekV3 --topology=v5p:8x16x16 --job_log_dir=runs/plan/deepseek_v3
	$(INSPECT_GPU) --exp=lm.qwen.Qwen3_30B_A3B --topology=h100:8x8 --mesh=data:16,mdl:4 --job_log_dir=runs/plan/qwen3_30B_h100
	$(INSPECT_GPU) --exp=lm.gpt_oss.GptOss20B --topology=h100:8x8 --mesh=data:16,mdl:4 --job_log_dir=runs/plan/gpt_oss_20B_h100
	$(INSPECT_GPU) --exp=lm.deepseek.DeepSeekV3 --topology=h100:256x8 --job_log_dir=runs/plan/deepseek_v3_h100
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd2B --topology=h100:32x8 --mesh=data:256 $(ROWS_512) --job_log_dir=runs/plan/2B_h100
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd16B --topology=h100:32x8 --mesh=data:256 $(ROWS_512) --job_log_dir=runs/plan/16B_h100
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd175B --topology=h100:32x8 --mesh=data:256 $(ROWS_512) --job_log_dir=runs/plan/175B_h100
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd2B --topology=h200:1x8 --mesh=data:8 $(call ROWS,64) --job_log_dir=runs/plan/2B_h200
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd16B --topology=h200:1x8 --mesh=data:8 $(call ROWS,64) --job_log_dir=runs/plan/16B_h200
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd2B --topology=b200:4x8 --mesh=data:32 $(call ROWS,256) --job_log_dir=runs/plan/2B_b200
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd16B --topology=b200:4x8 --mesh=data:32 $(call ROWS,256) --job_log_dir=runs/plan/16B_b200
	$(INSPECT_GPU) --exp=lm.cloud.LmCloudSpmd175B --topology=b200:4x8 --mesh=data:32 $(call ROWS,64) \
	    --job_log_dir=runs/plan/175B_b200
	$(PLAN) python -m benchmarks.plan_baseline
	$(PLAN_GPU) python -m benchmarks.plan_baseline '2B h100' '2B h100 mdl' '16B h200' '16B b200'
	$(PLAN_GPU) python -m benchmarks.attention_memory

clean:
	rm -rf .venv .venv-tpu .venv-gpu $(INTEROP_DIR) $(LM_EVAL_DIR) $(GPU_COMPILER) $(GPU_COMPILER).txt $(UV_DIR) site runs
