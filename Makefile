# Two commands do everything on a fresh machine: `make train` and `make test`.

NPROC ?= 2
ARGS ?=
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# One thread a rank is what fsdp2 sets by itself on 2 cores; saying so keeps torchrun from warning about it. A signal to
# make reaches its child: torchrun, in the place of the shell.
THREADS = exec env OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
TORCHRUN = $(if $(filter-out 1,$(NPROC)),$(THREADS) )$(BIN)/torchrun --nproc_per_node $(NPROC)
TRAIN = $(TORCHRUN) -m fsdp2.train
UV = $(BIN)/uv pip install --quiet --python $(BIN)/python -c $(CONSTRAINTS)
# The newest run, for `make resume` and `make infer`.
RUN ?= $(patsubst %/config.json,%,$(shell ls -t runs/*/config.json 2>/dev/null | head -n 1))

STAMP := $(shell date +%Y%m%d-%H%M%S)

# Many container images forbid Python to keep its bytecode. Each of the processes that Ray starts for a
# run would then compile torch again: 20 s of CPU each instead of 8.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help train resume infer test test-slow test-oldest test-ray test-zero test-gpu chaos fuzz lint format clean

help:  ## show this list
	@awk -F ':.*## ' '/^##@ /{print "\n" substr($$0, 5)} /^[a-z0-9-]+:.*## /{printf "  make %-34s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Each train-… also as ray-train-…, through Ray; ray-zero1, 2, 3 for ZeRO."
	@echo "Minutes are those of 2 cores. All honour NPROC=4 and ARGS=\"--epochs 3\"."

# --- set-up -------------------------------------------------------------------------------------------

# What the variants need beside the core. EXTRAS=plots is a small set-up, for the trainings without other libraries.
EXTRAS ?= tensorboard,ray,plots,migrate,hf,timm,peft,torchao
CONSTRAINTS := constraints.txt
# TORCH=cpu takes torch without CUDA's libraries, from PyTorch's own index. Its wheels have other hashes than those of
# constraints.txt, so that is used without its hashes.
ifneq ($(TORCH),)
export UV_TORCH_BACKEND := $(TORCH)
CONSTRAINTS := $(VENV)/constraints.txt
endif
$(VENV)/constraints.txt: constraints.txt | $(BIN)/uv
	sed -e '/^ *--hash/d' -e 's/ *\\$$//' $< >$@

# uv and not pip: it resolves the same everywhere, a second environment is hard links, and it compares the hashes of
# constraints.txt where others, such as this package in its folder, have none.
$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(shell grep -o '^uv==[0-9.]*' constraints.txt)

$(VENV)/.installed: $(BIN)/uv pyproject.toml $(CONSTRAINTS)
	$(UV) -e '.[$(EXTRAS)]'
	@touch $@

.PHONY: install constraints
install: $(VENV)/.installed  ## the environment alone; TORCH=cpu without CUDA's libraries, EXTRAS=plots without other libraries

# Versions stay as they are where they may: ARGS=--upgrade takes the newest.
constraints: $(BIN)/uv  ## write constraints.txt again after a change of pyproject.toml
	printf '%s\n' tox tox-uv tox-current-env setuptools wheel | $(BIN)/uv pip compile --quiet --all-extras --universal \
	  --generate-hashes --no-annotate --no-header -o constraints.txt pyproject.toml - $(ARGS)

# DeepSpeed builds itself with the torch that is there: after that, and without an environment of its own.
$(VENV)/.deepspeed: $(VENV)/.installed
	$(UV) setuptools wheel
	$(UV) --no-build-isolation -e '.[$(EXTRAS),deepspeed]'
	@touch $@

# What benchmarks/steps.py compares with.
$(VENV)/.bench: $(VENV)/.deepspeed
	$(UV) --no-build-isolation -e '.[$(EXTRAS),deepspeed,bench]'
	@touch $@

# What scores an exported model.
$(VENV)/.eval: $(VENV)/.installed
	$(UV) -e '.[$(EXTRAS),eval]'
	@touch $@

$(VENV)/.docs: $(BIN)/uv pyproject.toml $(CONSTRAINTS)
	$(UV) -e '.[docs]'
	@touch $@

# For tests and linters: one environment for all of it, which tox uses as it is.
$(VENV)/.dev: $(VENV)/.installed
	$(UV) -e '.[$(EXTRAS),test,lint,wandb,mlflow,tutorial]' tox tox-uv tox-current-env
	@touch $@
# Tests start make themselves, which is no part of this one and has flags of its own.
TOX = env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u ARGS $(BIN)/tox run --current-env -e

##@ Train, go on, predict

train: $(VENV)/.installed  ## train a sharded ViT on the embedded digits, 2 ranks on the CPU
	$(TRAIN) $(ARGS)

resume: $(VENV)/.installed  ## go on with the newest run (RUN=… another), on any NPROC
	@test -n "$(RUN)" || { echo "there is no run yet: make train"; exit 2; }
	$(TRAIN) --config "$(RUN:%/=%)/config.json" --run-dir "$(RUN:%/=%)" $(ARGS)

.PHONY: eval
eval: $(VENV)/.eval  ## score the newest run's model (RUN=… another) with lm-eval: make eval TASKS=hellaswag
	@test -n "$(RUN)" || { echo "there is no run yet: make train-llama"; exit 2; }
	@test -n "$(TASKS)" || { echo "name what it is scored on: make eval TASKS=hellaswag"; exit 2; }
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT TERM && \
	  $(BIN)/python -m fsdp2.checkpoint export "$(RUN:%/=%)" "$$folder/model" --format hf && \
	  $(BIN)/python -m lm_eval --model hf --model_args pretrained="$$folder/model" --tasks "$(TASKS)" $(ARGS)

infer: $(VENV)/.installed  ## predict with the newest run's model (RUN=… another)
	@test -n "$(RUN)" || { echo "there is no run yet: make train"; exit 2; }
	$(BIN)/python -m fsdp2.infer "$(RUN:%/=%)" $(ARGS)

##@ A language model

.PHONY: train-llama
train-llama: $(VENV)/.installed  ## a Llama of 9.6M parameters on the standard library's source, which then writes (15 min)
	$(TRAIN) --model llama --model-size 10m --dataset source-text --seq-len 256 --batch-size 8 --max-steps 250 \
	  --optimizer adamw --lr 1e-3 --betas 0.9,0.95 --weight-decay 0.1 --schedule cosine --warmup-steps 25 \
	  --lr-floor 0.1 --clip-grad-norm --run-dir runs/llama-10m $(ARGS)
	$(BIN)/python -m fsdp2.infer runs/llama-10m --prompt "class " --new-tokens 200

.PHONY: finetune-lora
finetune-lora: $(VENV)/.installed  ## adapters beside what `make train-llama` left, on this repository's documents
	$(TRAIN) --model llama --model-size 10m --init-from runs/llama-10m --lora 8 --dataset text:docs --seq-len 256 \
	  --batch-size 8 --max-steps 60 --optimizer adamw --lr 3e-3 --schedule cosine --run-dir runs/llama-10m-lora $(ARGS)
	$(BIN)/python -m fsdp2.infer runs/llama-10m-lora --prompt "The checkpoint " --new-tokens 200

##@ What FSDP2 can do, a flag each

.PHONY: train-prefetch
train-prefetch: $(VENV)/.installed  ## all-gather two groups ahead, and the root before the data is there
	$(TRAIN) --explicit-prefetching $(ARGS)

.PHONY: train-bf16
train-bf16: $(VENV)/.installed  ## compute in bf16, reduce and update in fp32
	$(TRAIN) --mixed-precision bf16 $(ARGS)

.PHONY: train-fp16
train-fp16: $(VENV)/.installed  ## compute in fp16 with a gradient scaler (2 min with AVX512-FP16, else up to 10)
	$(TRAIN) --mixed-precision fp16 $(ARGS)

.PHONY: train-offload
train-offload: $(VENV)/.installed  ## parameters, gradients and optimizer state in CPU memory
	$(TRAIN) --cpu-offload $(ARGS)

.PHONY: train-no-reshard
train-no-reshard: $(VENV)/.installed  ## keep parameters gathered between forward and backward
	$(TRAIN) --reshard-after-forward false $(ARGS)

.PHONY: train-all
train-all: $(VENV)/.installed  ## all memory savers together: fp16, offload, reshard of the root too (2 min with AVX512-FP16, else up to 10)
	$(TRAIN) --config configs/all-savers.toml $(ARGS)

.PHONY: train-dcp-api
train-dcp-api: $(VENV)/.installed  ## full state dicts by the DCP API
	$(TRAIN) --dcp-api $(ARGS)

.PHONY: train-accumulate
train-accumulate: $(VENV)/.installed  ## four microbatches a step; gradients stay sharded between them
	$(TRAIN) --grad-accumulation 4 --batch-size 16 $(ARGS)

.PHONY: train-clip
train-clip: $(VENV)/.installed  ## clip the gradient norm to 1.0
	$(TRAIN) --clip-grad-norm $(ARGS)

.PHONY: train-activation-checkpointing
train-activation-checkpointing: $(VENV)/.installed  ## recompute each block's activations in backward
	$(TRAIN) --activation-checkpointing $(ARGS)

.PHONY: train-compile
train-compile: $(VENV)/.installed  ## torch.compile each block (needs a C++ compiler)
	$(TRAIN) --compile $(ARGS)

.PHONY: train-hsdp
train-hsdp: NPROC = 4
train-hsdp: $(VENV)/.installed  ## HSDP: two replicas of a model sharded over two ranks, 4 ranks
	$(TRAIN) --replicas 2 $(ARGS)

.PHONY: train-tp
train-tp: $(VENV)/.installed  ## tensor parallelism: two ranks split each layer of a small Llama
	$(TRAIN) --model llama --model-size debug --seq-len 64 --max-steps 100 --tp 2 $(ARGS)

.PHONY: train-sp
train-sp: $(VENV)/.installed  ## sequence parallelism: two ranks have a piece of each sequence
	$(TRAIN) --model llama --model-size debug --seq-len 64 --max-steps 100 --sp 2 $(ARGS)

.PHONY: train-2d
train-2d: NPROC = 4
train-2d: $(VENV)/.installed  ## FSDP2 x tensor parallelism, 4 ranks
	$(TRAIN) --model llama --model-size debug --seq-len 64 --max-steps 100 --tp 2 $(ARGS)

##@ Other models and data

.PHONY: train-vit-fashion
train-vit-fashion: $(VENV)/.installed  ## the ViT on Fashion-MNIST (downloads, or --data-root)
	$(TRAIN) --config configs/vit-fashion-mnist.toml $(ARGS)

.PHONY: train-transformer
train-transformer: $(VENV)/.installed  ## the guide's transformer on random tokens (20 min)
	$(TRAIN) --config configs/transformer.toml $(ARGS)

.PHONY: train-cnn-mnist
train-cnn-mnist: $(VENV)/.installed  ## the CNN on MNIST (downloads, or --data-root)
	$(TRAIN) --config configs/cnn-mnist.toml $(ARGS)

##@ Other strategies, through the same loop

.PHONY: train-ddp
train-ddp: $(VENV)/.installed  ## the baseline: a full copy on each rank
	$(TRAIN) --strategy ddp $(ARGS)

.PHONY: train-fsdp1
train-fsdp1: $(VENV)/.installed  ## the baseline: FullyShardedDataParallel
	$(TRAIN) --strategy fsdp1 $(ARGS)

# DeepSpeed looks for ninja on the path.
ZERO = PATH="$(abspath $(BIN)):$$PATH" $(TRAIN) --strategy

.PHONY: train-zero1
train-zero1: $(VENV)/.deepspeed  ## DeepSpeed ZeRO: optimizer state sharded
	$(ZERO) zero1 $(ARGS)

.PHONY: train-zero2
train-zero2: $(VENV)/.deepspeed  ## DeepSpeed ZeRO: optimizer state and gradients sharded
	$(ZERO) zero2 $(ARGS)

.PHONY: train-zero3
train-zero3: $(VENV)/.deepspeed  ## DeepSpeed ZeRO: parameters sharded too
	$(ZERO) zero3 $(ARGS)

.PHONY: train-zero-offload
train-zero-offload: $(VENV)/.deepspeed  ## ZeRO-3 with parameters and optimizer state in CPU memory
	$(ZERO) zero3 --cpu-offload $(ARGS)

.PHONY: train-zero-nvme
train-zero-nvme: $(VENV)/.deepspeed  ## ZeRO-3 with parameters and optimizer state in files (needs libaio-dev)
	$(ZERO) zero3 --nvme-offload runs/nvme --mixed-precision $(ARGS)

##@ Measure, compare, move from FSDP1

.PHONY: train-snapshot
train-snapshot: $(VENV)/.installed  ## record what memory is allocated for, and show it
	$(TRAIN) --memory-snapshot --run-dir runs/snapshot-$(STAMP) --max-steps 12 $(ARGS)
	$(BIN)/python -m fsdp2.memory runs/snapshot-$(STAMP)

.PHONY: train-profile
train-profile: $(VENV)/.installed  ## trace the first 6 steps with torch.profiler, memory included
	$(TRAIN) --profile --max-steps 12 $(ARGS)

.PHONY: doctor
doctor: $(VENV)/.installed  ## is this cluster fit to train? Versions, limits, clocks, network
	$(TORCHRUN) -m fsdp2.doctor $(ARGS)

.PHONY: compare
compare: $(VENV)/.installed  ## DDP, FSDP1 and FSDP2 on one model: losses, time, memory, collectives
	$(BIN)/python -m fsdp2.compare --nproc $(NPROC) --strategies ddp,fsdp1,fsdp2 $(ARGS)

.PHONY: tune
tune: $(VENV)/.installed  ## the planner's best flags, measured beside the default on the ranks of this machine (10 min)
	$(BIN)/python -m fsdp2.tune --nproc $(NPROC) $(ARGS)

.PHONY: migrate-demo
migrate-demo: $(VENV)/.installed  ## a script and a checkpoint from FSDP1 to FSDP2: both losses side by side
	PATH="$(abspath $(BIN)):$$PATH" ARGS="$(ARGS)" bash docs/migration/demo.sh

.PHONY: bench
bench: $(VENV)/.bench  ## a step of ours beside other strategies and libraries (minutes; writes docs/notes/step-benchmark.md)
	PATH="$(abspath $(BIN)):$$PATH" $(TORCHRUN) benchmarks/steps.py $(ARGS)

.PHONY: plan-accuracy
plan-accuracy: $(VENV)/.installed  ## planned memory beside that of real runs (half an hour; writes docs/plan-accuracy.md)
	$(BIN)/python benchmarks/plan_accuracy.py $(ARGS)

.PHONY: scale
scale: $(VENV)/.installed  ## what grows with ranks, up to 4,096 of them in one process (ten minutes; writes docs/scale.md)
	$(BIN)/python benchmarks/scale.py $(ARGS)

.PHONY: plan-published
plan-published: $(VENV)/.installed  ## planned time beside published figures (half an hour; writes docs/notes/plan-published.md)
	$(BIN)/python benchmarks/plan_published.py $(ARGS)

##@ Through Ray

.PHONY: ray-train
ray-train: $(VENV)/.installed  ## the same training through Ray Train, 2 workers
	$(RAY_TRAIN) $(ARGS)

# Each variant through Ray: ray-train-bf16, ray-train-offload, …
RAY_TRAIN = $(BIN)/python -m launchers.ray_train --num-workers $(NPROC)
ray-train-%: $(VENV)/.installed
	@$(MAKE) --no-print-directory train-$* TRAIN='$$(RAY_TRAIN)'

# Shorter names for three of them.
ray-zero%:
	@$(MAKE) --no-print-directory ray-train-zero$*

.PHONY: parity
parity: $(VENV)/.installed  ## both launchers with the same flags, and every loss side by side
	$(BIN)/python -m launchers.parity --num-workers $(NPROC) $(ARGS)

.PHONY: ray-tune
ray-tune: $(VENV)/.installed  ## search over flags with Ray Tune: 4 learning rates, 3 epochs each
	$(BIN)/python -m launchers.ray_tune --num-workers $(NPROC) --search "lr=loguniform(1e-4, 1e-2)" --trials 4 --epochs 3 $(ARGS)

.PHONY: ray-fastest
ray-fastest: $(VENV)/.installed  ## the search of make tune on Ray's workers (10 min)
	$(BIN)/python -m launchers.ray_fastest --num-workers $(NPROC) $(ARGS)

##@ Develop

.PHONY: dev rules
dev: $(VENV)/.dev  ## what tests and linters need, in .venv: .venv/bin/python -m pytest tests/test_data.py

# Of the tests of resumes those of lists of flags alone.
rules: $(VENV)/.dev  ## what needs no ranks: lists of flags, docstrings, rooms, pages (a minute)
	$(BIN)/python -m pytest -q -n 2 -m "not slow" tests/test_rooms.py tests/test_docstrings.py tests/test_config.py \
	  tests/test_docs.py tests/docs/test_reference.py tests/test_other_trainers.py tests/test_resume.py -k "not test_resume or flag" $(ARGS)

MIGRATION = tests/migrate tests/rewriter tests/upstream
# What reads runs or starts them, and is itself read by no training; and bad files in their hundreds. Of the planner, which
# executes the training, memory and saves stay; of URLs, whole runs and leases, without failing servers.
PLANNER = $(patsubst %,tests/plan/test_%.py,calibration command page published search second_opinion time)
SERVERS = tests/remote/test_failures.py tests/remote/test_files.py
APART = $(MIGRATION) $(PLANNER) $(SERVERS) tests/commands tests/comparing tests/doctor tests/fuzz tests/memory \
  tests/slurm tests/test_gpu_lane.py tests/tune
TOOLS = tests/plan tests/tune tests/comparing tests/doctor tests/memory tests/commands tests/launchers

test: $(VENV)/.dev  ## what a change of training can break, with the newest torch (10 min)
	$(TOX) newest -- $(addprefix --ignore=,$(APART)) -m "not slow and not ray and not thorough" $(ARGS)

.PHONY: test-ci test-all test-book test-migration test-tools
test-ci: $(VENV)/.dev  ## what .ci/run looks at: all suites, a case of each test but those of NIGHT in tests/thorough.py
	$(TOX) newest -- -m "not slow and not ray and not nightly" $(ARGS)

test-all: $(VENV)/.dev  ## all tests: further cases (tests/thorough.py), moving from FSDP1, the other tools (26 to 41 min)
	$(TOX) newest -- $(ARGS)

test-book: $(VENV)/.dev  ## the tests of training itself: all but those of the next two
	$(TOX) newest -- $(addprefix --ignore=,$(MIGRATION) $(TOOLS)) $(ARGS)

test-migration: $(VENV)/.dev  ## the tests of moving from FSDP1: options, code, checkpoints
	$(TOX) newest -- $(MIGRATION) $(ARGS)

test-tools: $(VENV)/.dev  ## the tests of planner, tuner, comparison, doctor, memory pages, checkpoint command and launchers
	$(TOX) newest -- $(TOOLS) $(ARGS)

test-slow: $(VENV)/.dev  ## the tests that take minutes each
	$(TOX) newest -- -m slow $(ARGS)

test-ray: $(VENV)/.dev  ## the tests on a Ray cluster (minutes)
	$(TOX) ray -- $(ARGS)

test-zero: $(VENV)/.dev  ## the tests of DeepSpeed's strategies (minutes; builds DeepSpeed)
	$(BIN)/tox run -e zero -- $(ARGS)

.PHONY: test-slurm
test-slurm: $(VENV)/.dev  ## jobs under a real SLURM of two nodes on this machine (4 min; sh tests/slurm/install.sh)
	$(TOX) slurm -- $(ARGS)

test-oldest: $(VENV)/.dev  ## the same tests with the oldest torch supported (20 min)
	$(BIN)/tox run -e oldest -- $(ARGS)

test-gpu: $(VENV)/.dev  ## the tests that need a GPU, some of them two (FSDP2_TEST_DEVICE=cpu: the same on the CPU)
	$(TOX) gpu -- $(ARGS)

.PHONY: gpu-first
gpu-first:  ## the three commands for the first half hour on a GPU, and what they need
	@$(PYTHON) -m tests.gpu.first

.PHONY: bench-gpu
bench-gpu: $(VENV)/.installed  ## the documentation's tables with GPU rows, within 9 minutes
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# For a machine that has no network and only a Python with torch (docs/notes/gpu.md): that Python, and what fits its torch.
GPU_PYTHON ?= 3.12
GPU_TORCHVISION ?= 0.26.0
GPU_PLATFORMS = $(foreach n,28 27 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform any

.PHONY: gpu-bundle
gpu-bundle: $(BIN)/uv  ## gather in build/wheels what a borrowed GPU machine may lack (GPU_PYTHON=3.12)
	rm -rf build/wheels build/site
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
		--python-version $(GPU_PYTHON) $(GPU_PLATFORMS) -d build/wheels torchvision==$(GPU_TORCHVISION) \
		blake3 fsspec iniconfig numpy packaging pillow pluggy pygments pytest torchao tqdm
	du -sh build/wheels

.PHONY: models
models: $(VENV)/.dev  ## every architecture that transformers knows, sharded beside a plain loop (95 min; writes docs/models.md)
	$(TOX) models -- $(ARGS)

.PHONY: compositions mutants
compositions: $(VENV)/.dev  ## every pair of features beside one process (8 min; writes docs/compositions.md)
	$(BIN)/python -m tests.compositions.page $(ARGS)

mutants: $(VENV)/.dev  ## faults put in, one at a time: which cell notices? (half an hour at most; writes docs/compositions.md)
	$(BIN)/python -m tests.compositions.mutants

chaos: $(VENV)/.dev  ## kill and disturb real runs at 500 moments, resume each, compare bit for bit (half an hour)
	$(TOX) chaos -- $(ARGS)

.PHONY: chaos-replicas
chaos-replicas: $(VENV)/.dev  ## lose a node of runs with two replicas at 100 moments, go on from the other's memory (15 min)
	$(TOX) chaos-replicas -- $(ARGS)

FUZZ_MINUTES ?= 60
fuzz: $(VENV)/.dev  ## bad input of every kind, each time another, for an hour (FUZZ_MINUTES=5)
	$(TOX) fuzz -- --minutes $(FUZZ_MINUTES) $(ARGS)

.PHONY: docs
docs: $(VENV)/.docs  ## the documentation as a site in build/docs; fails at a link that leads nowhere
	PYTHONPATH=. $(BIN)/zensical build --strict --clean
	@echo "read it: python3 -m http.server --directory build/docs"

lint: $(VENV)/.dev  ## ruff and the type checker
	$(TOX) lint

format: $(VENV)/.dev  ## let ruff rewrite the layout
	$(TOX) format

clean:  ## remove environments and caches, but not runs
	rm -rf .venv .tox build .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
