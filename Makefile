# Each target but gpu sets up what it needs: a fresh clone needs nothing but Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS)
AGENTS := @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.197
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test check lint gpu kernels soak replicas clients lm-eval wheel sdist browser screenshot clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(INSTALL) --editable ".[test,dev]"
	touch $@

$(VENV)/.installed-browser: $(VENV)/.installed-test tools/install_chromium.sh
	$(INSTALL) --editable ".[browser]"
	tools/install_chromium.sh
	touch $@

run: $(VENV)/.installed  ## decode the example prompts with the checkpoint that ships
	$(BIN)/python -m compiled_mtp.run --prompt-file examples/prompts.jsonl --mtp-step 3 --compare

test: $(VENV)/.installed-test  ## the suite that CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not kernels and not soak and not browser and not replicas and not clients and not lm_eval"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## before every commit

kernels: $(VENV)/.installed-test  ## compile the full kernel table for sm_80, sm_90, sm_100 (no GPU needed)
	$(BIN)/python -m pytest -q -m kernels

wheel: $(VENV)/.installed-test  ## the wheel in an environment of its own, tried as a new user would
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m soak tests/cli/test_wheel.py

sdist: $(VENV)/.installed-test  ## the sdist, unpacked, its tests run where it lies
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m soak tests/cli/test_sdist.py

$(VENV)/.installed-ray: $(VENV)/.installed-test
	$(INSTALL) --editable ".[test,ray]"
	touch $@

replicas: $(VENV)/.installed-ray  ## two replicas on Ray Serve under load, one killed, one added and taken away
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m replicas

$(VENV)/.installed-clients: $(VENV)/.installed-test
	$(INSTALL) --editable ".[test,clients]"
	if command -v npm; then npm install --silent --no-fund --no-audit --prefix $(VENV)/npm $(AGENTS); fi
	touch $@

clients: $(VENV)/.installed-clients  ## LangChain, LiteLLM, openai-agents and, with npm, two agents for the terminal
	PATH=$(CURDIR)/$(VENV)/npm/node_modules/.bin:$$PATH OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m clients tests/clients

$(VENV)/.installed-lm-eval: $(VENV)/.installed-test
	$(INSTALL) --editable ".[test,lm-eval]"
	touch $@

lm-eval: $(VENV)/.installed-lm-eval  ## lm-eval against the service and transformers, on two local tasks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m lm_eval tests/lm_eval

soak: $(VENV)/.installed-test  ## long random traffic
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m soak --hypothesis-profile=default

browser: $(VENV)/.installed-browser  ## the page of the service in headless Chromium, which apt-get installs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser tests/browser

screenshot: $(VENV)/.installed-browser  ## docs/page.png and docs/page-dark.png
	OMP_NUM_THREADS=1 $(BIN)/python tools/page_screenshot.py

gpu:  ## needs a CUDA device and the packages already installed
	$(PYTHON) -m pytest -q -m gpu tests

clean:
	rm -rf $(VENV) build dist *.egg-info
