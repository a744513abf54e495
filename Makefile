# make quick  a trained policy that is told one task after another, in a minute
# make demo   the main experiment, from an empty folder to a table, in an environment it makes itself
# make test   the test suite
# make long   training at the paper's length, on a GPU
# make install, make lint, make docs, make notebooks, make constraints, make clean

VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help quick demo test long install lint docs notebooks constraints clean

help: ## what can be made
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 14

quick: $(VENV)/installed ## a trained policy that is told one task after another
	$(BIN)/python evals/told_tasks.py --run walker

demo: $(VENV)/installed ## explore, train and evaluate on walker_run with this machine's devices
	$(BIN)/python experiments/exorl_at_ring.py --task walker_run

test: $(VENV)/installed-dev ## the tests, but for those marked slow
	$(BIN)/python -m pytest -n 2 --dist worksteal

# 512K tokens a chain for 128 trajectories, and as many in all for 32. UPDATES is that of the longer chains.
TRAJECTORIES ?= 128 32
UPDATES ?= 180
long: $(VENV)/installed ## chains of 128 and of 32 trajectories of 1,000 steps, on equally many tokens; on a GPU
	for count in $(TRAJECTORIES); do \
	  $(BIN)/python experiments/exorl_at_ring.py --task walker_run --conditioning return --preset demo \
	    --action-repeat 1 --num-trajectories $$count --updates $$(($(UPDATES) * $(firstword $(TRAJECTORIES)) / $$count)) \
	    --output runs/long-$$count || exit; \
	done

install: $(VENV)/installed ## the environment alone, in .venv (elsewhere: VENV=folder)

lint: $(VENV)/installed-dev ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: $(VENV)/installed-docs ## the documentation, in site/
	rm -rf build/pages site
	mkdir -p build/pages/experiments
	cp -r README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff docs build/pages
	cp -r experiments/results build/pages/experiments
	$(BIN)/jupyter nbconvert --to markdown build/pages/docs/notebooks/*.ipynb
	sed -i.before 's/\.ipynb)/.md)/g' build/pages/*.md build/pages/docs/*.md build/pages/docs/notebooks/*.md
	find build/pages -name '*.before' -delete
	$(BIN)/zensical build --strict --clean

notebooks: $(VENV)/installed-dev $(VENV)/installed-docs ## execute docs/notebooks anew
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

constraints: ## resolve every dependency anew, on python3.11 and python3.12, into constraints.txt
	python3 .ci/constraints.py python3.11 python3.12

clean: ## removes the environment and caches; data/ and runs/ stay
	rm -rf $(VENV) build dist site .cache .pytest_cache .ruff_cache .hypothesis
	find agentic_ring data_prep evals experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The extra dev holds scripts.
$(VENV)/installed: EXTRA := scripts
$(VENV)/installed-dev: EXTRA := dev
$(VENV)/installed $(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/usable
	@echo "installing the versions of constraints.txt into $(VENV)"
	$(PIP_INSTALL) -e '.[$(EXTRA)]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

# An environment that is there already and has pip is kept. Else the first Python of a right version makes it.
$(VENV)/usable:
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then touch $@; exit; fi; \
	for python in $(or $(PYTHON),python3 python3.12 python3.11); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
	  then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "error: Python 3.11 or 3.12 is needed and none was found as: $(or $(PYTHON),python3 python3.12 python3.11)." >&2; \
	  echo "labmaze, which dm_control needs, has wheels for these two versions only. Install one, or name it:" >&2; \
	  echo "  make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),install)" >&2; \
	  exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "error: $$found comes without the standard modules venv and ensurepip, so it cannot make $(VENV)." >&2; \
	  echo "On Debian and Ubuntu: apt install $$("$$found" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; \
	  exit 1; \
	fi; \
	"$$found" -m venv --clear $(VENV) && touch $@
