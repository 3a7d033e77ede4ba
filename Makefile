# Two commands do everything: `make demo` and `make test`. Each makes its own .venv with pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test format box clean

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.run

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fast,figures,lite0]'
	touch $@

demo: $(VENV)/.run
	$(BIN)/p3net demo

test: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The model in the box, anew, in some hours; its card, README.md, is written by hand and stays: make box SHANGHAITECH=the folder of part_A and part_B
BOX_DATA = sha:$(SHANGHAITECH)/part_A + shb:$(SHANGHAITECH)/part_B + synthetic:7?train=30&val=0&test=0&most=0

box: $(VENV)/.run
	@test -d '$(SHANGHAITECH)/part_A' || { echo 'make box SHANGHAITECH=the folder of part_A and part_B'; exit 2; }
	$(BIN)/p3net train '$(BOX_DATA) + surfaces:7?train=48' --config experiments/recipes/box.yaml --out runs/box-1
	for round in 2 3 4; do \
	  $(BIN)/p3net train '$(BOX_DATA) + surfaces:7?train=72' --config experiments/recipes/box-$$round.yaml \
	    --from runs/box-$$((round - 1)) --out runs/box-$$round || exit; \
	done
	$(BIN)/p3net export runs/box-4 runs/box --half --lists
	rm -r src/p3net/box/split
	cp -r runs/box/config.json runs/box/model.safetensors runs/box/split src/p3net/box

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build
