# Set-up is part of every target: `make demo` and `make test` work in a fresh clone.
#
# On Linux, PyPI's torch comes with several GB of CUDA libraries. For the CPU build, point pip at
# PyTorch's CPU index:  make demo PIP_ARGS="--extra-index-url <PyTorch's CPU index>"

SHELL := /bin/bash
PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v))) \
	$(shell python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v python3))
PIP_ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
LOCK := requirements/dev.txt
STAMP := $(VENV)/$(shell cat $(LOCK) pyproject.toml | sha256sum | cut -c1-16).ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Two OpenMP pools that spin on two cores bring each other to a halt.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: help setup demo experiment-calc experiment-sql experiment-rag ablation test check crash-test test-base test-clients test-frameworks fmt bench bench-engine bench-learner bench-gateway bench-tracing bench-store bench-trl bench-step bench-gpu lock clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(STAMP): $(LOCK)
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 found; install one, or say make PYTHON=/path/to/python"; exit 2; }
	@echo "setting up $(VENV) with $(PYTHON)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q $(PIP_ARGS) -r $(LOCK)
	@$(PY) -m pip install -q --no-deps --editable .
	@rm -f $(VENV)/*.ready && touch $@

setup: $(STAMP) ## make the virtual environment with pinned packages (done by all others)

demo: $(STAMP) ## watch a calculator agent learn; SEED=2 STEPS=20 change it
	@$(PY) examples/calc/demo.py $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS))

experiment-calc experiment-sql experiment-rag: experiment-%: $(STAMP) ## the paper's experiments in mini form; SEEDS=1 VARIANT=air change them
	@$(PY) examples/experiment.py $* $(if $(SEEDS),--seeds $(SEEDS)) $(if $(VARIANT),--variant $(VARIANT)) $(if $(STEPS),--steps $(STEPS))

ablation: $(STAMP) ## steps to a fixed success, by way of crediting; NAMES="calc sql" SEEDS=1 VARIANTS="identical air" change it
	@$(PY) examples/ablation.py $(NAMES) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(VARIANTS),--variants $(VARIANTS))

test: check test-base test-clients ## lint, types, and all tests, with those frameworks that train here
	@$(MAKE) --no-print-directory test-frameworks FRAMEWORKS="langgraph openai-agents autogen pydantic-ai"
	@bash tests/postgres.sh
	@$(PY) -m pytest -q --durations=10

check: $(STAMP) ## lint, format, import rules and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check -q .
	@$(VENV)/bin/lint-imports --no-cache 2>&1 | tail -4
	@$(VENV)/bin/pyright

crash-test: $(STAMP) ## kill processes of a run ROUNDS times and see that nothing is lost; KINDS="postgresql http+sqlite" for some
	@bash tests/postgres.sh
	@PYTHONPATH=tests $(PY) -m crash --rounds $(or $(ROUNDS),60) $(if $(SEED),--seed $(SEED)) $(KINDS)

test-base: $(STAMP) ## the tests that need no PyTorch, on every Python found, without PyTorch
	@bash tests/base.sh $(PYTHON) python3.12 python3.13

test-clients: $(STAMP) ## the gateway with the real clients, each in its own environment
	@PYTHONPATH=tests $(PY) tests/clients/run.py

test-frameworks: $(STAMP) ## agents of every framework, each in its own environment; FRAMEWORKS="a b" for some
	@PYTHONPATH=tests $(PY) tests/frameworks/run.py $(FRAMEWORKS)

fmt: $(STAMP) ## format the code
	@$(VENV)/bin/ruff check --fix -q . ; $(VENV)/bin/ruff format -q .

bench: bench-engine bench-learner bench-gateway bench-tracing ## all benchmarks but bench-store, bench-trl and bench-step, which take long, and bench-gpu

bench-engine: $(STAMP) ## tokens per second of the engine, beside transformers' generate
	@$(PY) bench/engine.py

bench-learner: $(STAMP) ## tokens per second of the learner, beside a plain training step
	@$(PY) bench/learner.py

PEERS := litellm agentlightning
peer_stamp = .venv-bench-$(1)-$(shell sha256sum < requirements/bench-$(1).txt | cut -c1-8)/ready
PEER_STAMPS := $(foreach p,$(PEERS),$(call peer_stamp,$(p)))
TRL_STAMP := $(call peer_stamp,trl)

.venv-bench-%/ready:
	@echo "setting up $(@D)"
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -q $(PIP_ARGS) -r requirements/bench-$(word 3,$(subst -, ,$(@D))).txt
	@touch $@

bench-gateway: $(STAMP) $(PEER_STAMPS) ## latency, CPU and memory of the gateway, beside other proxies
	@$(PY) bench/gateway.py $(foreach s,$(PEER_STAMPS),$(word 3,$(subst -, ,$(s)))=$(dir $(s))bin/python)

AGENTLIGHTNING_STAMP := $(call peer_stamp,agentlightning)

bench-store: $(STAMP) $(AGENTLIGHTNING_STAMP) ## rollouts per second of the store, beside Agent Lightning's; PARTS="enqueue claim" AGENTS="32 100" change it
	@$(PY) bench/store.py $(PARTS) --peer $(dir $(AGENTLIGHTNING_STAMP))bin/python $(if $(AGENTS),--agents $(AGENTS))

bench-trl: $(STAMP) $(TRL_STAMP) ## seconds of training to a held-out reward, beside TRL; SEEDS=1 for fewer runs
	@$(PY) bench/training.py $(dir $(TRL_STAMP))bin/python $(if $(SEEDS),--seeds $(SEEDS))
	@$(PY) bench/training.py $(dir $(TRL_STAMP))bin/python --crowded

bench-step: $(STAMP) ## what a step of training costs, by who computes
	@$(PY) bench/step.py

bench-gpu: $(STAMP) ## what learner and engine use of a GPU; needs one
	@$(PY) bench/gpu.py

bench-tracing: $(STAMP) ## wall time of a rollout with and without tracing
	@PYTHONPATH=tests $(PY) bench/tracing.py

lock: $(STAMP) ## write requirements/*.txt from what is installed
	@bash requirements/lock.sh $(PYTHON)

clean: ## remove environments and caches, never runs
	@rm -rf .venv .venv-*-* .postgres-* .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
