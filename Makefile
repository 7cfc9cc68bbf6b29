# Two commands do everything on a fresh machine: `make demo` and `make test`.
VENV ?= .venv
# Any Python can begin; the environment is made with PYTHON, or with the first Python 3.11 to 3.13 that is complete.
BEGIN = $(or $(PYTHON),$(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	command -v $$p >/dev/null && echo $$p && break; done),$(error no Python: install Python 3.11, 3.12 or 3.13))
BIN = $(VENV)/bin
# An editable installation knows its modules: it is made again when one has come, gone or moved.
MODULES := $(shell find src -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
STAMP = $(VENV)/.installed-$(MODULES)
# Test processes; each starts engines of its own.
TESTERS ?= 2
PORTABLE = OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1

.PHONY: install native demo test lint clean

install: $(STAMP)
	$(if $(PYTHON),@$(BEGIN) scripts/install.py $(VENV) --python "$(PYTHON)" --check)

$(STAMP): requirements/cpu.lock pyproject.toml CMakeLists.txt scripts/install.py $(wildcard csrc/*)
	$(BEGIN) scripts/install.py $(VENV) --python "$(PYTHON)"
	rm -f $(VENV)/.installed*
	touch $@

# Rebuild the C++ modules after an edit below csrc/ (one build at a time).
native:
	flock /tmp/paceline-native.lock $(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/fill_numbers.py --check
	$(BIN)/python scripts/draw_tail.py --check

test: lint
	$(PORTABLE) $(BIN)/python -m pytest --numprocesses $(TESTERS) --no-loadscope-reorder

demo: install
	$(BIN)/paceline train recipes/countdown.yaml --out runs/demo --overwrite
	$(BIN)/python -m paceline.tasks.inflation assets/countdown-policy runs/demo-target \
		--hidden 1024 --intermediate 2816 --layers 16 --heads 16 --kv-heads 8
	$(BIN)/paceline bench runs/demo-target recipes/countdown-prompts.jsonl --model-drafter assets/countdown-drafter \
		--methods plain,none,suffix,suffix+model --dtype bfloat16 --samples 4 --max-tokens 640 --repetitions 1 --json runs/demo/bench.json
	$(BIN)/paceline report runs/demo

clean:
	rm -rf build $(VENV)
