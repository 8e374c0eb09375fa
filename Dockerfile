# The environment that the workflow runs in, with the workflow: docs/containers.md. It has not been built or run yet.
#   docker build --tag shardwright .
#   docker build --tag shardwright --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .     without CUDA
FROM python:3.11-slim-bookworm

# Where pip finds torch, if not where it looks anyway.
ARG TORCH_INDEX=""

# A compiler for torch.compile, cairo for pictures as PNG, make for the commands of the README.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libcairo2 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shardwright
COPY VERSION README.md pyproject.toml constraints.txt requirements-dev.txt ./
COPY .ci .ci
COPY core core
COPY stages stages
COPY workflow/plugins workflow/plugins
# The exact versions of constraints.txt, as `make setup` takes them.
RUN .ci/venv .venv "$TORCH_INDEX"

COPY . .
# So that make takes the environment for up to date.
RUN touch .venv/.ready
ENV PATH=/opt/shardwright/.venv/bin:$PATH
