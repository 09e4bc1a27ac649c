# Everything runs in .venv with the versions of constraints.txt, whose files are known by their hashes
# (requirements/lock makes requirements/); targets prepare what they need.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --progress-bar off
TORCH := $(shell grep '^torch==' constraints.txt)
# PyPI's torch for Linux brings CUDA's libraries. Without NVIDIA's driver they are of no use, and PyTorch's own index of
# CPU builds is asked first. CPU_TORCH= asks the usual index alone.
NVIDIA := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg)
CPU_TORCH := $(if $(NVIDIA),,$(if $(filter Linux,$(shell uname)),https://download.pytorch.org/whl/cpu))
# Images for Python often set it: each of a thousand processes would compile stoker.
unexport PYTHONDONTWRITEBYTECODE
# Processes that share the tests, on two cores: most tests of faults wait.
JOBS ?= 5
CHECKS := check-format check-lint check-spelling check-types check-layers
BENCHMARKS := benchmarks/feed.py benchmarks/prediction.py benchmarks/honesty.py

# Stamps: what running needs, and what developing needs on top of it.
RUN := .venv/.installed-run
DEV := .venv/.installed-dev

# Separate environments with other versions, as the examples lock them.
TF := .venv-tf/.installed
RAY := .venv-ray/.installed
# Not in .venv: Lightning asks mpi4py how many ranks there are, and dies where it finds no libmpi.
MPI := .venv-mpi/.installed
LIBRARIES := .venv-libraries/.installed
PEERS := .venv-peers/.installed
DOCS := .venv-docs/.installed
# An environment that sees what .venv has, behind what it has itself.
define VENV_OVER_OURS
@$(PYTHON) -m venv $(@D)
@echo "import site; site.addsitedir('$(abspath .venv)/lib/$$(ls .venv/lib)/site-packages')" \
  >"$$(ls -d $(@D)/lib/*/site-packages)/beside.pth"
endef
OWN_PIP = $(@D)/bin/python -m pip --disable-pip-version-check install -qq --progress-bar off

.PHONY: help setup run test keel test-all test-e2e test-engines test-libraries test-docker check $(CHECKS) fmt docs bench image wheel clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(DEV)  ## .venv with everything that developing needs

run: $(RUN)  ## the example, end to end: profile, decide, train, evaluate, report
	@$(BIN)/stoker run configs/mnist.yaml --yes --group dnn=local.c1:1 --group data=local.c1:1:1

test: $(DEV)  ## the tests, in five processes (most wait), or JOBS
	@$(BIN)/pytest -q tests -n $(JOBS)

keel: $(DEV)  ## stoker from outside alone: at most five minutes on two cores
	@$(BIN)/pytest -q tests/keel -m 'keel and not e2e' -n 3

test-all: test test-e2e test-engines test-libraries test-docker  ## what runs at night: engines, libraries and images, too

# What takes long: whole runs, small machines, SageMaker's containers and pipelines.
test-e2e: $(DEV)
	@$(BIN)/pytest -q tests -m 'e2e and not library and not engine' -n 3

# TensorFlow, Ray and MPI for real, in environments of their own.
test-engines: $(DEV) $(TF) $(RAY) $(MPI)
	@$(BIN)/pytest -q tests/engines -m engine -n $(JOBS)

# Libraries that read torch's loaders, fed unchanged, and the tutorial's notebook.
test-libraries: $(DEV) $(LIBRARIES)
	@.venv-libraries/bin/python -m pytest -q tests/libraries tests/e2e/test_unchanged_scripts.py -m library

# The images, built and run on a Docker engine of their own; as root on Debian.
test-docker: $(DEV)
	@$(BIN)/pytest -q tests/docker -m docker

# In parallel; all run, also after one has failed, with each tool's output together where make can do that.
check: $(DEV)  ## format, lint, spelling, types, import layers
	@$(MAKE) -k -j$(words $(CHECKS)) $(if $(filter output-sync,$(.FEATURES)),--output-sync) $(CHECKS)

check-format:
	@$(BIN)/ruff format --check -q .

check-lint:
	@$(BIN)/ruff check -q .

check-spelling:
	@$(BIN)/codespell src docs tests benchmarks configs containers components examples pipelines tools *.md

check-types:
	@$(BIN)/mypy --no-error-summary src/stoker pipelines tools

check-layers:
	@$(BIN)/lint-imports

fmt: $(DEV)  ## format, and fix what the linter can fix
	@$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix .

# Without --quiet, under which mkdocs counts no warnings, and --strict fails for none.
docs: $(RUN) $(DOCS)  ## the reference from the code, and the site in .cache/site; no network once it is set up
	@$(BIN)/python docs/make_reference.py
	@set -o pipefail; NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict 2>&1 | sed '/^INFO/d'
	@echo "the site: .cache/site/index.html; to look at it: .venv-docs/bin/mkdocs serve"

bench: $(DEV)  ## compared with the alternatives, an hour; a short look: make bench BENCH=--quick
	@for file in $(BENCHMARKS); do \
	  echo "== $$file"; $(BIN)/python "$$file" $(BENCH) || exit 1; done

image:  ## an image: make image TARGET=launcher|data|control IMAGE=NAME BUILD=OPTIONS: see containers/launcher
	@docker buildx build --target $(or $(TARGET),launcher) --file containers/launcher/Dockerfile \
	  --tag $(or $(IMAGE),stoker-$(or $(TARGET),launcher)) $(or $(BUILD),--load) .

wheel: $(RUN)  ## dist/: wheel and sdist, tried in an empty environment; with the example: requirements/try-wheel run
	@rm -rf dist
	@$(BIN)/hatchling build
	@PYTHON=$(PYTHON) requirements/try-wheel

clean:  ## removes .venv, runs and caches
	@rm -rf .venv .venv-* runs dist .cache .*_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(TF): examples/tf_mnist/requirements.txt
	@echo "set-up: TensorFlow in .venv-tf (1.6 GB)"
	@$(PYTHON) -m venv .venv-tf
	@$(OWN_PIP) --no-deps -r $<
	@touch $@

# What .venv has of the right version, torch above all, is not installed again.
$(RAY): examples/ray_digits/requirements.txt examples/rl_simulators/requirements.txt | $(DEV)
	@echo "set-up: Ray and gymnasium in .venv-ray (0.3 GB)"
	@$(PYTHON) -m venv .venv-ray
	@echo "$(abspath .venv)/lib/$$(ls .venv/lib)/site-packages" >"$$(ls -d .venv-ray/lib/*/site-packages)/beside.pth"
	@$(OWN_PIP) $(patsubst %,-r %,$^)
	@touch $@

# Yardsticks of benchmarks/peers.py. TensorFlow comes last: its versions are the narrower ones.
$(PEERS): examples/ray_digits/requirements.txt examples/tf_mnist/requirements.txt | $(DEV)
	@echo "set-up: TensorFlow, gRPC and Ray in .venv-peers (2 GB)"
	$(VENV_OVER_OURS)
	@for each in $^; do $(OWN_PIP) --no-deps -r $$each || exit 1; done
	@touch $@

# Without dependencies: .venv has them, and nothing may bring another torch.
$(LIBRARIES): tests/libraries/requirements.txt | $(DEV)
	@echo "set-up: libraries in .venv-libraries (0.1 GB)"
	$(VENV_OVER_OURS)
	@$(OWN_PIP) --no-deps -r $<
	@touch $@

$(DOCS): requirements/docs.txt
	@echo "set-up: mkdocs in .venv-docs (0.2 GB)"
	@$(PYTHON) -m venv .venv-docs
	@$(OWN_PIP) --require-hashes --no-deps -r $<
	@touch $@

$(MPI): tests/engines/requirements-mpi.txt | $(DEV)
	@echo "set-up: mpi4py in .venv-mpi"
	$(VENV_OVER_OURS)
	@$(OWN_PIP) -r $<
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: stoker needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)"; \
	  echo "try:   make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "set-up 1: a virtual environment in .venv"
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "error: $(PYTHON) cannot make virtual environments"; \
	  echo "try:   install its venv module (Debian: apt-get install python3-venv)"; exit 1; }

# torch has no hash: its builds for CPUs and for CUDA have one version. What it needs is there before it, so
# that nothing but torch itself, and NVIDIA's libraries with a CUDA build, comes without one.
$(RUN): pyproject.toml constraints.txt requirements/run.txt | .venv/bin/python
	@echo "set-up 2: what stoker and its example need"
	@$(PIP) --require-hashes --no-deps -r requirements/run.txt
	@{ [ -n "$(CPU_TORCH)" ] && \
	  echo "set-up 3: $(TORCH) for CPUs, as there is no NVIDIA driver (0.2 GB to fetch, 0.8 GB on disk)" && \
	  $(PIP) --no-deps --retries 1 --timeout 15 --index-url $(CPU_TORCH) $(TORCH) 2>/dev/null; } || { \
	  echo "set-up 3: $(TORCH) from the usual index (with CUDA's libraries 3 GB to fetch, 5 GB on disk: minutes)"; \
	  $(PIP) -c constraints.txt $(TORCH); }
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): $(RUN) requirements/dev.txt
	@echo "set-up 4: the tools of development"
	@$(PIP) --require-hashes --no-deps -r requirements/dev.txt
	@touch $@
