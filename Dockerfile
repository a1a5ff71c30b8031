# attnbench for a CPU, or for NVIDIA GPUs, whose driver stays that of the host:
#   docker build -t attnbench .
#   docker build -t attnbench:cuda --build-arg TORCH=cu130 .
#   docker run --rm -v "$PWD/results:/work/results" attnbench run quick
#   docker run --rm --gpus all -v "$PWD/results:/work/results" attnbench:cuda run gpu
FROM python:3.12.12-slim-bookworm

# The folder of PyTorch's wheels: cpu, or that of a CUDA version, whose libraries the wheel brings.
ARG TORCH=cpu

# Compilers of torch and of Triton call one. Debian keeps a single version of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY attnbench attnbench
COPY suites suites
RUN extra="" \
    && if [ "$TORCH" != cpu ]; then extra="[gpu]"; fi \
    && pip install --no-cache-dir -c constraints.txt --extra-index-url "https://download.pytorch.org/whl/$TORCH" ".$extra" \
    && useradd --create-home --uid 1000 bench \
    && install --directory --owner bench /work

USER 1000
WORKDIR /work
RUN attnbench --help
ENTRYPOINT ["attnbench"]
CMD ["--help"]
